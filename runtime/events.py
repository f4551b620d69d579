"""What the runtime reports: one frozen value for each thing that happens.

Guarantees: every event has a dotted name, a level and its time on the monotonic clock; `fields`
makes of any of them what a log line, the stream and a test can compare.

Left to others: where events go (`Scribe.emit`), and the events of supervision itself, which that
layer defines in the same form.

Prior art: ``RetryDetails`` in stamina's ``instrumentation/_data.py``; ``v4/events.go`` in suture.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, cast, runtime_checkable

from phalanx.supervision import ExitReason

if TYPE_CHECKING:
    from .report import CrashReport


class LoggedEvent(Protocol):
    """Anything that can be emitted: a dataclass with a dotted name.

    Its ``level`` is an attribute of the class or of the value; ``info`` without one.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]
    event: ClassVar[str]


@runtime_checkable
class Briefable(Protocol):
    """A value that knows its own form in a log: a `CrashReport`."""

    def brief(self) -> Briefable:
        """Return it cut down to what a log has room for."""
        ...

    def to_json(self) -> str:
        """Return it as one JSON object."""
        ...


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
class ZygoteReplaced:
    """The process that forks workers died and another has taken its place.

    Attributes:
        replaced: The process that died.
    """

    event: ClassVar[str] = "phalanx.zygote_replaced"
    level: ClassVar[str] = "warning"
    pid: int
    replaced: int
    reason: str
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardianReplaced:
    """The process that guards against orphans died and another has taken its place.

    Attributes:
        replaced: The process that died.
    """

    event: ClassVar[str] = "phalanx.guardian_replaced"
    level: ClassVar[str] = "warning"
    pid: int
    replaced: int
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkUnsafe:
    """The zygote must not be forked: workers are started as fresh interpreters, which is slow.

    Attributes:
        problem: What the preload left behind: threads, or a CUDA context.
    """

    event: ClassVar[str] = "phalanx.fork_unsafe"
    level: ClassVar[str] = "warning"
    problem: str
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HubCallbackFailed:
    """Something that the hub called raised.

    Attributes:
        trace: The traceback.
    """

    event: ClassVar[str] = "phalanx.hub_callback_failed"
    level: ClassVar[str] = "error"
    callback: str
    trace: str
    at: float


def unheard(event: LoggedEvent) -> None:
    """Do nothing with *event*: for parts that are used without a stream."""


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


def fields(event: LoggedEvent) -> dict[str, Any]:
    """Return *event* as a record that JSON can hold, its name and level included."""
    record: dict[str, Any] = {"event": event.event, "level": getattr(event, "level", "info")}
    for field in dataclasses.fields(event):
        record[field.name] = _plain(getattr(event, field.name))
    return record


def _plain(value: object) -> Any:
    match value:
        case Enum():
            return value.value
        case None | bool() | int() | float() | str():
            return value
        case ExitReason():
            return str(value)
        case dict():
            items = cast("dict[object, object]", value).items()
            return {str(key): _plain(item) for key, item in items}
        case list() | tuple() | set() | frozenset():
            return [_plain(item) for item in cast("list[object]", value)]
        case Briefable():
            return json.loads(value.brief().to_json())
        case _ if dataclasses.is_dataclass(value):
            return {
                field.name: _plain(getattr(value, field.name))
                for field in dataclasses.fields(value)
            }
        case _:
            return repr(value)
