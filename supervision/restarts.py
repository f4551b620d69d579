"""Restarts: who is affected, whether one more is allowed, and what giving up means.

Guarantees: a restart counts before it is made; a supervisor past its intensity restarts nobody,
stops its children and ends with ``shutdown``. Without back-off the actions are those of OTP.

Left to others: which ends lead here (`decide`), starting and stopping in sequence (`sequence`).

Source: ``restart/2``, ``do_restart`` and ``restart_multiple_children`` in OTP's ``supervisor``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias, assert_never

from .actions import Action, Announce, RetryLater
from .exits import ExitKind, ExitReason
from .notices import ChildExited, SupervisorGaveUp
from .sequence import halt_all
from .state import Child, Halt, Launch, Leave, Mend, Postpone, Relaunch, Status, SupervisorState
from .strategy import Strategy

if TYPE_CHECKING:
    from .events import RetryDue
    from .window import RestartWindow

Do: TypeAlias = list[Action]


def restarted(
    state: SupervisorState,
    child: Child,
    now: float,
    do: Do,
    *,
    healthy_for: float | None = None,
    free: bool = False,
) -> SupervisorState:
    """Return the state that restarts *child* with those its strategy names, or gives up.

    *healthy_for* is None where no exit but a failed start led here; *free* restarts do not count.
    """
    window = state.window if free else state.window.admit(now)
    why = _too_many(state, child, window)
    if healthy_for is not None:
        decision = f"gave up: {why}" if why else _account(state, window, free=free)
        announce_exit(state, child, decision, now, do)
    if why or window is None:
        return given_up(state, child, why, now, do)
    backoff = state.spec.backoff
    if backoff is not None:
        attempt = backoff.attempt_after(child.attempt, healthy_for or 0.0)
        child = replace(child, attempt=attempt)
    child = replace(child, status=Status.UNDEFINED)
    state = replace(state.with_child(child), window=window)
    if backoff is None:
        return _mended(state, child)
    keys = tuple(reversed(_affected(state, child)))
    return replace(state, task=Halt(keys, Postpone(child.key)))


def _too_many(state: SupervisorState, child: Child, window: RestartWindow | None) -> str:
    limit = state.spec.fruitless_limit
    if limit is not None and child.fruitless >= limit:
        return f"{child.key} was restarted {limit} times in a row and was of no use"
    if window is None:
        allowed = state.spec.intensity
        return f"more than {allowed.max_restarts} restarts in {allowed.period:g} s"
    return ""


def _account(state: SupervisorState, window: RestartWindow | None, *, free: bool) -> str:
    if free or window is None:
        return "restart, not counted: preempted"
    allowed = state.spec.intensity
    return f"restart {len(window.spent)} of {allowed.max_restarts} in {allowed.period:g} s"


def _affected(state: SupervisorState, child: Child) -> tuple[str, ...]:
    """Return the keys of those restarted because of *child*, in start order."""
    match state.spec.strategy:
        case Strategy.ONE_FOR_ONE | Strategy.SIMPLE_ONE_FOR_ONE | Strategy.DYNAMIC:
            return (child.key,)
        case Strategy.ONE_FOR_ALL:
            return tuple(other.key for other in state.in_start_order())
        case Strategy.REST_FOR_ONE:
            return tuple(
                other.key for other in state.in_start_order() if other.position >= child.position
            )
        case _:
            assert_never(state.spec.strategy)


def _mended(state: SupervisorState, child: Child) -> SupervisorState:
    keys = _affected(state, child)
    if keys == (child.key,):
        return replace(state, task=Launch(keys, Mend(child.key)))
    return replace(state, task=Halt(keys[::-1], Relaunch(child.key, keys)))


def retry_due(state: SupervisorState, event: RetryDue, now: float, do: Do) -> SupervisorState:
    """Return the state after a retry's turn has come; void where the child waits for none."""
    child = state.children.get(event.child)
    if child is None or child.status is not Status.RESTARTING or child.ticket != event.ticket:
        return state  # terminated, deleted or started meanwhile
    if state.spec.backoff is not None:
        return _mended(state, child)  # it was admitted when the delay began
    return restarted(state, child, now, do)


def failed_again(state: SupervisorState, child: Child, now: float, do: Do) -> SupervisorState:
    """Return the state after *child* did not start in a restart."""
    child = replace(child, fruitless=child.fruitless + 1)
    limit = state.spec.fruitless_limit
    if state.spec.backoff is not None or (limit is not None and child.fruitless >= limit):
        return restarted(state, child, now, do)
    do.append(RetryLater(child.key, ticket=0, attempt=0))
    return state.with_child(replace(child, status=Status.RESTARTING, ticket=0))


# --- the end ------------------------------------------------------------------------------


def given_up(state: SupervisorState, child: Child, why: str, now: float, do: Do) -> SupervisorState:
    """Return the state of a supervisor that gives up because of *child*."""
    do.append(Announce(SupervisorGaveUp(state.path, child.key, why, now)))
    state = state.with_child(replace(child, status=Status.UNDEFINED))
    return left(state, Leave(ExitReason(ExitKind.SHUTDOWN, f"gave up: {why}")), now, do)


def left(state: SupervisorState, leave: Leave, now: float, do: Do) -> SupervisorState:
    """Return the state that stops every child and then ends."""
    if state.spec.strategy.has_instances:
        return halt_all(state, leave, now, do)
    keys = tuple(child.key for child in reversed(state.in_start_order()))
    return replace(state, task=Halt(keys, leave))


def announce_exit(state: SupervisorState, child: Child, decision: str, now: float, do: Do) -> None:
    """Tell observers of *child*'s end, and what is made of it."""
    assert child.last_exit is not None, "only called about an exit"
    path = f"{state.path}/{child.key}"
    do.append(Announce(ChildExited(path, child.incarnation, child.last_exit, decision, now)))
