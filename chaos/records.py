"""What a history is made of: one frozen value for each thing that happened in a run.

Guarantees: every record is one line of JSON and survives the way there and back; `line` tells it
to a person. Who wrote it is part of the evidence: the driver tells of calls and ranks as it sees
them, the workers themselves of what they really ran, the referee of the faults and of what was
left behind.

Left to others: files (`journal`), what may not happen (`checker`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any, ClassVar, cast

Ranks = tuple[tuple[int, int], ...]
"""(rank, incarnation), ..."""


_UNTOLD = ("at", "thread")
_NOTHING: tuple[object, ...] = (None, "", ())


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One thing that happened.

    Attributes:
        at: When: in a file on the monotonic clock of the machine, in a `History` since the run
            began; in seconds.
    """

    kind: ClassVar[str] = ""
    at: float

    def line(self) -> str:
        """Return it as a person reads it, without what says nothing."""
        values = ((f.name, getattr(self, f.name)) for f in fields(self) if f.name not in _UNTOLD)
        named = (f"{name}={value!r}" for name, value in values if value not in _NOTHING)
        return f"{self.at:9.3f}  {self.kind:<13} {' '.join(named)}"

    def to_json(self) -> str:
        """Return it as one line."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        return json.dumps({"kind": self.kind, **named})


# --- the run ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LifeBegan(Record):
    """A driver began; after one that was killed there is another.

    Attributes:
        life: 1 for the first.
    """

    kind: ClassVar[str] = "life_began"
    life: int
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LifeEnded(Record):
    """A driver ended.

    Attributes:
        closed: Whether it closed everything itself; what it had in flight otherwise has no outcome
            that anybody could have heard.
    """

    kind: ClassVar[str] = "life_ended"
    life: int
    closed: bool
    how: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Struck(Record):
    """A fault was done to somebody.

    Attributes:
        strike: Its number in the schedule.
        point: The moment it was aimed at; empty where it was not.
        rank: The victim's; None for what is no rank.
        lethal: Whether it ends the victim by itself.
    """

    kind: ClassVar[str] = "struck"
    strike: int
    fault: str
    target: str
    point: str = ""
    group: str = ""
    rank: int | None = None
    incarnation: int | None = None
    pid: int | None = None
    lethal: bool = False
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Missed(Record):
    """A fault found nobody to do it to."""

    kind: ClassVar[str] = "missed"
    strike: int
    fault: str
    target: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Examined(Record):
    """After the last fault the group was given time to heal, and every rank was called.

    Attributes:
        ok: Whether it served.
        ended: Whether it had ended for good.
    """

    kind: ClassVar[str] = "examined"
    group: str
    ok: bool
    ended: bool = False
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Left(Record):
    """Something was there after the end that was not there before the beginning.

    Attributes:
        what: ``process``, ``shared memory``, ``file``, ``descriptor``, ``thread`` or
            ``device memory``.
    """

    kind: ClassVar[str] = "left"
    what: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Complained(Record):
    """The traffic itself found something wrong: it raised what no fault explains."""

    kind: ClassVar[str] = "complained"
    error: str
    trace: str = ""

    def line(self) -> str:
        """Return it with its traceback as one."""
        first = f"{self.at:9.3f}  {self.kind:<13} {self.error}"
        return "\n".join((first, *(f"      {each}" for each in self.trace.splitlines())))


# --- groups, as their driver sees them ----------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupBuilt(Record):
    """An executor was built.

    Attributes:
        group: Its name; with a number where the run had one of that name before.
        survivors: ``restart`` or ``keep``.
    """

    kind: ClassVar[str] = "group_built"
    group: str
    world_size: int
    strategy: str
    intensity: int
    period: float
    restart: str = "permanent"
    survivors: str = "restart"
    standby: int = 0
    pid: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStarted(Record):
    """A rank was given a process."""

    kind: ClassVar[str] = "rank_started"
    group: str
    rank: int
    incarnation: int
    epoch: int
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReady(Record):
    """A rank had finished its start."""

    kind: ClassVar[str] = "rank_ready"
    group: str
    rank: int
    incarnation: int
    epoch: int
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankExited(Record):
    """A rank's process had ended."""

    kind: ClassVar[str] = "rank_exited"
    group: str
    rank: int
    incarnation: int
    epoch: int
    pid: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDied(Record):
    """That exit was not asked for.

    Attributes:
        rank: None for a spare, whose death is none of the group's.
        method: The call it was in; empty for none.
        decision: What was decided about it, in the driver's words.
    """

    kind: ClassVar[str] = "rank_died"
    group: str
    rank: int | None
    incarnation: int
    epoch: int
    pid: int
    reason: str
    method: str = ""
    decision: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NotStarted(Record):
    """Ranks could not be given a process, which counts like their death."""

    kind: ClassVar[str] = "not_started"
    group: str
    ranks: Ranks
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupUp(Record):
    """The group was whole."""

    kind: ClassVar[str] = "group_up"
    group: str
    epoch: int
    world_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupDown(Record):
    """The group was not whole any more."""

    kind: ClassVar[str] = "group_down"
    group: str
    epoch: int
    cause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupEnded(Record):
    """The group ended.

    Attributes:
        cause: Why, where it was not closed.
    """

    kind: ClassVar[str] = "group_ended"
    group: str
    epoch: int
    cause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangePlanned(Record):
    """A restart or a resize was asked for; it counts as no failure.

    Attributes:
        world_size: What it is to be; None where that stays.
    """

    kind: ClassVar[str] = "change_planned"
    group: str
    ranks: tuple[int, ...] = ()
    world_size: int | None = None


