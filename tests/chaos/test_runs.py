"""Chaos runs, short and seeded: faults of every kind, at every moment, to everybody."""

from __future__ import annotations

import random
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.chaos import targets
from tests.chaos.targets import in_turn

from phalanx.actors import POINTS, Executor, installed
from phalanx.chaos import Chaos, ChaosResult, Target, driver_process, run_chaos
from phalanx.chaos.history.events import (
    CallBegan,
    CallEnded,
    CallIssued,
    CallSent,
    CallSettled,
    DriverEnded,
    FaultInjected,
    GroupEnded,
    RankDied,
)
from phalanx.chaos.history.journal import Journal, read_history
from phalanx.chaos.instrumentation.driver_probe import DriverProbe
from phalanx.cli import main
from phalanx.runtime import Runtime
from phalanx.supervision import (
    ExecutorClosed,
    Intensity,
    PhalanxError,
    RuntimeFault,
    SpecError,
    Strategy,
)

pytestmark = pytest.mark.timeout(180)


def clean(target: Any, **plan: Any) -> ChaosResult:
    """Return what came of a run in which every invariant has to hold."""
    result = run_chaos(target, **plan)
    assert result.violations == (), result.render()
    return result


def struck(result: ChaosResult) -> set[tuple[str, str]]:
    return {(each.fault, each.point) for each in result.history.every(FaultInjected)}


# --- runs that hold -----------------------------------------------------------------------


def test_hangs_that_wait_behind_a_hang_are_not_begun_after_the_end(runtime: Runtime) -> None:
    def build() -> Any:
        return targets.Quiet(runtime, 1)(), targets.calling_in_rows

    hangs = in_turn(*["hang:0"] * 9, gap=0.0, seconds=1.0)
    result = clean(build, duration=2.5, callers=1, call_timeout=0.5, schedule=hangs)

    assert result.faults[0].done < 6  # three take place within its time


def test_a_rank_that_stays_up_records_its_calls_under_the_epoch_they_were_sent_in(
    runtime: Runtime,
) -> None:
    target = targets.Quiet(runtime, strategy=Strategy.REST_FOR_ONE)

    result = clean(target, duration=1.0, schedule=in_turn("kill:1"))

    sent = {each.wire: each.epoch for each in result.history.every(CallSent)}
    shapes = {each.call: each.shape for each in result.history.every(CallIssued)}
    every_began = result.history.every(CallBegan)
    began = [each for each in every_began if shapes[each.call] in ("collective", "gather")]
    assert {each.epoch for each in began if (each.rank, each.incarnation) == (0, 1)} == {1, 2}
    assert all(each.epoch == sent[each.wire] for each in began)


def test_kills_lose_nothing_where_survivors_are_kept(torch_runtime: Runtime) -> None:
    target = targets.Reducing(torch_runtime, "keep")
    schedule = in_turn("kill:0", "kill:1", gap=2.0)

    result = clean(target, duration=4.5, schedule=schedule, callers=2)

    assert result.deaths > 0


def test_a_fault_at_each_moment_is_struck_there(runtime: Runtime) -> None:
    # One that is to come in a restart has one made, unless one goes on already: so it comes first.
    points = sorted(POINTS, key=lambda point: point != "restarting")
    missing = set(POINTS)
    for seed in range(1, 6):  # on a busy machine the time may be up before the last of them
        points = [point for point in points if point in missing]
        schedule = in_turn(*(f"kill@{point}" for point in points), gap=0.5)
        result = clean(targets.Quiet(runtime), duration=6.0, schedule=schedule, seed=seed)
        missing -= {point for _, point in struck(result)}
        if not missing:
            return
    pytest.fail(f"nothing was struck at: {missing}")


