"""Events of a run: one frozen dataclass for each kind, one line of JSON for each event.

Three parties write events, and the writer is part of the evidence: the runner (its drivers, the
injected faults, leaks), the probe in the driver (groups and calls as the driver sees them), and the
probe in each worker (calls that ran). `event_of` is the inverse of `Event.to_json`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any, cast, dataclass_transform

Ranks = tuple[tuple[int, int], ...]
"""(rank, incarnation), ..."""

_HIDDEN = ("at", "thread")
_EMPTY: tuple[object, ...] = (None, "", ())
_KINDS: dict[str, type[Event]] = {}


@dataclass_transform(kw_only_default=True, frozen_default=True)
@dataclass(frozen=True, kw_only=True)
class Event:
    """One thing that happened; each subclass is a frozen dataclass, and a kind of event.

    Attributes:
        at: Seconds; in a file on the machine's monotonic clock, in a `History` since the run began.
    """

    at: float

    def __init_subclass__(cls) -> None:
        _KINDS[cls.__name__] = dataclass(frozen=True, kw_only=True)(cls)

    @property
    def kind(self) -> str:
        """The name of the class."""
        return type(self).__name__

    def line(self) -> str:
        """Return the event as text, without empty fields."""
        values = ((f.name, getattr(self, f.name)) for f in fields(self) if f.name not in _HIDDEN)
        named = (f"{name}={value!r}" for name, value in values if value not in _EMPTY)
        return f"{self.at:9.3f}  {self.kind:<18} {' '.join(named)}"

    def to_json(self) -> str:
        """Return the event as one line of JSON."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        return json.dumps({"kind": self.kind, **named})


def event_of(text: str) -> Event:
    """Return the event that `Event.to_json` made *text* of.

    Raises:
        ValueError: *text* is no event.
    """
    loaded: Any = json.loads(text)
    try:
        found = _KINDS[loaded.pop("kind")]
        return found(**{name: _frozen(value) for name, value in loaded.items()})
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"not an event of a run: {text[:200]}") from error


def _frozen(value: object) -> Any:
    if isinstance(value, list):
        return tuple(_frozen(each) for each in cast("list[object]", value))
    return value


# --- the runner ---------------------------------------------------------------------------


class DriverStarted(Event):
    """A driver started; *number* is 1 for the first, and rises after each one that was killed."""

    number: int
    pid: int


class DriverEnded(Event):
    """A driver ended; unless *closed*, its calls in progress have no outcome."""

    number: int
    closed: bool
    how: str = ""


class FaultInjected(Event):
    """Fault *number* of the schedule was injected into *rank*, or into another process."""

    number: int
    fault: str
    target: str
    point: str = ""  # the injection point; empty for any time
    group: str = ""
    rank: int | None = None
    incarnation: int | None = None
    pid: int | None = None
    lethal: bool = False  # whether it ends the victim by itself
    note: str = ""
    node: int | None = None  # the number of the node, if it hits a whole one
    seconds: float | None = None  # how long it lasts, if it hits a whole node


class FaultMissed(Event):
    """A fault could not be injected."""

    number: int
    fault: str
    target: str
    why: str


class SteadyStateChecked(Event):
    """After the last fault every rank of a group was called; *ended*: the group had ended."""

    group: str
    ok: bool
    ended: bool = False
    detail: str = ""


class LeakFound(Event):
    """Something was left behind; *what* and *name* are those of `phalanx.testing.Leak`."""

    what: str
    name: str


class WorkloadFailed(Event):
    """The traffic raised an error that no fault explains."""

    error: str
    trace: str = ""

    def line(self) -> str:
        """Return the error with its traceback."""
        first = f"{self.at:9.3f}  {self.kind:<18} {self.error}"
        return "\n".join((first, *(f"      {each}" for each in self.trace.splitlines())))


# --- the driver: groups -------------------------------------------------------------------


class GroupEvent(Event):
    """An event of an executor; *group* is its name, with a number if the name was used before."""

    group: str


