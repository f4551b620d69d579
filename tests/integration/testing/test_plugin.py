"""The pytest plugin, in sessions of pytest of their own."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
LOADED = ("-p", "phalanx.testing")  # also where it is not installed

USUAL = """
    import os, subprocess, sys
    import pytest
    from phalanx import Executor, WorkerActor

    class Liar(WorkerActor):
        def one(self):
            return 2

    def build():
        return Executor(Liar, 1, launch={'preload': ()})

    def lying():
        def traffic(executor, chance):
            assert executor.call("one", timeout=30, rank=0) == 1, "one is not one"
        return build(), traffic
"""


def run(pytester: pytest.Pytester, tests: str, *words: str) -> pytest.RunResult:
    pytester.makepyfile(USUAL + tests)
    return pytester.runpytest_subprocess(*LOADED, *words, timeout=100)


def test_a_run_that_breaks_an_invariant_fails_its_test_and_tells_the_seed(
    pytester: pytest.Pytester,
) -> None:
    result = run(
        pytester,
        """
    pytestmark = pytest.mark.phalanx_chaos(seed=3, rate=1.0, callers=1)

    @pytest.mark.phalanx_chaos(duration=1.0)
    def test_lying(phalanx_chaos):
        phalanx_chaos(lying)

    def test_that_judges_itself(phalanx_chaos):
        result = phalanx_chaos(lying, check=False, duration=1.0)
        assert result.plan.seed == phalanx_chaos.seed
        assert {each.invariant for each in result.violations} == {"right_answers"}

    def test_that_tries_again(phalanx_chaos):
        def broken():
            raise KeyError("of the factory")

        for _ in range(2):
            with pytest.raises(KeyError, match="of the factory"):
                phalanx_chaos(broken, duration=1.0)
        assert [each.name for each in phalanx_chaos.records] == ["chaos-1", "chaos-2"]
    """,
        "--chaos-seed=41",
    )

    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(
        [
            "*right_answers*",
            "*one is not one*",
            "*FAIL: right_answers*",
            "seed 41; again with --chaos-seed=41",
            "record *chaos-1",
        ]
    )
    # Where the variable CI is set, the summary of pytest repeats the failure as a whole.
    (record,) = {
        Path(line.removeprefix("record").strip())
        for line in result.outlines
        if line.startswith("record ")
    }
    noted = json.loads((record / "run.json").read_text())
    assert noted["target"].startswith("test_a_run_that_breaks_an_invariant")
    assert noted["target"].endswith(":lying")


def test_a_run_that_holds_passes_and_a_test_that_fails_of_itself_tells_the_seed_too(
    pytester: pytest.Pytester,
) -> None:
    result = run(
        pytester,
        """
    @pytest.mark.phalanx_chaos(seed=5, duration=1.0, rate=2.0, faults=("kill",))
    def test_kills(phalanx_leak_check, phalanx_chaos):
        result = phalanx_chaos(build)
        assert result.plan.seed == 5
        assert result.calls["value"] > 0
        assert False, "of its own"
    """,
    )

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*of its own*", "seed 5; again with --chaos-seed=5"])


def test_what_a_test_leaves_behind_is_told_and_does_not_fail_the_next(
    pytester: pytest.Pytester,
) -> None:
    result = run(
        pytester,
        """
    from phalanx.testing import LeakScope

    kept = []

    @pytest.fixture(scope="session")
    def phalanx_leak_scope(tmp_path_factory):
        return LeakScope(folders=(tmp_path_factory.mktemp("mine"),), patience=0.3)

    def test_clean(phalanx_leak_check):
        with build() as group:
            assert group.call("one", timeout=30, rank=0) == 2

    def test_a_process(phalanx_leak_check):
        kept.append(subprocess.Popen(["sleep", "1000"]))

    def test_a_stray(phalanx_leak_check):
        stray = "import subprocess; subprocess.Popen(['sleep', '999'], start_new_session=True)"
        subprocess.run([sys.executable, "-c", stray], check=True)

    def test_a_descriptor(phalanx_leak_check):
        kept.append(os.open("/dev/zero", os.O_RDONLY))

    def test_a_file(phalanx_leak_check, phalanx_leak_scope):
        (phalanx_leak_scope.folders[0] / "forgotten").touch()

    def test_clean_again(phalanx_leak_check):
        kept[0].wait(10)

    @pytest.fixture
    def group(phalanx_runtime):
        with Executor(Liar, 1, runtime=phalanx_runtime) as executor:
            yield executor

    @pytest.mark.parametrize("time", [1, 2])
    def test_that_shares_a_runtime(phalanx_leak_check, group, time):
        assert group.call("one", timeout=30, rank=0) == 2
    """,
        "-rA",
    )

    result.assert_outcomes(passed=8, errors=4)
    result.stdout.fnmatch_lines_random(
        [
            "left behind:",
            "  process: *sleep 1000",
            "  process: *sleep 999",
            "  descriptor: /dev/zero (1)",
            "  file: */forgotten",
        ]
    )


def test_before_a_fixture_is_used_nothing_else_is_imported_and_the_environment_is_kept(
    pytester: pytest.Pytester,
) -> None:
    pytester.makepyfile(
        """
        import os, sys
        from phalanx.testing.plugin import _SESSION as SESSION

        def test_nothing(request):
            assert request.config.getoption("--chaos-seed") is None
            assert {name for name in sys.modules if name.split(".")[0] == "phalanx"} == {
                "phalanx",
                "phalanx.testing",
                "phalanx.testing.plugin",
            }
            assert not {"torch", "zmq", "numpy", "structlog", "pykka"} & set(sys.modules)
            assert SESSION not in os.environ.get("PHALANX_TREE", "")

        def test_leaks(phalanx_leak_check):
            assert SESSION in os.environ["PHALANX_TREE"]
        """
    )

    pytester.runpytest_subprocess(*LOADED, timeout=100).assert_outcomes(passed=2)


READ = "ERROR: *test_it: @pytest.mark.phalanx_chaos: "


@pytest.mark.parametrize(
    ("mark", "fixture", "words", "told"),
    [
        ("seed='seven'", "phalanx_chaos", (), f"{READ}*seed='seven'"),
        ("faults=('explode',)", "phalanx_chaos", (), f"{READ}*unknown fault"),
        ("fault=('kill',)", "phalanx_chaos", (), f"{READ}*unexpected keyword argument 'fault'"),
        ("7", "phalanx_chaos", (), f"{READ}*by keyword, not (7,)"),
        ("seed=1", "", (), "*does not ask for the fixture `phalanx_chaos`"),
        ("seed=1", "phalanx_chaos", ("--chaos-seed=seven",), "*--chaos-seed*'seven'"),
    ],
)
def test_a_marker_or_a_seed_that_makes_no_sense_is_a_usage_error(
    pytester: pytest.Pytester, mark: str, fixture: str, words: tuple[str, ...], told: str
) -> None:
    pytester.makepyfile(
        f"import pytest\n@pytest.mark.phalanx_chaos({mark})\ndef test_it({fixture}): ..."
    )

    result = pytester.runpytest_inprocess(*LOADED, *words)

    assert result.ret is pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"{told.replace('[', '[[]')}*"])


def test_spread_over_processes_a_marker_that_makes_no_sense_fails_its_test_alone(
    pytester: pytest.Pytester,
) -> None:
    pytest.importorskip("xdist")
    wrong = '@pytest.mark.phalanx_chaos(faults="explode")\ndef test_it(phalanx_chaos): ...'
    pytester.makepyfile(f"import pytest\n{wrong}\ndef test_another(): ...")

    result = pytester.runpytest_subprocess(*LOADED, "-n", "1", timeout=100)

    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(
        ["*test_it: @pytest.mark.phalanx_chaos: faults='explode': unknown*"]
    )


def test_a_marker_chaos_of_another_plugin_is_left_alone(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("import pytest\n@pytest.mark.chaos(level=3)\ndef test_it(): ...")

    pytester.runpytest_inprocess(*LOADED).assert_outcomes(passed=1)


def test_the_names_of_an_earlier_release_work_and_warn(pytester: pytest.Pytester) -> None:
    result = run(
        pytester,
        """
    from phalanx.testing import LeakScope

    @pytest.fixture(scope="session")
    def leak_scope():
        return LeakScope(patience=7.0)

    @pytest.mark.chaos(duration=1.0, seed=5)
    def test_it(leak_check, chaos, phalanx_chaos, phalanx_leak_scope):
        assert chaos is phalanx_chaos
        assert chaos.seed == 5
        assert phalanx_leak_scope.patience == 7.0
    """,
    )

    result.assert_outcomes(passed=1)
    for name in ("fixture chaos", "fixture leak_check", "@pytest.mark.chaos"):
        result.stdout.fnmatch_lines([f"*PytestDeprecationWarning: *{name} is now *phalanx_*"])


def test_the_plugin_is_found_by_its_entry_point() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    assert project["entry-points"]["pytest11"] == {"phalanx.testing": "phalanx.testing"}