def test_faults_that_a_worker_does_to_itself_are_done(runtime: Runtime) -> None:
    names = ["segv", "exit", "raise", "memory", "slow", "grandchild", "start_raise"]
    target = targets.Quiet(runtime, strategy=Strategy.ONE_FOR_ONE)

    result = clean(target, duration=3.5, schedule=in_turn(*names, gap=0.3), seed=2)

    assert {fault for fault, _ in struck(result)} == set(names)
    errors = {ended.error for ended in result.history.every(CallEnded)}
    assert {"InjectedError", "MemoryError"} <= errors


def test_hangs_and_stops_end_by_themselves_or_by_a_limit(runtime: Runtime) -> None:
    schedule = in_turn("hang:0", "stop", "slow:group", seconds=1.2)
    target = targets.Quiet(runtime, strategy=Strategy.ONE_FOR_ONE)

    result = clean(target, duration=3.0, schedule=schedule, seed=3, call_timeout=0.5)

    assert any("unresponsive" in died.reason for died in result.history.every(RankDied))


def test_the_processes_around_the_ranks_may_die_too() -> None:
    helpers = ("kill:zygote", "kill:logs", "kill:standby")
    faults = (*helpers, "kill:group", "stop:zygote", "kill:guardian")
    schedule = in_turn(*faults, gap=0.3, seconds=0.3)

    result = clean(targets.with_a_spare, duration=3.0, schedule=schedule, seed=4)

    assert len(result.history.every(FaultInjected)) >= len(faults)


def test_the_groups_of_a_tree_are_struck_like_any_other() -> None:
    schedule = in_turn(*["kill"] * 4, gap=0.3)

    result = clean(targets.tree, duration=3.0, schedule=schedule)

    assert {died.group for died in result.history.every(RankDied)} == {"root/a", "root/b"}


def test_the_store_of_a_process_group_may_die(torch_runtime: Runtime) -> None:
    schedule = in_turn("kill:store", "kill:0")
    target = targets.Reducing(torch_runtime)

    result = clean(target, duration=3.0, schedule=schedule, callers=2)

    assert len(result.history.every(FaultInjected)) == 2


def test_an_exception_before_the_operation_of_one_rank_breaks_nothing(
    torch_runtime: Runtime,
) -> None:
    schedule = in_turn("raise_before:0", "raise_before:1", gap=0.5)
    target = targets.Reducing(torch_runtime)

    result = clean(target, duration=4.0, schedule=schedule, callers=2)

    assert result.history.every(FaultInjected)
    assert any("out of step" in died.reason for died in result.history.every(RankDied))


def test_a_driver_may_be_killed_at_a_moment_of_its_own_or_of_a_worker() -> None:
    schedule = in_turn(
        "kill:driver@before_send",
        "stop:driver@running",
        "kill:driver@after_reply",
        gap=1.2,
        seconds=0.2,
    )

    result = clean(targets.one_for_one, duration=5.0, schedule=schedule, seed=5)

    done = result.history.every(FaultInjected)
    assert [each.point for each in done] == ["before_send", "running", "after_reply"]
    assert [life.closed for life in result.history.every(DriverEnded)] == [False, False, True]


