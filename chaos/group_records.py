"""What a driver tells of its groups and their ranks, as it sees them.

Guarantees: frozen values, each one line of JSON (`record`).

Left to others: hearing of it (`recorder`), and what of it may not happen (`group_rules`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .record import Ranks, Record


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
