"""`shrink_run`: a smaller schedule that breaks the same rules as an earlier run did.

Guarantees: what it returns has failed, here and now; it ends within its number of runs, and soon
after its time is up, with the smallest schedule so far; the record of the run that failed with it
is kept, and holds the schedule in a form that can be run again.

Left to others: which schedules to try (`shrinking`).
"""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.supervision import SpecError

from .faults import FAULTS
from .run_record import load_run
from .runner import run_chaos
from .shrinking import smaller
from .target import Target

if TYPE_CHECKING:
    from collections.abc import Callable

    from .plan import Chaos
    from .result import ChaosResult
    from .schedule import Schedule

SCHEDULE = "schedule.json"
_AFTER = 2.0  # seconds of traffic after the last fault is over
_WITHOUT = 5.0  # seconds of traffic where there is no fault


@dataclass(frozen=True, slots=True, kw_only=True)
class Shrunk:
    """What shrinking came to.

    Attributes:
        before: How many strikes the run had.
        result: The run with the smallest schedule that failed; None where no run failed any more.
        runs: How many runs were made.
        complete: Whether all candidates were tried; otherwise runs or time were used up first.
    """

    before: int
    result: ChaosResult | None
    runs: int
    complete: bool

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
        target: What it was pointed at; None takes it by the name in the record.
        out: The new folder for the record of the smallest run that failed, with ``schedule.json``
            in it; None takes the name of *run* with ``-shrunk`` behind it.
        runs: How many runs are made at most.
        repeat: How often a candidate is run, until it fails: a fault that depends on timing does
            not show each time.
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
    if failed.ok:
        raise SpecError("run", str(run), "broke nothing, so there is nothing to shrink")
    where = Path(run).resolve()
    kept = where.with_name(f"{where.name}-shrunk") if out is None else Path(out).resolve()
    if kept.exists():
        raise SpecError("out", str(kept), "is there already; name one that is not")
    found = Target.of(failed.target if target is None else target)
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
    return Shrunk(before=len(failed.plan.strikes), result=best, runs=search.made, complete=complete)


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
        self.best: ChaosResult | None = None
        self.made = 0
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

    def run(self) -> bool:
        """Search; return whether it was to the end."""
        try:
            whole = self._plan.strikes
            if not self._fails(whole):
                self._length = lambda _: self._plan.duration
                if self._length(whole) == self._needed(whole) or not self._fails(whole):
                    return True
            questions = smaller(whole)
            try:
                candidate = next(questions)
                while True:
                    candidate = questions.send(self._fails(candidate))
            except StopIteration:
                return True
        except _UsedUp:
            return False

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
        plan = replace(self._plan, schedule=schedule, duration=self._length(schedule))
        return any(self._fails_once(plan) for _ in range(self._repeat))

    def _fails_once(self, plan: Chaos) -> bool:
        if self.made >= self._runs or time.monotonic() >= self._until:
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
        if self.best is not None and self.best.record is not None:
            shutil.rmtree(self.best.record, ignore_errors=True)
        self.best = result
        return True
