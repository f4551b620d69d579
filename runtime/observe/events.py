"""What the runtime reports: one frozen value for each thing that happens.

Guarantees: every event has a dotted name, a level and its time on the monotonic clock; `fields`
makes of any of them what a log line, the stream and a test can compare.

Left to others: where events go (`Scribe.emit`), and the events of supervision itself, which that
layer defines in the same form.

Prior art: ``RetryDetails`` in stamina's ``instrumentation/_data.py``; ``v4/events.go`` in suture.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from phalanx.supervision import ExitReason

    from .crash_report import CrashReport


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEvent:
    """What all events about one worker say.

    Attributes:
        child: Its path in the supervision tree.
        at: When it happened, in seconds on the monotonic clock.
    """

    child: str
    group: str
    rank: int | None
    incarnation: int
    epoch: int
    pid: int | None
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStarted(WorkerEvent):
    """A worker process exists; it has not run any user code yet."""

    event: ClassVar[str] = "phalanx.worker_started"
    level: ClassVar[str] = "info"
    device: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReady(WorkerEvent):
    """A worker has been through ``on_start`` and takes calls.

    Attributes:
        took: Seconds since it was started.
    """

    event: ClassVar[str] = "phalanx.worker_ready"
    level: ClassVar[str] = "info"
    took: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerExited(WorkerEvent):
    """A worker process is gone.

    Attributes:
        ran_for: Seconds since it was started.
    """

    event: ClassVar[str] = "phalanx.worker_exited"
    level: ClassVar[str] = "info"
    reason: ExitReason
    ran_for: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCrashed:
    """A worker ended as it should not have; the report tells the story.

    A log has room for its brief form only; the value and the file hold all of it.
    """

    event: ClassVar[str] = "phalanx.worker_crashed"
    level: ClassVar[str] = "error"
    report: CrashReport
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupUp:
    """A rank group is formed and takes calls.

    Attributes:
        took: Seconds from the start of its ranks, or from the death that ended the last epoch.
        level: ``warning`` after a `GroupDown`, so that a log with its downs has its ups.
    """

    event: ClassVar[str] = "phalanx.group_up"
    group: str
    epoch: int
    world_size: int
    took: float
    at: float
    level: str = "info"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupDown:
    """A rank group takes no calls until it is formed again.

    Attributes:
        epoch: The one in which it went down.
        cause: Why, for people.
    """

    event: ClassVar[str] = "phalanx.group_down"
    level: ClassVar[str] = "warning"
    group: str
    epoch: int
    cause: str
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupEnded:
    """A rank group has ended for good.

    Attributes:
        cause: Why, for people; empty where it was closed.
        level: ``critical`` where it ended by itself after it had served and nothing restarts it,
            ``error`` where a supervisor decides that.
    """

    event: ClassVar[str] = "phalanx.group_ended"
    group: str
    epoch: int
    cause: str
    at: float
    level: str = "info"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScribeReplaced:
    """The process that drains output died and another has taken its place."""

    event: ClassVar[str] = "phalanx.scribe_replaced"
    level: ClassVar[str] = "warning"
    pid: int
    times: int
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ScribeUnavailable:
    """The process that drains output could not be started; it will be tried again.

    Attributes:
        wait: Seconds until then.
    """

    event: ClassVar[str] = "phalanx.scribe_unavailable"
    level: ClassVar[str] = "error"
    problem: str
    wait: float
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LinesDropped:
    """Something wrote faster than its reader reads, and lines were thrown away.

    Attributes:
        where: What was full: ``stdout``, ``stderr`` (the driver's), ``worker`` (a worker's log
            channel) or ``driver`` (the driver's own).
        lines: How many since the last such event.
    """

    event: ClassVar[str] = "phalanx.lines_dropped"
    level: ClassVar[str] = "warning"
    where: str
    lines: int
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamUnavailable:
    """Observers cannot attach to this driver; everything else works."""

    event: ClassVar[str] = "phalanx.stream_unavailable"
    level: ClassVar[str] = "warning"
    problem: str
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportWritten:
    """A crash report lies in a file."""

    event: ClassVar[str] = "phalanx.report_written"
    level: ClassVar[str] = "info"
    path: str
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportNotWritten:
    """A crash report could not be put into a file; the value itself is not lost."""

    event: ClassVar[str] = "phalanx.report_not_written"
    level: ClassVar[str] = "error"
    directory: str
    problem: str
    at: float
