"""Decisions of a rank group: the pure half of an executor.

- A group is started as a whole and stopped as a whole. A rank that ends unasked is restarted with
  those that the strategy ties to it; deaths of ranks that are being stopped are absorbed.
- Past its intensity, or when its first start fails, the group stops every rank and ends once.
- The epoch rises whenever ranks that meet are formed anew.
- With survivors kept (`GroupState.keep`) only the dead rank is started; the others leave their
  group and form the next epoch with it. A survivor that dies meanwhile belongs to the same restart.
  A rank that was itself started in this restart counts, and if it failed by itself none are kept:
  an `on_reform` that always fails would loop for ever.
- Unlike in OTP, ranks start and stop in parallel (they meet in a rendezvous). What counts, and when
  the group gives up, is OTP's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeAlias, assert_never

from phalanx.supervision.core.decider import Directive
from phalanx.supervision.core.policy import SHUTDOWN, ExitKind, ExitReason, Restart, Strategy

from . import group
from .group import Decided, GroupState, Phase, Rank, RankState

Decision: TypeAlias = tuple[GroupState, tuple[group.RankAction, ...]]


def decide_ranks(state: GroupState, event: group.RankEvent) -> Decision:
    """Return the group after *event*, and what to do, in order."""
    if state.phase is Phase.ENDED:
        return state, ()
    match event:
        case group.Begin():
            everyone = frozenset(range(state.size))
            return _start(replace(state, mending=everyone))
        case group.RankReady():
            return _ready(state, event.rank, event.incarnation, RankState.STARTING, event.at)
        case group.RankReformed(rank=rank, incarnation=incarnation):
            if event.epoch != state.epoch:
                return state, ()
            return _ready(state, rank, incarnation, RankState.REFORMING, event.at)
        case group.RankExited():
            return _exited(state, event)
        case group.RestartAsked(ranks=ranks, force=force):
            if state.phase is not Phase.SERVING:
                return state, ()
            # Survivors of a death would be kept, so these are too.
            return _renew(state, ranks if state.keep else state.tied_to(ranks), hurry=force)
        case group.ResizeAsked(size=size):
            if state.phase is not Phase.SERVING:
                return state, ()
            everyone = frozenset(rank.number for rank in state.ranks)
            return _renew(replace(state, size=size), everyone, hurry=False)
        case group.WaitOver(at=at):
            # A wait that was overtaken by a longer one ends too early.
            due = state.phase is Phase.WAITING and at >= state.waits_until
            return _start(state) if due else (state, ())
        case group.CloseAsked(reason=reason):
            if state.phase is Phase.CLOSING:
                return state, ()
            return _close(state, reason, hurry=False)
        case _:
            assert_never(event)


def _ready(state: GroupState, number: int, incarnation: int, was: RankState, at: float) -> Decision:
    rank = state.ranks[number] if number < len(state.ranks) else None
    if rank is None or rank.incarnation != incarnation or rank.state is not was:
        return state, ()
    state = state.marked({number}, RankState.UP)
    if any(other.state is not RankState.UP for other in state.ranks):
        return state, ()
    state = replace(state, phase=Phase.SERVING, served_at=at, fresh=frozenset())
    return state, (group.Serve(state.epoch),)


def _exited(state: GroupState, event: group.RankExited) -> Decision:
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
        # A kill says nothing about its hook.
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
    state: GroupState, affected: frozenset[int], told: Decided, event: group.RankExited
) -> Decision:
    """Stop those of *affected* that live, and start all of them once they are down."""
    live = state.live_among(affected)
    state = state.marked(live, RankState.STOPPING)
    state = replace(state, mending=state.mending | affected, phase=Phase.MENDING)
    state, actions = _resume(state, event.at, event.jitter)
    stop = (group.StopRanks(tuple(sorted(live)), hurry=True),) if live else ()
    return state, (told, group.Hold(), *stop, *actions)


def _resume(state: GroupState, at: float, jitter: float) -> Decision:
    """Start the ranks of `mending` once all of them are down, after the back-off."""
    if state.phase is Phase.WAITING or state.live_among(state.mending):
        return state, ()
    delay = 0.0
    if state.backoff is not None and state.failures:
        delay = state.backoff.delay(state.failures, jitter)
    if delay > 0:
        until = at + delay
        return replace(state, phase=Phase.WAITING, waits_until=until), (group.WaitUntil(until),)
    return _start(state)


def _start(state: GroupState) -> Decision:
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
    start = group.StartRanks(epoch, state.size, started)
    reform = tuple((rank.number, rank.incarnation) for rank in ranks if rank.number in kept)
    # Survivors leave first: one that stays in the old group holds up others in it.
    return state, (group.ReformRanks(epoch, reform), start) if reform else (start,)


def _renew(state: GroupState, affected: frozenset[int], *, hurry: bool) -> Decision:
    """Stop *affected*, in good order unless in a *hurry*, and start them; planned: not counted."""
    live = state.live_among(affected)
    state = state.marked(live, RankState.STOPPING)
    state = replace(state, mending=affected, phase=Phase.MENDING, failures=0)
    return state, (group.Hold(), group.StopRanks(tuple(sorted(live)), hurry=hurry))


def _close(state: GroupState, reason: ExitReason, *, hurry: bool) -> Decision:
    live = frozenset(r.number for r in state.ranks if r.state is not RankState.DOWN)
    fresh = frozenset(n for n in live if state.ranks[n].state is not RankState.STOPPING)
    state = state.marked(live, RankState.STOPPING)
    state = replace(state, phase=Phase.CLOSING, ending=reason, mending=frozenset())
    stop = (group.StopRanks(tuple(sorted(fresh)), hurry=hurry),) if fresh else ()
    state, actions = _settle_closing(state)
    return state, (group.Hold(), *stop, *actions)


def _settle_closing(
    state: GroupState,
) -> Decision:
    if any(rank.state is not RankState.DOWN for rank in state.ranks):
        return state, ()
    reason = state.ending or SHUTDOWN
    return replace(state, phase=Phase.ENDED), (group.End(reason),)


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
