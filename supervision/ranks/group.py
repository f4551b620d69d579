"""State, events and actions of a rank group, as values.

Events and actions are closed unions; actions are performed in the order in which they are returned.
Times are seconds on one monotonic clock and stand in the event. An incarnation names one start of a
rank, so that messages of an earlier one are recognised.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from phalanx.supervision.core.policy import Restart, Strategy

if TYPE_CHECKING:
    from phalanx.supervision.core.decider import Directive
    from phalanx.supervision.core.policy import BackOff, ExitReason, RestartWindow


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
    """Stop these ranks together; in a *hurry* without waiting for what they run."""

    ranks: tuple[int, ...]
    hurry: bool


@dataclass(frozen=True, slots=True)
class Hold:
    """The group is incomplete: queue collective calls."""


@dataclass(frozen=True, slots=True)
class Serve:
    """The group is complete under *epoch*: send calls."""

    epoch: int


@dataclass(frozen=True, slots=True)
class WaitUntil:
    """Deliver `WaitOver` at *at*."""

    at: float


@dataclass(frozen=True, slots=True)
class Decided:
    """The decision about a death, and the reason, for the crash report."""

    text: str
    why: str = ""

    def __str__(self) -> str:
        return f"{self.text} ({self.why})" if self.why else self.text


@dataclass(frozen=True, slots=True)
class End:
    """The group has ended for good."""

    reason: ExitReason


RankAction = StartRanks | ReformRanks | StopRanks | Hold | Serve | WaitUntil | Decided | End


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
    """A survivor has joined *epoch*."""

    rank: int
    incarnation: int
    epoch: int
    at: float


@dataclass(frozen=True, slots=True)
class RankExited:
    """A rank's process has ended.

    Attributes:
        jitter: In [0, 1), spreads the back-off.
        directive: That of the user's decider; None leaves it to the restart type.
        out_of_step: It was ended because its process group was broken or its ranks were out of
            step: all of them are formed anew, whatever the strategy.
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
        force: Whether the calls that they run are ended, not waited for.
    """

    ranks: frozenset[int]
    at: float
    force: bool = False


@dataclass(frozen=True, slots=True)
class ResizeAsked:
    """Form all ranks anew, in a group of *size*."""

    size: int
    at: float


@dataclass(frozen=True, slots=True)
class WaitOver:
    """The back-off has passed."""

    at: float


@dataclass(frozen=True, slots=True)
class CloseAsked:
    """Stop the group."""

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


class RankState(StrEnum):
    """The state of one rank."""

    DOWN = "down"
    STARTING = "starting"
    UP = "up"
    REFORMING = "reforming"  # a survivor that leaves its group and joins the next epoch
    STOPPING = "stopping"


class Phase(StrEnum):
    """The state of the group."""

    STARTING = "starting"  # for the first time
    SERVING = "serving"
    MENDING = "mending"  # some ranks are being stopped or started
    WAITING = "waiting"  # for the back-off to pass
    CLOSING = "closing"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank: *incarnation* counts its starts, 0 before the first."""

    number: int
    incarnation: int = 0
    state: RankState = RankState.DOWN


@dataclass(frozen=True, slots=True)
class GroupState:
    """A rank group.

    Attributes:
        window: The restarts spent, against the intensity.
        mending: The ranks to start as soon as all of them are down.
        failures: Restarts in a row without a healthy time between, for the back-off.
        waits_until: The end of the back-off, while it waits.
        served_at: When the group last became complete, or None.
        ending: The reason of its end, once it ends.
        size: The number of ranks, after the next start.
        keep: Whether the survivors of a death are kept.
        fresh: The ranks that were started since the group last served.
        reached: The last incarnation of each rank at the last start, also of ranks removed by a
            resize: no incarnation of a rank is numbered twice.
    """

    strategy: Strategy
    window: RestartWindow
    ranks: tuple[Rank, ...]
    restart: Restart = Restart.PERMANENT
    backoff: BackOff | None = None
    phase: Phase = Phase.STARTING
    epoch: int = 0
    mending: frozenset[int] = frozenset()
    size: int = 0
    keep: bool = False
    fresh: frozenset[int] = frozenset()
    reached: tuple[int, ...] = ()
    failures: int = 0
    waits_until: float = 0.0
    served_at: float | None = None
    ending: ExitReason | None = None

    def live_among(self, ranks: frozenset[int]) -> frozenset[int]:
        """Return those of *ranks* that are not down."""
        return frozenset(n for n in ranks if self.ranks[n].state is not RankState.DOWN)

    def tied_to(self, ranks: frozenset[int]) -> frozenset[int]:
        """Return *ranks* and those that are restarted with them."""
        match self.strategy:
            case Strategy.ONE_FOR_ALL:
                return frozenset(range(len(self.ranks)))
            case Strategy.REST_FOR_ONE:
                return frozenset(range(min(ranks), len(self.ranks)))
            case _:
                return ranks

    def replaced_after(self, dead: int) -> frozenset[int]:
        """Return who is started anew after *dead* has died."""
        if not self.keep:
            return self.tied_to(frozenset((dead,)))
        # In its start a rank hears nothing of a further epoch.
        starting = (rank.number for rank in self.ranks if rank.state is RankState.STARTING)
        return frozenset((dead, *starting))

    def marked(self, ranks: frozenset[int] | set[int], to: RankState) -> GroupState:
        """Return the group with *ranks* in that state."""
        marked = tuple(replace(r, state=to) if r.number in ranks else r for r in self.ranks)
        return replace(self, ranks=marked)


def new_group(
    strategy: Strategy,
    window: RestartWindow,
    size: int,
    *,
    restart: Restart = Restart.PERMANENT,
    backoff: BackOff | None = None,
    keep: bool = False,
) -> GroupState:
    """Return a group of *size* ranks, none of them started."""
    ranks = tuple(Rank(number) for number in range(size))
    return GroupState(
        strategy, window, ranks, restart=restart, backoff=backoff, size=size, keep=keep
    )