def test_a_fault_that_killed_a_driver_does_not_come_again_where_the_clocks_differ(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    observe = driver_process.DriverRuns._observe

    def behind(*words: Any) -> Any:
        at, raised = observe(*words)
        return at - 1.0, raised

    monkeypatch.setattr(driver_process.DriverRuns, "_observe", behind)
    schedule = in_turn("kill:driver@before_send")

    result = clean(targets.one_for_one, duration=2.5, schedule=schedule)

    assert [life.closed for life in result.history.every(DriverEnded)] == [False, True]


def test_a_group_that_gives_up_is_built_again_where_it_keeps_its_intensity(
    runtime: Runtime,
) -> None:
    schedule = in_turn(*["kill"] * 5, gap=0.3)
    target = targets.Quiet(runtime, intensity=Intensity(1, 60.0))

    result = clean(target, duration=5.0, schedule=schedule, keep_intensity=True)

    assert len(result.history.groups) > 1


def test_a_tree_whose_root_gives_up_is_built_again_where_it_keeps_its_intensity() -> None:
    schedule = in_turn(*["kill"] * 4)

    result = clean(targets.brittle, duration=2.5, schedule=schedule, keep_intensity=True)

    assert " gave up" in result.render()
    ends = [each.at for each in result.history.every(GroupEnded) if each.cause]
    assert ends
    assert max(built.at for built in result.history.groups.values()) > min(ends)


# --- what a run finds ---------------------------------------------------------------------


def misspelt(executor: Executor[Any], _: random.Random) -> None:
    executor.collective_rpc("no_such_method", 5.0)


def wrong(executor: Executor[Any], _: random.Random) -> None:
    raise PhalanxError("the answer is wrong")


def of_torch(executor: Executor[Any], _: random.Random) -> None:
    raise RuntimeError("epoch 3: WRONG RESULT")


@pytest.mark.parametrize("traffic", [misspelt, wrong, of_torch])
def test_an_error_that_no_fault_explains_is_told(
    runtime: Runtime, traffic: Any, tmp_path: Path
) -> None:
    def target() -> Any:
        return targets.Quiet(runtime)(), traffic

    schedule = in_turn("kill:0")
    plan = Chaos(duration=1.0, schedule=schedule, callers=1, record=tmp_path / "run")
    result = run_chaos(target, plan)

    assert {violation.invariant for violation in result.violations} == {"right_answers"}


# --- mistakes -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "told"),
    [
        ("tests.chaos.targets:absent", "has no 'absent'"),
        ("tests.chaos.targets:VALUE", "not a factory"),
        ("tests.chaos.targets:wants_more", "takes no arguments"),
        ("tests.chaos.targets", "has no 'chaos'"),
        ("there_is.no.such:module", "cannot be imported"),
        ("tests.chaos.targets:", "module:factory"),
        ("", "module:factory"),
        (7, "not a factory"),
        (targets.returns_nonsense, "returned a int"),
    ],
)
def test_a_target_that_is_none_is_refused(target: Any, told: str) -> None:
    with pytest.raises(SpecError, match=told):
        run_chaos(target, duration=2.0)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("tests.chaos.targets:inline",), 'not launch="inline"'),
        (("tests.chaos.targets:leaves",), "ended the program (3) instead of returning"),
        (("tests.chaos.targets:build", "--targets", "2"), "there is no such rank: "),
        (("tests.chaos.targets:returns_nonsense", "--faults", "kill:driver"), "returned a int"),
        (("tests.chaos.targets:build", "--out", "/proc/run"), "record='/proc/run': cannot be"),
        (("tests.chaos.targets:build", "--report", "/proc/page"), "report='/proc/page': "),
        (("tests.chaos.targets:build", "--report", "absent/page"), "report='absent/page'"),
        (("tests.chaos.targets:build", "--report", "n" * 300), "File name too long"),
        (("tests.chaos.targets:build", "--out", "n" * 300), "File name too long"),
        (("tests.chaos.targets:build", "--report", "."), "report='.': Is a directory"),
        (("tests.chaos.targets:build", "--call-timeout", "1e12"), "call_timeout=1000000000000.0"),
        (("tests.chaos.targets:build", "--at", "midnight"), "points='midnight': unknown"),
        (("tests.chaos.targets:build", "--duration", "0.2"), "shorter than one recovery"),
        (("tests.chaos.targets:build", "--schedule", "absent.json"), "absent.json"),
        (("tests.chaos.targets:build", "--schedule", "/proc/self/exe"), "can't decode"),
        (("shrink", "absent"), "no record of a run"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing_however_late_it_shows(
    words: tuple[str, ...],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)

    assert main(["chaos", *words]) == 2

    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("phalanx chaos: ")
    assert told in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_page_without_its_package_is_refused_before_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "jinja2", None)

    assert main(["chaos", "tests.chaos.targets:build", "--report", "page.html"]) == 1
    assert "jinja2 is not installed" in capfd.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("target", "told"),
    [
        ("raises", 'KeyError: "of the user\'s own"'),
        ("calls_wrongly", "the target's output is in"),  # by an error of the caller's, its own
    ],
)
def test_a_factory_that_raises_is_told_and_its_output_kept(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    target: str,
    told: str,
) -> None:
    monkeypatch.chdir(tmp_path)

    assert main(["chaos", f"tests.chaos.targets:{target}"]) == 1
    assert told in capfd.readouterr().err
    assert (tmp_path / "chaos-runs").is_dir()


