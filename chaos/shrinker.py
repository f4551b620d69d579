"""`shrink_run`: a smaller schedule that breaks the same rules as an earlier run did.

Guarantees: what it returns has failed, here and now; how often it does so when it is run again is
told, and a schedule that failed once and then no more is not taken; it ends within its number of
runs, and soon after its time is up, with the smallest schedule so far; the record of the run that
failed with it is kept, and holds the schedule in a form that can be run again.

Left to others: which schedules to try (`shrinking`).
"""

from __future__ import annotations

import math
import shutil
import tempfile
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.supervision import SpecError

from .faults import FAULTS
from .run_record import load_run, load_target
from .runner import run_chaos
from .shrinking import smaller
from .target import Target

if TYPE_CHECKING:
    from collections.abc import Callable

    from .result import ChaosResult
    from .schedule import Schedule

SCHEDULE = "schedule.json"
_REPLAYS = 3  # runs that tell whether a schedule fails each time
_SURE = 0.05  # the share of candidates which fail, and are found not to, that is put up with
_AFTER = 2.0  # seconds of traffic after the last fault is over
_WITHOUT = 5.0  # seconds of traffic where there is no fault


@dataclass(frozen=True, slots=True)
class Replays:
    """How often one schedule was run again, and how often it failed."""

    failed: int = 0
    made: int = 0

    @property
    def is_flaky(self) -> bool:
        """Whether it failed in some of its runs and not in others."""
        return 0 < self.failed < self.made

    def __str__(self) -> str:
        return f"{self.failed} of {self.made}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shrunk:
    """What shrinking came to.

    Attributes:
        before: How many strikes the run had.
        result: The run with the smallest schedule that failed; None where no run failed any more.
        runs: How many runs were made.
        complete: Whether all candidates were tried; otherwise runs or time were used up first.
        whole: What came of running the schedule of the run again.
        smallest: What came of running the one that was found again; none made where runs or time
            were used up.
        refuted: How many smaller ones failed in the search, and then in none of their replays; they
            are not taken.
        home: The folder from which the target is imported, as in `Target`.
    """

    before: int
    result: ChaosResult | None
    runs: int
    complete: bool
    whole: Replays = Replays()
    smallest: Replays = Replays()
    refuted: int = 0
    home: str | None = ""

    @property
    def is_flaky(self) -> bool:
        """Whether what fails does not fail each time, so that one run which holds means nothing."""
        return self.whole.is_flaky or self.smallest.is_flaky or self.refuted > 0

    @property
    def schedule(self) -> Schedule | None:
        """The smallest schedule that failed; None where none did."""
        return None if self.result is None else self.result.plan.strikes


