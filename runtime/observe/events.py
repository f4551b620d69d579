"""Worker identity, and the events of workers, groups, the output collector and crash reports.

Prior art: ``RetryDetails`` in stamina's ``instrumentation/_data.py``; ``v4/events.go`` in suture.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from phalanx.runtime.event import Event

if TYPE_CHECKING:
    from phalanx.supervision import ExitReason

    from .crash_report import CrashReport


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLabels:
    """One incarnation of one worker.

    Attributes:
        child: Its path in the supervision tree.
        rank: None for a process without one (a standby, a rendezvous store).
        incarnation: How often this child has been started, 1 for the first.
        epoch: How often its group has been formed.
        coordinates: Its place in the parallel layout, such as ``dp=0,tp=1``; empty for none.
        pid: 0 until it is known.
        device: The device leased to it; empty for none.
    """

    child: str
    group: str
    rank: int | None = None
    incarnation: int = 1
    epoch: int = 0
    coordinates: str = ""
    pid: int = 0
    device: str = ""

    def prefix(self) -> str:
        """Return the prefix of its lines on a terminal."""
        who = self.group if self.rank is None else f"{self.group}/{self.rank}"
        where = f" {self.coordinates}" if self.coordinates else ""
        pid = f" {self.pid}" if self.pid else ""
        return f"[{who}{where} #{self.incarnation}{pid}]"


class WorkerEvent(Event):
    """An event of one worker."""

    child: str
    group: str
    rank: int | None
    incarnation: int
    epoch: int
    pid: int | None


class WorkerStarted(WorkerEvent, event="worker_started"):
    """A worker process exists; it has not run any user code yet.

    Attributes:
        took: Seconds until it existed since its launch began, which was at *at*.
    """

    device: str = ""
    took: float = 0.0


class WorkerReady(WorkerEvent, event="worker_ready"):
    """A worker has been through ``on_start`` and takes calls.

    Attributes:
        took: Seconds since it was started.
    """

    took: float


class WorkerExited(WorkerEvent, event="worker_exited"):
    """A worker process has ended.

    Attributes:
        ran_for: Seconds since it was started.
    """

    reason: ExitReason
    ran_for: float


class WorkerCrashed(Event, event="worker_crashed", level="error"):
    """A worker ended abnormally. A log has the brief form of its report only."""

    report: CrashReport


class GroupUp(Event, event="group_up"):
    """A rank group is formed and takes calls.

    Attributes:
        took: Seconds from the start of its ranks, or from the death that ended the last epoch.
        level: ``warning`` after a `GroupDown`, so that a log with its downs has its ups.
    """

    group: str
    epoch: int
    world_size: int
    took: float
    level: str = "info"


class GroupDown(Event, event="group_down", level="warning"):
    """A rank group takes no calls until it is formed again.

    Attributes:
        epoch: The one in which it went down.
        cause: Why, in words.
    """

    group: str
    epoch: int
    cause: str


class GroupEnded(Event, event="group_ended"):
    """A rank group has ended for good.

    Attributes:
        cause: Why, in words; empty if it was closed.
        level: ``critical`` if it ended by itself after it had served and nothing restarts it,
            ``error`` if a supervisor decides that.
    """

    group: str
    epoch: int
    cause: str
    level: str = "info"


class LinesDropped(Event, event="lines_dropped", level="warning"):
    """A writer was faster than its reader, and lines were dropped.

    Attributes:
        where: Which was full: ``stdout``, ``stderr`` (the driver's), ``worker`` (a worker's log
            channel) or ``driver`` (the driver's own).
        lines: How many since the last such event.
    """

    where: str
    lines: int


class StreamUnavailable(Event, event="stream_unavailable", level="warning"):
    """Observers cannot attach to this driver; everything else works."""

    problem: str


class ReportWritten(Event, event="report_written"):
    """A crash report lies in a file."""

    path: str


class ReportNotWritten(Event, event="report_not_written", level="error"):
    """A crash report could not be put into a file; the value itself is not lost."""

    directory: str
    problem: str