class GroupBuilt(GroupEvent):
    """An executor was built."""

    world_size: int
    strategy: str
    intensity: int
    period: float
    restart: str = "permanent"
    survivors: str = "restart"
    standby: int = 0


class RankEvent(GroupEvent):
    """An event of one incarnation of a rank."""

    rank: int
    incarnation: int
    epoch: int

    @property
    def worker(self) -> tuple[str, int, int]:
        """The group, the rank and the incarnation."""
        return self.group, self.rank, self.incarnation


class RankStarted(RankEvent):
    """The process of a rank was started."""

    pid: int | None


class RankReady(RankEvent):
    """A rank had finished its start."""

    pid: int | None


class RankExited(RankEvent):
    """The process of a rank had ended."""

    pid: int | None
    reason: str


class RankDied(GroupEvent):
    """An exit was a failure: what its crash report says.

    *rank* is None for a standby, whose death does not count for the group.
    """

    rank: int | None
    incarnation: int
    epoch: int
    pid: int | None
    reason: str
    method: str = ""  # of the call in progress
    decision: str = ""


class RanksNotStarted(GroupEvent):
    """Ranks could not be given a process, which counts like their death."""

    ranks: Ranks
    reason: str


class GroupUp(GroupEvent):
    """Every rank of the group was up."""

    epoch: int
    world_size: int


class GroupDown(GroupEvent):
    """A rank of the group was missing."""

    epoch: int
    cause: str


class GroupEnded(GroupEvent):
    """The group ended; *cause* is empty if it was closed."""

    epoch: int
    cause: str


class ChangePlanned(GroupEvent):
    """A restart, or a resize to *world_size*, was requested; it counts as no failure."""

    ranks: tuple[int, ...] = ()
    world_size: int | None = None


# --- the driver: calls --------------------------------------------------------------------


class CallIssued(GroupEvent):
    """A call was made."""

    call: int  # unique in the run
    method: str
    shape: str  # collective, gather, single or pool
    retries: int = 0
    rank: int | None = None  # None for all ranks, and for any
    thread: int = 0
    seconds: float | None = None  # until its deadline; None for no limit


class CallSent(GroupEvent):
    """A call was sent to *ranks*, once for each attempt; *wire* is unique in the group."""

    call: int
    wire: int
    epoch: int
    ranks: Ranks


class CallSettled(GroupEvent):
    """A call had its outcome.

    *outcome* is ``value``, ``error`` (a worker's exception), ``died``, ``timeout``, ``closed``,
    ``cancelled`` or ``fault`` (an error of phalanx); *error* the type of what was raised; *deaths*
    the ranks whose crash reports a `WorkerDied` carries, oldest first.
    """

    call: int
    outcome: str
    error: str = ""
    deaths: Ranks = ()


class ReplyReceived(GroupEvent):
    """A caller received a reply of *rank*, which says itself which call and rank it belongs to."""

    call: int
    rank: int
    by_call: int
    by_rank: int
    by_incarnation: int
    by_wire: int
    by_item: int | None = None  # of a stream


# --- workers ------------------------------------------------------------------------------


class WorkerStarted(RankEvent):
    """A worker was about to run ``on_start``, or ``on_reform`` if *kept*."""

    pid: int
    age: float = 0.0  # of its process, in seconds, and up to a tick too much
    rendezvous: str = ""
    kept: bool = False
    outlived: tuple[int, ...] = ()  # pids of earlier incarnations that still existed


class RankRan(RankEvent):
    """A worker on a node ran for *seconds* at least, as it has written again and again."""

    pid: int
    seconds: float


class CallBegan(RankEvent):
    """A worker began to run a call, number *turn* of this incarnation."""

    call: int
    wire: int
    turn: int
    descriptors: int = 0  # that were open; 0 if not counted


class CallEnded(RankEvent):
    """A worker had run a call, and was about to reply."""

    call: int
    wire: int
    error: str = ""  # the type of the exception
    joined: bool = False  # whether it was raised in a process group of several ranks
