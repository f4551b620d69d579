"""What callers are told by a group that has ended.

Guarantees: where it ended by itself they get the story: the reports on the deaths it ended for, and
why there was no device where that was it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from phalanx.supervision import ExecutorClosed, WorkerDied

if TYPE_CHECKING:
    from collections.abc import Iterable

    from phalanx.runtime import CrashReport
    from phalanx.supervision import ExitReason, GroupState, NoDevice

    from .calls import Call


@dataclass(frozen=True, slots=True)
class Farewell:
    """How a group has ended.

    Attributes:
        reason: Why by itself; None where it was closed.
        deaths: The reports on those it ended for, oldest first.
        no_device: What it gave up for; None where that was not it.
    """

    name: str
    reason: ExitReason | None
    deaths: tuple[CrashReport, ...]
    no_device: NoDevice | None

    @property
    def _message(self) -> str:
        what = "was closed" if self.reason is None else f"has ended: {self.reason}"
        return f"executor {self.name} {what}"

    def settle(self, call: Call) -> BaseException:
        """Return what *call*, which was not answered, ends in."""
        message = f"{call.name}: {self._message}"
        own = call.reports
        others = (each for each in self.deaths if all(each is not report for report in own))
        story = (*own, *others)
        if self.reason is None or not story:
            error: BaseException = ExecutorClosed(f"{message} before it was answered")
        else:
            error = WorkerDied(message, story)
        if self.reason is not None:
            error.__cause__ = self.no_device
        return error

    def refuse(self) -> BaseException:
        """Return what a call that comes too late is refused with."""
        error = ExecutorClosed(f"{self._message}; build a new one")
        if self.reason is not None:
            died = WorkerDied(self._message, self.deaths) if self.deaths else None
            error.__cause__ = self.no_device or died
        return error


def deaths_behind(end: GroupState, reports: Iterable[CrashReport]) -> tuple[CrashReport, ...]:
    """Return those of *reports* for which the group of *end* has ended, oldest first.

    They are the deaths since it served last, and all that were counted where they were too many;
    none where it has ended for something else.
    """
    known = tuple(reports)
    if not known:
        return ()
    last, window = known[-1].at_monotonic, end.window
    since = -math.inf if end.served_at is None else end.served_at
    if last >= since and window.admit(last) is None:
        since = min([since, *(at for at in window.spent if last - at <= window.period)])
    return tuple(report for report in known if report.at_monotonic >= since)
