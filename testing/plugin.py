"""pytest plug-in: fixtures, a marker and an option.

- A session that uses none of them imports nothing else of phalanx, and keeps its environment.
- A mistake in a marker or an option is a usage error that names the test and the field.
"""

from __future__ import annotations

import os
import random
import uuid
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator
    from pathlib import Path

    from phalanx.chaos import ChaosResult, Target
    from phalanx.runtime import Runtime

    from .leaks import LeakScope

SEED_OPTION = "--chaos-seed"
MARKER, OLD_MARKER = "phalanx_chaos", "chaos"
_DEFAULTS: dict[str, Any] = {"duration": 5.0, "rate": 1.0}  # a test is to be short

_SESSION = uuid.uuid4().hex
"""The mark of every process that is started from here, directly or not."""


class ChaosRuns:
    """Runs targets under faults: call it, once or several times.

    Attributes:
        seed: What the faults of this test are drawn from: ``--chaos-seed``, or else that of the
            marker, or else a new one.
        records: The folders of the runs so far; each can be given to ``phalanx chaos shrink``,
            if its target stands at the top level of a module.
    """

    def __init__(self, fields: dict[str, Any], seed: int | None, folder: Path) -> None:
        self._fields = {**_DEFAULTS, **fields}
        marked = self._fields.pop("seed", None)
        self._is_given = seed is not None
        chosen = marked if seed is None else seed
        self.seed: int = random.SystemRandom().randrange(1 << 31) if chosen is None else chosen
        self.records: list[Path] = []
        self._folder = folder

    def __call__(
        self, target: Target | str | Callable[[], Any], *, check: bool = True, **fields: Any
    ) -> ChaosResult:
        """Run *target* under faults, and return the result.

        Args:
            target: As for `phalanx.chaos.run_chaos`.
            check: Fail the test, with the history that shows it, if an invariant was broken.
            fields: Those of `phalanx.chaos.Chaos`, over those of the marker. Without any a run
                takes 5 seconds of one kill per second. A *seed* given here yields to the option.

        Raises:
            SpecError: the arguments are invalid; nothing was started.
        """
        __tracebackhide__ = True
        from phalanx.chaos import Chaos, run_chaos  # noqa: PLC0415  # imported only if used

        asked = {**self._fields, **fields}
        own = asked.pop("seed", None)
        if own is not None and not self._is_given:
            self.seed = own
        if asked.get("record") is None:
            asked["record"] = self._folder / f"chaos-{len(self.records) + 1}"
        plan = Chaos(seed=self.seed, **asked)
        assert plan.record is not None
        self.records.append(plan.record)  # also of a run that raises
        result = run_chaos(target, plan)
        if check and not result.ok:
            pytest.fail(result.render())
        return result

    def describe(self) -> str:
        """Return the lines for the report of a failed test."""
        seed = f"seed {self.seed}; again with {SEED_OPTION}={self.seed}"
        return "\n".join([seed, *(f"record {folder}" for folder in self.records)])