@pytest.mark.parametrize("faults", ["kill", "kill:driver"])
@pytest.mark.parametrize("kind", [KeyError, FileNotFoundError, TimeoutError])
def test_what_a_factory_raises_is_raised_as_it_is(kind: type[Exception], faults: str) -> None:
    def broken() -> Executor[Any]:
        raise kind("of the user's own")

    with pytest.raises(kind, match="of the user's own"):
        run_chaos(broken, duration=2.0, faults=(faults,))


def test_a_record_that_cannot_be_written_is_named(tmp_path: Path, runtime: Runtime) -> None:
    def build() -> Executor[Any]:
        (tmp_path / "run" / "result.json").mkdir()
        return targets.Quiet(runtime)()

    with pytest.raises(RuntimeFault, match="record of the run could not be written"):
        run_chaos(build, duration=1.0, record=tmp_path / "run")


def test_a_record_that_cannot_be_read_is_named(tmp_path: Path, runtime: Runtime) -> None:
    def build() -> Executor[Any]:
        (tmp_path / "run" / "worker-0.jsonl").write_text('{"kind": "Call{"kind": 1}\n{}\n')
        return targets.Quiet(runtime)()

    with pytest.raises(RuntimeFault, match="worker-0.jsonl, line 1"):
        run_chaos(build, duration=1.0, record=tmp_path / "run")


def test_a_driver_that_ends_by_itself_after_a_restart_was_forced_is_an_error() -> None:
    schedule = in_turn("stop:driver@restarting", seconds=0.1)

    with pytest.raises(RuntimeFault, match="driver 1 ended by itself with 3"):
        run_chaos(targets.ends_at_a_restart, duration=60.0, schedule=schedule, callers=1)


def test_a_call_whose_caller_is_interrupted_once_it_has_ended_has_one_outcome(
    tmp_path: Path, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    nemesis: Any = SimpleNamespace(reached=lambda *_: None)
    (tmp_path / "orders").mkdir()
    with closing(Journal(tmp_path, "driver-1")) as journal:
        probe = DriverProbe(tmp_path, journal, nemesis, 1, None)
        with installed(probe), targets.Quiet(runtime, 1)() as executor:
            plane = executor._group.plane
            wait = plane.wait

            def interrupted(*words: Any) -> bool:
                wait(*words)
                raise KeyboardInterrupt

            with monkeypatch.context() as patch:
                patch.setattr(plane, "wait", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    executor.collective_rpc("again", args=(1.0,))

    settled = read_history(tmp_path).every(CallSettled)
    assert [each.outcome for each in settled] == ["value"]


def test_two_runs_at_once_in_one_process_are_refused(runtime: Runtime) -> None:
    class Nothing:
        def adjust(self, spec: Any) -> Any:
            return spec

        def attach(self, spec: Any, group: Any) -> Any:
            raise ExecutorClosed

    with installed(Nothing()), pytest.raises(SpecError, match="another run"):
        run_chaos(targets.Quiet(runtime), duration=2.0)


def test_a_worker_class_is_a_target_by_itself() -> None:
    assert Target.of("tests.support.workers:Echo").name == "tests.support.workers:Echo"
