"""What a rank group wants done: everything `decide_ranks` ever asks for.

Guarantees: a closed union of values, to be performed in the order in which they are returned.

Left to others: performing them; what follows comes back as an event (`rank_events`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .exits import ExitReason


@dataclass(frozen=True, slots=True)
class StartRanks:
    """Start these (rank, incarnation) together, under *epoch*, in a group of *size*."""

    epoch: int
    size: int
    ranks: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class ReformRanks:
    """Have these (rank, incarnation) leave their group and join *epoch*."""

    epoch: int
    ranks: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class StopRanks:
    """Stop these ranks together; in a *hurry* they may be stuck, and what they run is ended."""

    ranks: tuple[int, ...]
    hurry: bool


@dataclass(frozen=True, slots=True)
class Hold:
    """The group is not whole: hold collective calls back."""


@dataclass(frozen=True, slots=True)
class Serve:
    """The group is whole under *epoch*: let calls go."""

    epoch: int


@dataclass(frozen=True, slots=True)
class WaitUntil:
    """Come back with `WaitOver` at *at*."""

    at: float


@dataclass(frozen=True, slots=True)
class Decided:
    """What was decided about a death, and why, for the crash report."""

    text: str
    why: str = ""

    def __str__(self) -> str:
        return f"{self.text} ({self.why})" if self.why else self.text


@dataclass(frozen=True, slots=True)
class End:
    """The group has ended for good."""

    reason: ExitReason


RankAction = StartRanks | ReformRanks | StopRanks | Hold | Serve | WaitUntil | Decided | End