def shrink_run(
    run: Path | str,
    *,
    target: Target | str | Callable[[], Any] | None = None,
    out: Path | str | None = None,
    runs: int = 100,
    repeat: int = 2,
    seconds: float = 600.0,
    on_progress: Callable[[int, int], None] | None = None,
    interrupt: threading.Event | None = None,
) -> Shrunk:
    """Find a smaller schedule that breaks a rule which the earlier *run* broke.

    Args:
        run: The folder of its record.
        target: What it was pointed at; None imports it by the name in the record.
        out: The new folder for the record of the smallest run that failed, with ``schedule.json``
            in it; None takes the name of *run* with ``-shrunk`` behind it.
        runs: How many runs are made at most.
        repeat: How often a candidate is run, until it fails: a fault that depends on timing does
            not show each time. More often where the whole schedule fails only now and then.
        seconds: How long it takes at most, but for the run that is under way then.
        on_progress: Told before each run how many were made, and how many strikes are left.
        interrupt: When it is set, it ends with the run that is under way.

    Raises:
        SpecError: there is no such run, it broke nothing, or an argument makes no sense.
    """
    for name, value in (("runs", runs), ("repeat", repeat)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may err
            raise SpecError(name, value, "give an integer >= 1")
    if not seconds > 0:
        raise SpecError("seconds", seconds, "give a number above 0")
    failed = load_run(run)
    if not failed.violations:
        raise SpecError("run", str(run), "broke nothing, so there is nothing to shrink")
    where = Path(run).resolve()
    kept = where.with_name(f"{where.name}-shrunk") if out is None else Path(out).resolve()
    if kept.exists():
        raise SpecError("out", str(kept), "is there already; name one that is not")
    found = load_target(where) if target is None else Target.of(target)
    with tempfile.TemporaryDirectory(prefix="chaos-shrink-") as folder:
        search = _Search(
            failed,
            found,
            Path(folder),
            runs=runs,
            repeat=repeat,
            until=time.monotonic() + seconds,
            on_progress=on_progress,
            interrupt=threading.Event() if interrupt is None else interrupt,
        )
        complete = search.run()
        best = search.best
        if best is not None:
            assert best.record is not None
            shutil.move(best.record, kept)
            best = load_run(kept)
            (kept / SCHEDULE).write_text(best.plan.strikes.to_json())
    return Shrunk(
        before=len(failed.plan.strikes),
        result=best,
        runs=search.made,
        complete=complete,
        whole=search.whole,
        smallest=search.smallest,
        refuted=search.refuted,
        home=found.home,
    )


class _UsedUp(Exception):
    """No run may be made any more."""


class _Search:
    """The runs of one search."""

    def __init__(
        self,
        failed: ChaosResult,
        target: Target,
        folder: Path,
        *,
        runs: int,
        repeat: int,
        until: float,
        on_progress: Callable[[int, int], None] | None,
        interrupt: threading.Event,
    ) -> None:
        self.made = 0
        self.refuted = 0
        self.whole = self.smallest = Replays()
        self._found: list[ChaosResult] = []  # runs that failed, each with a smaller schedule
        self._kept_back = 0  # runs that the search leaves for what comes after it
        self._plan = failed.plan
        self._broken = {violation.invariant for violation in failed.violations}
        self._target = target
        self._folder = folder
        self._runs = runs
        self._repeat = repeat
        self._until = until
        self._on_progress = on_progress
        self._interrupt = interrupt
        self._length: Callable[[Schedule], float] = self._needed

    @property
    def best(self) -> ChaosResult | None:
        """The run with the smallest schedule that failed."""
        return self._found[-1] if self._found else None

    def run(self) -> bool:
        """Search; return whether it was to the end."""
        try:
            whole = self._plan.strikes
            self.whole = self._replay(whole)
            if not self.whole.failed:
                needed, full = self._needed(whole), self._plan.duration
                self._length = lambda _: full  # pyright: ignore[reportUnknownLambdaType]
                if needed < full:
                    self.whole = self._replay(whole)
                if not self.whole.failed:
                    return True
            self._repeat = max(self._repeat, _runs_for(self.whole))
            complete = self._search(whole)
            self._confirm()
        except _UsedUp:
            return False
        return complete

    def _search(self, whole: Schedule) -> bool:
        """Try smaller and smaller ones; return whether all were."""
        questions = smaller(whole)
        enough = max(_REPLAYS, self._repeat)
        self._kept_back = min(enough, max(0, self._runs - self.made - enough))
        try:
            candidate = next(questions)
            while True:
                candidate = questions.send(self._fails(candidate))
        except StopIteration:
            return True
        except _UsedUp:
            return False
        finally:
            self._kept_back = 0

    def _confirm(self) -> None:
        """Have the smallest be one that fails again, which by chance it may not."""
        while len(self._found) > 1:
            found = self._found[-1]
            self.smallest = Replays()
            self.smallest = self._replay(found.plan.strikes, keep=False)
            if self.smallest.failed:
                return
            self._drop(found)
            self.refuted += 1
        self.smallest = self.whole

    def _needed(self, schedule: Schedule) -> float:
        """Return how long a run with *schedule* takes at least to show anything."""
        plan = self._plan
        ends = [_WITHOUT] if not len(schedule) else []
        for strike in schedule:
            fault = FAULTS[strike.fault]
            hangs = min(fault.seconds, plan.call_timeout) if fault.hangs else 0.0
            ends.append(strike.at + fault.recovery + max(hangs, strike.seconds) + _AFTER)
        return min(plan.duration, max(ends))

    def _fails(self, schedule: Schedule) -> bool:
        """Whether *schedule* breaks a rule that the run had broken, in one of several runs."""
        return any(self._fails_once(schedule) for _ in range(self._repeat))

    def _replay(self, schedule: Schedule, *, keep: bool = True) -> Replays:
        """Return how often *schedule* fails; *keep* the record of a run of it that does."""
        failed = made = 0
        try:
            while made < max(_REPLAYS, self._repeat):
                failed += self._fails_once(schedule, keep=keep)
                made += 1
        except _UsedUp:
            if not made:
                raise
        return Replays(failed, made)

    def _fails_once(self, schedule: Schedule, *, keep: bool = True) -> bool:
        plan = replace(self._plan, schedule=schedule, duration=self._length(schedule))
        if self.made >= self._runs - self._kept_back or time.monotonic() >= self._until:
            raise _UsedUp
        if self._interrupt.is_set():
            raise _UsedUp
        if self._on_progress is not None:
            left = self._plan if self.best is None else self.best.plan
            self._on_progress(self.made, len(left.strikes))
        self.made += 1
        record = self._folder / str(self.made)
        result = run_chaos(self._target, replace(plan, record=record), interrupt=self._interrupt)
        if self._broken.isdisjoint(violation.invariant for violation in result.violations):
            shutil.rmtree(record, ignore_errors=True)
            return False
        if not keep:
            shutil.rmtree(record, ignore_errors=True)
            return True
        if self._found and self._found[-1].plan.strikes == schedule:
            self._drop(self._found[-1])
        self._found.append(result)
        return True

    def _drop(self, result: ChaosResult) -> None:
        self._found.remove(result)
        if result.record is not None:
            shutil.rmtree(result.record, ignore_errors=True)


def _runs_for(replays: Replays) -> int:
    """Return how often what fails as often as *replays* is run before it counts as holding."""
    if not replays.is_flaky:
        return 1
    return math.ceil(math.log(_SURE) / math.log(1 - replays.failed / replays.made))