_RUNS: pytest.StashKey[ChaosRuns] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    parser.getgroup("phalanx").addoption(
        SEED_OPTION,
        type=int,
        metavar="N",
        help="seed of the faults of the fixture `phalanx_chaos`, in place of what tests give",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker."""
    config.addinivalue_line(
        "markers",
        f"{MARKER}(*, seed, faults, duration, rate, ...): the fields of phalanx.chaos.Chaos for "
        "the runs of the fixture `phalanx_chaos`",
    )
    config.addinivalue_line("markers", f"{OLD_MARKER}: deprecated name of {MARKER}")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Refuse invalid markers."""
    # An error in the collection of one process of pytest-xdist is taken for its crash.
    for item in () if hasattr(config, "workerinput") else items:
        if problem := _problem(item):
            raise pytest.UsageError(problem)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fail a test whose marker could not be refused when it was collected."""
    if hasattr(item.config, "workerinput") and (problem := _problem(item)):
        pytest.fail(problem, pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add seed and records to the report of a failure."""
    report = yield
    runs = item.stash.get(_RUNS, None)
    if report.failed and runs is not None:
        report.sections.append(("chaos", runs.describe()))
    return report


def _marks(item: pytest.Item) -> list[pytest.Mark]:
    return [mark for mark in item.iter_markers() if mark.name in (MARKER, OLD_MARKER)]


def _fields_of(marks: list[pytest.Mark]) -> dict[str, Any]:
    """Return the fields that *marks* give together; the first is the nearest, and wins."""
    given: dict[str, Any] = {}
    for mark in reversed(marks):
        given |= mark.kwargs
    return given


def _problem(item: pytest.Item) -> str:
    """Return what is wrong with the markers of *item*, and its name; empty if nothing is."""
    what, fixtures, marks = "", getattr(item, "fixturenames", ()), _marks(item)
    if "phalanx_chaos" not in fixtures:  # another plug-in may have a marker of the old name
        if any(mark.name == MARKER for mark in item.own_markers):
            what = "the test does not ask for the fixture `phalanx_chaos`"
    elif marks:
        from phalanx.chaos import Chaos  # noqa: PLC0415  # imported only if used
        from phalanx.supervision import SpecError  # noqa: PLC0415

        if any(mark.name == OLD_MARKER for mark in marks):
            warning = f"@pytest.mark.{OLD_MARKER} is now @pytest.mark.{MARKER}"
            item.warn(pytest.PytestDeprecationWarning(warning))
        try:
            for mark in marks:
                if mark.args:
                    what = f"give its fields by keyword, not {mark.args!r}"
            Chaos(**_fields_of(marks))
        except (SpecError, TypeError) as error:
            what = str(error)
    return f"{item.nodeid}: @pytest.mark.{MARKER}: {what}" if what else ""


@pytest.fixture
def phalanx_chaos(request: pytest.FixtureRequest, tmp_path: Path) -> ChaosRuns:
    """Runs a target under faults and checks that it lost nothing: ``phalanx_chaos(build)``."""
    given: int | None = request.config.getoption(SEED_OPTION)
    runs = ChaosRuns(_fields_of(_marks(request.node)), given, tmp_path)
    request.node.stash[_RUNS] = runs
    return runs


@pytest.fixture(scope="session")
def phalanx_leak_scope(leak_scope: LeakScope) -> LeakScope:
    """The scope of `phalanx_leak_check`; override it by a fixture of this name."""
    return leak_scope


@pytest.fixture(scope="session")
def phalanx_mark() -> Iterator[None]:
    """Mark every tree that is made from now on, here or in a process that is started from here."""
    from phalanx.runtime import process_tree  # noqa: PLC0415  # imported only if used

    with pytest.MonkeyPatch.context() as patch:
        outer = os.environ.get(process_tree.VARIABLE, "").rstrip(";")
        patch.setenv(process_tree.VARIABLE, f"{outer};{_SESSION}/pytest;".lstrip(";"))
        yield


@pytest.fixture(scope="session")
def phalanx_runtime() -> Iterator[Runtime]:
    """One runtime for all tests: ``Executor(..., runtime=phalanx_runtime)``.

    Its zygote has imported torch, so that an executor takes tenths of a second to start.
    """
    from phalanx.actors import Executor, WorkerActor  # noqa: PLC0415  # imported when used
    from phalanx.runtime import Runtime  # noqa: PLC0415

    class Idle(WorkerActor):
        """Local, so that it travels by value: its process does not import pytest."""

    with Runtime(stream=False) as runtime:
        Executor(Idle, 1, runtime=runtime).close()  # what stays is here before any test
        yield runtime


@pytest.fixture
def phalanx_leak_check(phalanx_mark: None, phalanx_leak_scope: LeakScope) -> Iterator[None]:
    """Fail a test that leaves processes, threads, shared memory, files or descriptors.

    What fixtures that were asked for before this one have is not counted; what they start during
    the test is, such as ranks of an executor that are restarted. A process that was left is killed.
    """
    del phalanx_mark
    from .leaks import LeakDetector  # noqa: PLC0415  # imported only if used

    scope = phalanx_leak_scope
    detector = LeakDetector(_SESSION, folders=scope.folders, patience=scope.patience)
    yield
    leaks = detector.wait_gone()
    if leaks:
        detector.kill()
        listed = "\n  ".join(map(str, leaks))
        later = (
            "if a fixture of this test has started it: ask for phalanx_leak_check before that "
            'fixture, as by @pytest.mark.usefixtures("phalanx_leak_check")'
        )
        pytest.fail(f"left behind:\n  {listed}\n({later})", pytrace=False)


def _deprecate(request: pytest.FixtureRequest, new: str) -> None:
    text = f"the fixture {request.fixturename} is now {new}"
    request.node.warn(pytest.PytestDeprecationWarning(text))


@pytest.fixture
def chaos(request: pytest.FixtureRequest, phalanx_chaos: ChaosRuns) -> ChaosRuns:
    """Deprecated name of `phalanx_chaos`."""
    _deprecate(request, "phalanx_chaos")
    return phalanx_chaos


@pytest.fixture
def leak_check(request: pytest.FixtureRequest, phalanx_leak_check: None) -> None:
    """Deprecated name of `phalanx_leak_check`."""
    del phalanx_leak_check
    _deprecate(request, "phalanx_leak_check")


@pytest.fixture(scope="session")
def leak_scope() -> LeakScope:
    """Deprecated name of `phalanx_leak_scope`, for code that overrides it."""
    from .leaks import LeakScope  # noqa: PLC0415  # imported only if used

    return LeakScope()
