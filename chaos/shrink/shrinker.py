"""`shrink_run`: a minimal reproducer of the violations of a run.

Guarantees: the result has failed in replays here and now, and says in how many; a schedule that
failed once by chance is not accepted; the search ends within its number of runs, and soon after its
time is up, with the smallest schedule so far.
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

from phalanx.chaos.runner import load_run, run_chaos
from phalanx.chaos.workload.target import Target
from phalanx.supervision import SpecError, check_count, check_number

from .ddmin import ddmin

if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx.chaos.nemesis.schedule import Schedule
    from phalanx.chaos.report.result import ChaosResult

SCHEDULE = "schedule.json"
_REPLAYS = 3  # of the whole schedule
_ENOUGH = 2  # failures of a candidate; one may be chance
_SURE = 0.05  # the share of failing candidates that may be missed
_AFTER = 4.0  # seconds of traffic after the last fault is over


@dataclass(frozen=True, slots=True)
class Replays:
    """How often one schedule was run again, and how often it failed."""

    failed: int = 0
    made: int = 0

    @property
    def is_flaky(self) -> bool:
        """Whether it failed in some of its runs and not in others."""
        return 0 < self.failed < self.made

    @property
    def needed(self) -> int:
        """The number of runs without a failure after which a candidate counts as passing."""
        if not self.is_flaky:
            return 1
        return math.ceil(math.log(_SURE) / math.log(1 - self.failed / self.made))

    def __str__(self) -> str:
        return f"{self.failed} of {self.made}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shrunk:
    """The result of shrinking.

    Attributes:
        before: How many faults the run had.
        result: The run with the smallest schedule that failed; None if no run failed.
        runs: How many runs were made.
        complete: Whether all candidates were tried within the runs and the time, and none raised.
        whole: The replays of the schedule of the run.
        smallest: The replays of the schedule of *result*.
    """

    before: int
    result: ChaosResult | None
    runs: int
    complete: bool
    whole: Replays
    smallest: Replays

    @property
    def is_flaky(self) -> bool:
        """Whether what fails does not fail each time, so that one run that holds shows nothing."""
        return self.whole.is_flaky or self.smallest.is_flaky

    @property
    def schedule(self) -> Schedule | None:
        """The smallest schedule that failed; None if none did."""
        return None if self.result is None else self.result.plan.planned


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
    """Find a smaller schedule that breaks an invariant which the earlier *run* broke.

    Args:
        run: The folder of its record.
        target: As for `run_chaos`; None imports it by the name in the record.
        out: The new folder for the record of the smallest run that failed, with ``schedule.json``
            in it; None takes the name of *run* with ``-shrunk`` appended.
        runs: The maximum number of runs.
        repeat: How often a candidate is run until it fails, since a fault that depends on timing
            does not show each time. More often if the whole schedule is flaky.
        seconds: The maximum duration, without the run that is in progress then.
        on_progress: Called before each run with the number of runs made and of faults left.
        interrupt: Ends the search with the run in progress when it is set.

    Raises:
        SpecError: there is no such run, it broke nothing, or an argument is invalid.
    """
    check_count("runs", runs)
    check_count("repeat", repeat)
    check_number("seconds", seconds, 1e-6)
    failed = load_run(run)
    if not failed.violations:
        raise SpecError("run", str(run), "broke no invariant, so there is nothing to shrink")
    where = Path(run).resolve()
    kept = where.with_name(f"{where.name}-shrunk") if out is None else Path(out).resolve()
    try:
        found = Target.of(failed.target if target is None else target)
    except SpecError as error:
        if target is None:
            remedy = (
                f"{error.remedy}; a target is imported from the current folder or PYTHONPATH, from "
                "the top level of a module; for others call "
                "phalanx.chaos.shrink_run(folder, target=...)"
            )
            raise SpecError("target", failed.target, remedy) from error
        raise
    try:
        if kept.exists():
            raise SpecError("out", str(kept), "it exists; name a new folder")
        kept.parent.mkdir(parents=True, exist_ok=True)
        scratch = tempfile.TemporaryDirectory(prefix="chaos-shrink-", dir=kept.parent)
    except OSError as error:
        remedy = f"cannot be made: {error.strerror}; name another folder"
        raise SpecError("out", str(kept), remedy) from error
    with scratch as folder:
        until, stop = time.monotonic() + seconds, interrupt or threading.Event()
        search = _Search(failed, found, Path(folder), runs, repeat, until, on_progress, stop)
        complete = search.run()
        best = search.best
        if best is not None:
            assert best.record is not None
            shutil.move(best.record, kept)
            best = load_run(kept)
            (kept / SCHEDULE).write_text(best.plan.planned.to_json())
    return Shrunk(
        before=len(failed.plan.planned),
        result=best,
        runs=search.made,
        complete=complete,
        whole=search.whole,
        smallest=search.smallest,
    )


class _UsedUp(Exception):
    """No more runs may be made."""


@dataclass(slots=True)
class _Search:
    """The replays of one search."""

    failed: ChaosResult
    target: Target
    folder: Path
    runs: int
    repeat: int
    until: float
    on_progress: Callable[[int, int], None] | None
    interrupt: threading.Event
    made: int = 0
    whole: Replays = Replays()
    smallest: Replays = Replays()
    best: ChaosResult | None = None

    def run(self) -> bool:
        """Search; return whether the search was completed."""
        whole = self.failed.plan.planned
        try:
            self.whole = self._replay(whole, _REPLAYS)
            self.smallest = self.whole
            if self.whole.failed:
                self.repeat = max(self.repeat, self.whole.needed)
                ddmin(whole, self._fails)
        except _UsedUp:
            return False
        except Exception:  # the target's own, too
            if self.best is None:
                raise
            return False
        return True

    def _fails(self, schedule: Schedule) -> bool:
        """Whether *schedule* breaks an invariant that the run had broken, and not by chance."""
        replays = self._replay(schedule, self.repeat + _ENOUGH - 1, _ENOUGH)
        if replays.failed < _ENOUGH:
            return False
        self.smallest = replays
        return True

    def _replay(self, schedule: Schedule, most: int, enough: int | None = None) -> Replays:
        """Run *schedule* *most* times, or until it has failed *enough* times or no longer can.

        Its first run that failed becomes the best if that was enough.
        """
        failed = made = 0
        first: ChaosResult | None = None
        while made < most and (enough is None or failed < enough <= failed + most - made):
            used_up = self.made >= self.runs or time.monotonic() >= self.until
            if used_up or self.interrupt.is_set():
                raise _UsedUp
            result = self._run(schedule)
            made += 1
            failed += result is not None
            first = first or result
            if enough is None:  # of the whole schedule, all that is known when runs are used up
                self.whole, self.best = Replays(failed, made), first
        if enough is not None and failed >= enough:
            self.best = first
        return Replays(failed, made)

    def _run(self, schedule: Schedule) -> ChaosResult | None:
        """Run *schedule* once; return the run if it failed."""
        if self.on_progress is not None:
            left = self.failed.plan if self.best is None else self.best.plan
            self.on_progress(self.made, len(left.planned))
        self.made += 1
        record = self.folder / str(self.made)
        ends = (planned.at + planned.seconds for planned in schedule)
        seconds = min(self.failed.plan.duration, max(ends, default=0.0) + _AFTER)
        plan = replace(self.failed.plan, schedule=schedule, duration=seconds, record=record)
        result = run_chaos(self.target, plan, interrupt=self.interrupt)
        if result.broken.keys() & self.failed.broken.keys():
            return result
        shutil.rmtree(record)
        return None
