"""Decisions of a rank group: the pure half of an executor.

- Each function takes the group and an event, and returns the group after it and its actions,
  in order. Times are seconds on one monotonic clock. A group that has ended stays as it is.
- An incarnation names one start of a rank, so that messages of an earlier one are recognised.
- A group is started as a whole and stopped as a whole. A rank that ends unasked is restarted with
  those that the strategy ties to it; deaths of ranks that are being stopped are absorbed.
- Past its intensity, or when its first start fails, the group stops every rank and ends once.
- The epoch rises whenever ranks that share a rendezvous are formed anew.
- With survivors kept (`GroupState.keep`) only the dead rank is started; the others leave their
  group and form the next epoch with it. A survivor that dies meanwhile belongs to the same restart.
  A rank that was itself started in this restart counts, and if it failed by itself none are kept:
  an `on_reform` that always fails would loop for ever.
- Unlike in OTP, ranks start and stop in parallel (they share a rendezvous). The rules for counting
  restarts and for giving up are OTP's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, TypeAlias

from phalanx.supervision.core.decider import Directive
from phalanx.supervision.core.machine import verdict
from phalanx.supervision.core.restart_rules import (
    SHUTDOWN,
    BackOff,
    ExitKind,
    ExitReason,
    Restart,
    RestartWindow,
    Strategy,
    in_period,
)

if TYPE_CHECKING:
    from collections.abc import Iterable


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
    """Call `wait_over` at *at*."""

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
    """A rank group; a new one has *size* ranks, none of them started.

    Attributes:
        size: The number of ranks, after the next start.
        mending: The ranks to start as soon as all of them are down.
        keep: Whether the survivors of a death are kept.
        failures: Restarts in a row without a healthy time between, for the back-off.
        served_at: When the group last became complete, or None.
        ending: The reason of its end, once it ends.
        fresh: The ranks that were started since the group last served.
        reached: The last incarnation of each rank at the last start, also of ranks removed by a
            resize: no incarnation of a rank is numbered twice.
    """

    strategy: Strategy
    window: RestartWindow
    size: int
    ranks: tuple[Rank, ...] = ()
    restart: Restart = Restart.PERMANENT
    backoff: BackOff | None = None
    phase: Phase = Phase.STARTING
    epoch: int = 0
    mending: frozenset[int] = frozenset()
    keep: bool = False
    fresh: frozenset[int] = frozenset()
    reached: tuple[int, ...] = ()
    failures: int = 0
    waits_until: float = 0.0
    served_at: float | None = None
    ending: ExitReason | None = None

    def __post_init__(self) -> None:
        if not self.ranks:
            object.__setattr__(self, "ranks", tuple(map(Rank, range(self.size))))

    def state_of(self, rank: int, incarnation: int) -> RankState:
        """Return the state of an *incarnation*; down if *rank* has another one, or is gone."""
        found = self.ranks[rank] if rank < len(self.ranks) else Rank(rank)
        return found.state if found.incarnation == incarnation else RankState.DOWN

    def live_among(self, ranks: frozenset[int]) -> frozenset[int]:
        """Return those of *ranks* that are not down."""
        return frozenset(n for n in ranks if self.ranks[n].state is not RankState.DOWN)

    def tied_to(self, ranks: frozenset[int]) -> frozenset[int]:
        """Return *ranks* and those that are restarted with them."""
        return ranks.union(self.strategy.tied(range(len(self.ranks)), min(ranks)))

    def replaced_after(self, dead: frozenset[int]) -> frozenset[int]:
        """Return the ranks that are started anew after *dead* have died."""
        if not self.keep:
            return self.tied_to(dead)
        # A rank in its start cannot join a further epoch.
        starting = (rank.number for rank in self.ranks if rank.state is RankState.STARTING)
        return dead.union(starting)

    def marked(self, ranks: frozenset[int] | set[int], to: RankState) -> GroupState:
        """Return the group with *ranks* in that state."""
        marked = tuple(replace(r, state=to) if r.number in ranks else r for r in self.ranks)
        return replace(self, ranks=marked)

    def stopping(self, ranks: frozenset[int], *, hurry: bool) -> RankDecision:
        """Return what follows when those of *ranks* that are not down are stopped together."""
        live = self.live_among(ranks)
        stop = (StopRanks(tuple(sorted(live)), hurry=hurry),) if live else ()
        return self.marked(live, RankState.STOPPING), (Hold(), *stop)


RankDecision: TypeAlias = tuple[GroupState, tuple[RankAction, ...]]


def begin(state: GroupState) -> RankDecision:
    """Start the group for the first time."""
    return _start(replace(state, mending=frozenset(range(state.size))))


def rank_ready(
    state: GroupState, rank: int, incarnation: int, at: float, *, joined: int | None = None
) -> RankDecision:
    """Return what follows when a rank has finished its start; a survivor has *joined* an epoch."""
    due = RankState.STARTING if joined is None else RankState.REFORMING
    is_due = state.state_of(rank, incarnation) is due and joined in (None, state.epoch)
    if not is_due or state.phase is Phase.ENDED:
        return state, ()
    state = state.marked({rank}, RankState.UP)
    if any(other.state is not RankState.UP for other in state.ranks):
        return state, ()
    state = replace(state, phase=Phase.SERVING, served_at=at, fresh=frozenset())
    return state, (Serve(state.epoch),)


def restart(state: GroupState, ranks: frozenset[int], *, force: bool = False) -> RankDecision:
    """Restart *ranks* as planned, and those the strategy ties to them, if none are kept.

    With *force* the calls that they run are ended, not waited for.
    """
    if state.phase is not Phase.SERVING:
        return state, ()
    # Survivors of a death would be kept, so these are too.
    return _renew(state, ranks if state.keep else state.tied_to(ranks), hurry=force)


def resize(state: GroupState, size: int) -> RankDecision:
    """Form all ranks anew, in a group of *size*."""
    if state.phase is not Phase.SERVING:
        return state, ()
    everyone = frozenset(rank.number for rank in state.ranks)
    return _renew(replace(state, size=size), everyone, hurry=False)


def wait_over(state: GroupState, at: float) -> RankDecision:
    """Return what follows when a back-off has passed."""
    # A wait that was overtaken by a longer one ends too early.
    due = state.phase is Phase.WAITING and at >= state.waits_until
    return _start(state) if due else (state, ())


def close(state: GroupState, reason: ExitReason) -> RankDecision:
    """Stop the group."""
    if state.phase in (Phase.CLOSING, Phase.ENDED):
        return state, ()
    return _close(state, reason, hurry=False)


def ranks_exited(
    state: GroupState,
    exits: Iterable[tuple[int, int]],
    reason: ExitReason,
    at: float,
    *,
    jitter: float = 0.0,
    directive: Directive | None = None,
    out_of_step: bool = False,
) -> RankDecision:
    """Return what follows when these (rank, incarnation) have ended together, of one cause.

    However many they are, they count as one restart and lead to one epoch.

    *jitter*, in [0, 1), spreads the back-off. *directive* is that of the user's decider; None
    leaves it to the restart type. *out_of_step*: they were ended because the process group was
    broken or its ranks were out of step, and all ranks are formed anew, whatever the strategy.
    """
    was = {rank: state.state_of(rank, incarnation) for rank, incarnation in exits}
    ended = {rank for rank, before in was.items() if before is not RankState.DOWN}
    if not ended or state.phase is Phase.ENDED:
        return state, ()
    state = state.marked(ended, RankState.DOWN)
    if state.phase is Phase.CLOSING:
        return _settle_closing(state)
    dead = frozenset(rank for rank in ended if was[rank] is not RankState.STOPPING)
    if not dead:
        return _resume(state, at, jitter)
    name = _names(dead)
    served_at = state.served_at
    if served_at is None:
        why = f"{name} failed in the group's first start"
        return _close(state, reason, Decided("stop the group", why), hurry=True)
    if directive in (Directive.STOP, Directive.ESCALATE):
        text = f"{name}: {directive} by the decider: stop the group"
        ending = replace(SHUTDOWN, detail=f"gave up: {name} ended {reason}: escalated")
        if directive is Directive.STOP:
            ending = ExitReason(ExitKind.NORMAL, f"{name} was stopped by the decider")
        return _close(state, ending, Decided(text), hurry=directive is Directive.ESCALATE)
    if Directive.RESTART not in (directive, verdict(state.restart, reason)):
        why = f"{name} is {state.restart} and its end was {reason.kind}"
        return _close(state, reason, Decided("stop the group", why), hurry=False)
    affected = state.replaced_after(dead)
    if out_of_step and not state.keep:
        affected = frozenset(each.number for each in state.ranks)
    reforming = frozenset(rank for rank in dead if was[rank] is RankState.REFORMING)
    if reforming == dead and not dead & state.fresh:
        decided = Decided(f"replace {_names(affected)}, within the same restart", "it was in one")
        return _mend(state, affected, decided, at, jitter)
    if reforming & state.fresh and reason.kind is not ExitKind.KILLED:
        affected = state.tied_to(dead)  # a kill says nothing about its hook
    window = state.window.admit(at)
    limit = f"{state.window.max_restarts} restarts{in_period(state.window.period)}"
    if window is None:
        decided = Decided("give up", f"more than {limit}")
        last = f"the last: {name}, {reason}"
        ending = replace(SHUTDOWN, detail=f"{decided.text}: {decided.why}; {last}")
        return _close(state, ending, decided, hurry=True)
    rested = (
        state.backoff is not None
        and state.phase is Phase.SERVING
        and at - served_at >= state.backoff.reset_after
    )
    text = f"restart {_names(affected)}"
    if state.keep and len(affected) < len(state.ranks):
        text += ", the others are kept"
    decided = Decided(text, f"{state.strategy}, number {len(window.spent)} of at most {limit}")
    state = replace(state, window=window, failures=1 if rested else state.failures + 1)
    return _mend(state, affected, decided, at, jitter)


def _mend(
    state: GroupState, affected: frozenset[int], decided: Decided, at: float, jitter: float
) -> RankDecision:
    """Stop those of *affected* that live, and start all of them once they are down."""
    state, stop = state.stopping(affected, hurry=True)
    state = replace(state, mending=state.mending | affected, phase=Phase.MENDING)
    state, actions = _resume(state, at, jitter)
    return state, (decided, *stop, *actions)


def _resume(state: GroupState, at: float, jitter: float) -> RankDecision:
    """Start the ranks of `mending` once all of them are down, after the back-off."""
    if state.phase is Phase.WAITING or state.live_among(state.mending):
        return state, ()
    delay = 0.0
    if state.backoff is not None and state.failures:
        delay = state.backoff.delay(state.failures, jitter)
    if delay > 0:
        until = at + delay
        return replace(state, phase=Phase.WAITING, waits_until=until), (WaitUntil(until),)
    return _start(state)


def _start(state: GroupState) -> RankDecision:
    there = len(state.ranks)
    reached = (*(rank.incarnation for rank in state.ranks), *state.reached[there:])
    back = (Rank(n, reached[n]) for n in range(there, min(state.size, len(reached))))
    new = (Rank(n) for n in range(len(reached), state.size))
    ranks = (*state.ranks[: state.size], *back, *new)
    grown = frozenset(range(there, state.size))
    chosen = frozenset(n for n in state.mending | grown if n < state.size)
    # Under one_for_one the ranks never meet: the survivors' calls go on in their epoch.
    alone = state.strategy is Strategy.ONE_FOR_ONE and len(chosen) < state.size
    epoch = state.epoch if alone else state.epoch + 1
    kept = frozenset(rank.number for rank in ranks if state.keep and rank.number not in chosen)
    ranks = tuple(
        Rank(rank.number, rank.incarnation + 1, RankState.STARTING)
        if rank.number in chosen
        else replace(rank, state=RankState.REFORMING)
        if rank.number in kept
        else rank
        for rank in ranks
    )
    phase = Phase.STARTING if state.served_at is None else Phase.MENDING
    state = replace(
        state,
        ranks=ranks,
        epoch=epoch,
        phase=phase,
        mending=frozenset(),
        fresh=state.fresh | chosen,
        reached=reached,
    )
    started = tuple((rank.number, rank.incarnation) for rank in ranks if rank.number in chosen)
    start = StartRanks(epoch, state.size, started)
    reform = tuple((rank.number, rank.incarnation) for rank in ranks if rank.number in kept)
    # Survivors leave first: one that stays in the old group blocks others in it.
    return state, (ReformRanks(epoch, reform), start) if reform else (start,)


def _renew(state: GroupState, affected: frozenset[int], *, hurry: bool) -> RankDecision:
    """Stop *affected*, in good order unless in a *hurry*, and start them; planned: not counted."""
    state, stop = state.stopping(affected, hurry=hurry)
    return replace(state, mending=affected, phase=Phase.MENDING, failures=0), stop


def _close(
    state: GroupState, reason: ExitReason, *decided: RankAction, hurry: bool
) -> RankDecision:
    fresh = frozenset(r.number for r in state.ranks if r.state is not RankState.STOPPING)
    state, stop = state.stopping(fresh, hurry=hurry)
    state = replace(state, phase=Phase.CLOSING, ending=reason, mending=frozenset())
    state, actions = _settle_closing(state)
    return state, (*decided, *stop, *actions)


def _settle_closing(state: GroupState) -> RankDecision:
    if any(rank.state is not RankState.DOWN for rank in state.ranks):
        return state, ()
    reason = state.ending or SHUTDOWN
    return replace(state, phase=Phase.ENDED), (End(reason),)


def _names(ranks: frozenset[int]) -> str:
    if len(ranks) == 1:
        return f"rank {next(iter(ranks))}"
    return f"ranks {', '.join(map(str, sorted(ranks)))}"
