"""What to do about the ranks of one group: the pure half of an executor.

Guarantees: a rank group is started as a whole and stopped as a whole; a rank that ends unasked is
restarted together with those its strategy names; deaths of ranks that are being stopped anyway are
absorbed, not counted; past its intensity, or when its first start fails, the group stops every
rank and ends once. The epoch rises whenever ranks that meet are formed anew.

Where survivors are kept (`GroupState.keep`), only the rank that died is started; the others leave
their group, form the next epoch with it, and keep what they hold. Whoever dies, or was still in its
start, while that goes on is started anew too, in a further epoch. A death of a rank that is being
re-formed belongs to the death before and is not counted again, as long as it was a survivor of it:
those only become fewer, so that comes to an end. A rank that was itself started in this restart is
counted, and where it failed by itself nobody is kept any more: an `on_reform` that can never
succeed would go round for ever.

Left to others: everything that happens. `decide_ranks` returns actions as values; time and
randomness come in the event.

How it differs from OTP's supervisor, on purpose: ranks start in parallel (they meet in a
rendezvous) and stop in parallel, where OTP goes one by one. What is counted, and when the group
gives up, is OTP's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import assert_never

from phalanx.supervision.core.decider import Directive
from phalanx.supervision.core.policy import SHUTDOWN, ExitKind, ExitReason, Restart, Strategy

from .group import (
    Begin,
    CloseAsked,
    Decided,
    End,
    GroupState,
    Hold,
    Phase,
    Rank,
    RankAction,
    RankEvent,
    RankExited,
    RankReady,
    RankReformed,
    RankState,
    ReformRanks,
    ResizeAsked,
    RestartAsked,
    Serve,
    StartRanks,
    StopRanks,
    WaitOver,
    WaitUntil,
)


def decide_ranks(state: GroupState, event: RankEvent) -> tuple[GroupState, tuple[RankAction, ...]]:
    """Return the group after *event*, and what to do, in order."""
    if state.phase is Phase.ENDED:
        return state, ()
    match event:
        case Begin():
            everyone = frozenset(range(state.size))
            return _start(replace(state, mending=everyone))
        case RankReady():
            return _ready(state, event.rank, event.incarnation, RankState.STARTING, event.at)
        case RankReformed(rank=rank, incarnation=incarnation):
            if event.epoch != state.epoch:
                return state, ()
            return _ready(state, rank, incarnation, RankState.REFORMING, event.at)
        case RankExited():
            return _exited(state, event)
        case RestartAsked(ranks=ranks, force=force):
            if state.phase is not Phase.SERVING:
                return state, ()
            # Who is kept when another dies is kept here too, and joins the ranks that come.
            return _renew(state, ranks if state.keep else state.tied_to(ranks), hurry=force)
        case ResizeAsked(size=size):
            if state.phase is not Phase.SERVING:
                return state, ()
            everyone = frozenset(rank.number for rank in state.ranks)
            return _renew(replace(state, size=size), everyone, hurry=False)
        case WaitOver(at=at):
            # A wait that was overtaken by a longer one ends too early.
            due = state.phase is Phase.WAITING and at >= state.waits_until
            return _start(state) if due else (state, ())
        case CloseAsked(reason=reason):
            if state.phase is Phase.CLOSING:
                return state, ()
            return _close(state, reason, hurry=False)
        case _:
            assert_never(event)


def _ready(
    state: GroupState, number: int, incarnation: int, was: RankState, at: float
) -> tuple[GroupState, tuple[RankAction, ...]]:
    rank = state.ranks[number] if number < len(state.ranks) else None
    if rank is None or rank.incarnation != incarnation or rank.state is not was:
        return state, ()
    state = state.marked({number}, RankState.UP)
    if any(other.state is not RankState.UP for other in state.ranks):
        return state, ()
    state = replace(state, phase=Phase.SERVING, served_at=at, fresh=frozenset())
    return state, (Serve(state.epoch),)


def _exited(state: GroupState, event: RankExited) -> tuple[GroupState, tuple[RankAction, ...]]:
    rank = state.ranks[event.rank] if event.rank < len(state.ranks) else None
    if rank is None or rank.incarnation != event.incarnation or rank.state is RankState.DOWN:
        return state, ()
    was = rank.state
    state = state.marked({event.rank}, RankState.DOWN)
    if state.phase is Phase.CLOSING:
        return _settle_closing(state)
    if was is RankState.STOPPING:
        return _resume(state, event.at, event.jitter)
    name = f"rank {event.rank}"
    served_at = state.served_at
    if served_at is None:
        told = Decided("stop the group", f"{name} failed in the group's first start")
        state, actions = _close(state, event.reason, hurry=True)
        return state, (told, *actions)
    if event.directive in (Directive.STOP, Directive.ESCALATE):
        text = f"{name}: {event.directive} by the decider: stop the group"
        ending = replace(SHUTDOWN, detail=f"gave up: {name} ended {event.reason}: escalated")
        if event.directive is Directive.STOP:
            ending = ExitReason(ExitKind.NORMAL, f"{name} was stopped by the decider")
        state, actions = _close(state, ending, hurry=event.directive is Directive.ESCALATE)
        return state, (Decided(text), *actions)
    wanted = event.directive is Directive.RESTART
    if not wanted and not _is_restarted(state.restart, event.reason):
        why = f"{name} is {state.restart} and its end was {event.reason.kind}"
        state, actions = _close(state, event.reason, hurry=False)
        return state, (Decided("stop the group", why), *actions)
    affected = state.replaced_after(event.rank)
    if event.out_of_step and not state.keep:
        affected = frozenset(each.number for each in state.ranks)
    if was is RankState.REFORMING and event.rank in state.fresh:
        # A kill says nothing about its hook: whoever sent it may strike anybody.
        if event.reason.kind is not ExitKind.KILLED:
            affected = state.tied_to(frozenset((event.rank,)))
    elif was is RankState.REFORMING:
        told = Decided(f"replace {_names(affected)}, within the same restart", "it was in one")
        return _mend(state, affected, told, event)
    window = state.window.admit(event.at)
    limit = f"{state.window.intensity} restarts in {state.window.period:g} s"
    if window is None:
        told = Decided("give up", f"more than {limit}")
        last = f"the last: {name}, {event.reason}"
        ending = replace(SHUTDOWN, detail=f"{told.text}: {told.why}; {last}")
        state, actions = _close(state, ending, hurry=True)
        return state, (told, *actions)
    rested = (
        state.backoff is not None
        and state.phase is Phase.SERVING
        and event.at - served_at >= state.backoff.reset_after
    )
    text = f"restart {_names(affected)}"
    if state.keep and len(affected) < len(state.ranks):
        text += ", the others are kept"
    told = Decided(text, f"{state.strategy}, number {len(window.spent)} of at most {limit}")
    state = replace(state, window=window, failures=1 if rested else state.failures + 1)
    return _mend(state, affected, told, event)


def _mend(
    state: GroupState, affected: frozenset[int], told: Decided, event: RankExited
) -> tuple[GroupState, tuple[RankAction, ...]]:
    """Stop those of *affected* who live, and start all of them once they are down."""
    live = state.live_among(affected)
    state = state.marked(live, RankState.STOPPING)
    state = replace(state, mending=state.mending | affected, phase=Phase.MENDING)
    state, actions = _resume(state, event.at, event.jitter)
    stop = (StopRanks(tuple(sorted(live)), hurry=True),) if live else ()
    return state, (told, Hold(), *stop, *actions)


def _resume(
    state: GroupState, at: float, jitter: float
) -> tuple[GroupState, tuple[RankAction, ...]]:
    """Start what is to be mended once all of it is down, after the back-off."""
    if state.phase is Phase.WAITING or state.live_among(state.mending):
        return state, ()
    delay = 0.0
    if state.backoff is not None and state.failures:
        delay = state.backoff.delay(state.failures, jitter)
    if delay > 0:
        until = at + delay
        return replace(state, phase=Phase.WAITING, waits_until=until), (WaitUntil(until),)
    return _start(state)


def _start(state: GroupState) -> tuple[GroupState, tuple[RankAction, ...]]:
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
    # First of all the survivors leave: each that lingers in the old group holds up others in it.
    return state, (ReformRanks(epoch, reform), start) if reform else (start,)


def _renew(
    state: GroupState, affected: frozenset[int], *, hurry: bool
) -> tuple[GroupState, tuple[RankAction, ...]]:
    """Stop *affected*, in good order unless in a *hurry*, and start them; planned: not counted."""
    live = state.live_among(affected)
    state = state.marked(live, RankState.STOPPING)
    state = replace(state, mending=affected, phase=Phase.MENDING, failures=0)
    return state, (Hold(), StopRanks(tuple(sorted(live)), hurry=hurry))


def _close(
    state: GroupState, reason: ExitReason, *, hurry: bool
) -> tuple[GroupState, tuple[RankAction, ...]]:
    live = frozenset(r.number for r in state.ranks if r.state is not RankState.DOWN)
    fresh = frozenset(n for n in live if state.ranks[n].state is not RankState.STOPPING)
    state = state.marked(live, RankState.STOPPING)
    state = replace(state, phase=Phase.CLOSING, ending=reason, mending=frozenset())
    stop = (StopRanks(tuple(sorted(fresh)), hurry=hurry),) if fresh else ()
    state, actions = _settle_closing(state)
    return state, (Hold(), *stop, *actions)


def _settle_closing(state: GroupState) -> tuple[GroupState, tuple[RankAction, ...]]:
    if any(rank.state is not RankState.DOWN for rank in state.ranks):
        return state, ()
    reason = state.ending or SHUTDOWN
    return replace(state, phase=Phase.ENDED), (End(reason),)


def _is_restarted(restart: Restart, reason: ExitReason) -> bool:
    match restart:
        case Restart.PERMANENT:
            return True
        case Restart.TRANSIENT:
            return reason.is_failure
        case Restart.TEMPORARY:
            return False
        case _:
            assert_never(restart)


def _names(ranks: frozenset[int]) -> str:
    if len(ranks) == 1:
        return f"rank {next(iter(ranks))}"
    return f"ranks {', '.join(map(str, sorted(ranks)))}"