# --- calls, as their driver sees them -----------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Issued(Record):
    """A call was made.

    Attributes:
        call: Its number, unique in the run.
        shape: ``collective``, ``gather``, ``single`` or ``pool``.
        on_death: ``fail`` or ``retry``; the latter up to *retries* times.
        rank: The one it is for; None for all, and for any.
        thread: The caller's.
        seconds: How long it had until its deadline; None for no limit.
    """

    kind: ClassVar[str] = "issued"
    group: str
    call: int
    method: str
    shape: str
    on_death: str
    retries: int = 0
    rank: int | None = None
    thread: int = 0
    seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent(Record):
    """A call went to ranks; once for each attempt.

    Attributes:
        wire: The number of this sending, unique in the group.
        ranks: To whom.
    """

    kind: ClassVar[str] = "sent"
    group: str
    call: int
    wire: int
    epoch: int
    ranks: Ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled(Record):
    """A call had its outcome.

    Attributes:
        outcome: ``value``, ``error`` (a worker's exception), ``died``, ``timeout``, ``closed``,
            ``cancelled`` or ``fault`` (ours).
        error: The type of what was raised; empty for none.
    """

    kind: ClassVar[str] = "settled"
    group: str
    call: int
    outcome: str
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken(Record):
    """A caller took a rank's answer, which carries the name of the run that made it.

    Attributes:
        rank: Whose answer it was taken for.
        by_call: Of which call it says it is the answer; the rest likewise.
        by_item: Which item of a stream it says it is; None for an answer.
    """

    kind: ClassVar[str] = "taken"
    group: str
    call: int
    rank: int
    by_call: int
    by_rank: int
    by_incarnation: int
    by_wire: int
    by_item: int | None = None


# --- what workers themselves wrote --------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Woke(Record):
    """A worker was about to run ``on_start``, or ``on_reform`` where *kept*.

    Attributes:
        rendezvous: Where this epoch meets; empty where it does not.
        outlived: Processes of earlier incarnations of this rank that were still there.
    """

    kind: ClassVar[str] = "woke"
    group: str
    rank: int
    incarnation: int
    epoch: int
    pid: int
    rendezvous: str = ""
    kept: bool = False
    outlived: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Began(Record):
    """A worker began to run a call: its effect.

    Attributes:
        turn: How many this incarnation has begun, with it.
    """

    kind: ClassVar[str] = "began"
    group: str
    rank: int
    incarnation: int
    epoch: int
    call: int
    wire: int
    turn: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended(Record):
    """A worker had run a call, and was about to answer.

    Attributes:
        error: The type of what it raised; empty for a value.
    """

    kind: ClassVar[str] = "ended"
    group: str
    rank: int
    incarnation: int
    epoch: int
    call: int
    wire: int
    error: str = ""


_KINDS: dict[str, type[Record]] = {
    each.kind: each
    for each in (
        *(LifeBegan, LifeEnded, Struck, Missed, Examined, Left, Complained),
        *(GroupBuilt, RankStarted, RankReady, RankExited, RankDied, NotStarted),
        *(GroupUp, GroupDown, GroupEnded, ChangePlanned),
        *(Issued, Sent, Settled, Taken),
        *(Woke, Began, Ended),
    )
}


def record_of(text: str) -> Record:
    """Return the record that `Record.to_json` made *text* of.

    Raises:
        ValueError: *text* is none.
    """
    loaded: Any = json.loads(text)
    try:
        found = _KINDS[loaded.pop("kind")]
        return found(**{name: _frozen(value) for name, value in loaded.items()})
    except (AttributeError, KeyError, TypeError) as error:
        msg = f"not a record of a run: {text[:200]}"
        raise ValueError(msg) from error


def _frozen(value: object) -> Any:
    if isinstance(value, list):
        return tuple(_frozen(each) for each in cast("list[object]", value))
    return value
