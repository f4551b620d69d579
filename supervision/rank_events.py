"""What can happen to a rank group: everything `decide_ranks` ever hears of.

Guarantees: a closed union. Times are seconds on one monotonic clock and stand in the event; an
incarnation names the start that is meant, so that news of an earlier one is recognised.

Left to others: the order; whoever delivers the events keeps it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .decider import Directive
    from .exits import ExitReason


@dataclass(frozen=True, slots=True)
class Begin:
    """Start the group for the first time."""

    at: float


@dataclass(frozen=True, slots=True)
class RankReady:
    """A rank has finished its start."""

    rank: int
    incarnation: int
    at: float


@dataclass(frozen=True, slots=True)
class RankReformed:
    """A rank that was kept has joined *epoch*."""

    rank: int
    incarnation: int
    epoch: int
    at: float


@dataclass(frozen=True, slots=True)
class RankExited:
    """A rank's process has ended.

    Attributes:
        jitter: In [0, 1), spreads the back-off.
        directive: What the user's decider says of it; None leaves it to the restart type.
        out_of_step: It was ended because the ranks of a process group were out of step, or that was
            broken: so all of them are formed anew, whatever the strategy.
    """

    rank: int
    incarnation: int
    reason: ExitReason
    at: float
    jitter: float = 0.0
    directive: Directive | None = None
    out_of_step: bool = False


@dataclass(frozen=True, slots=True)
class RestartAsked:
    """A planned restart of *ranks*, and of those the strategy ties to them, if none are kept.

    Attributes:
        force: Whether what they run now is ended, not waited for.
    """

    ranks: frozenset[int]
    at: float
    force: bool = False


@dataclass(frozen=True, slots=True)
class ResizeAsked:
    """The group is to have *size* ranks, all of them formed anew."""

    size: int
    at: float


@dataclass(frozen=True, slots=True)
class WaitOver:
    """The back-off has passed."""

    at: float


@dataclass(frozen=True, slots=True)
class CloseAsked:
    """The group is to stop."""

    reason: ExitReason
    at: float


RankEvent = (
    Begin
    | RankReady
    | RankReformed
    | RankExited
    | RestartAsked
    | ResizeAsked
    | WaitOver
    | CloseAsked
)
