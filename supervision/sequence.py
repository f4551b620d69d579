"""Starting and stopping children one after the other, as a task that waits in between.

Guarantees: one start or one stop is under way at a time, and the next begins only with the
outcome of the one before (OTP's order); only instances are stopped all at once. A child whose exit
already lies in the mailbox is not stopped again: its exit is absorbed, because the serial in it
is no longer the child's (section 6.4 of the supervisor's semantics).

Left to others: which children, in which order, and what to go on with (`decide`).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias, assert_never

from .actions import (
    AbandonStart,
    Action,
    Announce,
    KillChild,
    SetAlarm,
    StartChild,
    TerminateChild,
)
from .errors import error_text
from .events import Exited, NotStarted, Outcome, Started, StartIgnored
from .exits import SHUTDOWN
from .notices import ChildExited, ChildLost, ChildStarted, ChildStartFailed
from .spec import BRUTAL_KILL
from .state import AnswerStopped, Child, Halt, HaltAll, Launch, Leave, Status, SupervisorState
from .strategy import Restart

if TYPE_CHECKING:
    from .state import Task

Do: TypeAlias = list[Action]

ROUNDING = 1e-6  # seconds; sums of times are not exact, and an alarm that rang has rung


class StartTookTooLong(TimeoutError):  # names what happened, as the others do
    """The start function did not return within ``start_within``."""


# --- going on -----------------------------------------------------------------------------


def advance(state: SupervisorState, task: Task, now: float, do: Do) -> SupervisorState | None:
    """Return the state after the next step of *task*, or None where it has to wait or is over."""
    match task:
        case Launch():
            return _launch_next(state, task, now, do)
        case Halt():
            return _halt_next(state, task, now, do)
        case HaltAll():
            return None
        case _:
            assert_never(task)


def is_over(task: Task) -> bool:
    """Return whether nothing is left to do or to wait for in *task*."""
    match task:
        case Launch():
            return task.error is not None or (task.serial == 0 and task.index == len(task.keys))
        case Halt():
            return task.serial == 0 and task.index == len(task.keys)
        case HaltAll():
            return task.waiting == 0
        case _:
            assert_never(task)


def _launch_next(
    state: SupervisorState, task: Launch, now: float, do: Do
) -> SupervisorState | None:
    if task.serial or task.error is not None or task.index == len(task.keys):
        return None
    child = state.children.get(task.keys[task.index])
    if child is None:
        return replace(state, task=replace(task, index=task.index + 1))
    serial = state.serials + 1
    child = replace(
        child, status=Status.STARTING, incarnation=child.incarnation + 1, since=now, is_gone=False
    )
    do.append(StartChild(child.key, serial, child.incarnation, child.spec))
    state = replace(state.with_child(child), serials=serial, task=replace(task, serial=serial))
    return _with_alarm(state, child.spec.start_within, do)


def _halt_next(state: SupervisorState, task: Halt, now: float, do: Do) -> SupervisorState | None:
    if task.serial or task.index == len(task.keys):
        return None
    child = state.children.get(task.keys[task.index])
    if child is None:
        return replace(state, task=replace(task, index=task.index + 1))
    if child.status is not Status.RUNNING or child.is_gone:
        return _past_halted(state, task, child)
    child = _told(child, now)
    do.append(_telling(child))
    state = replace(state.with_child(child), task=replace(task, serial=child.serial))
    return _with_alarm(state, _patience(child), do)


def _told(child: Child, now: float) -> Child:
    """Return *child* after it was asked to end, or killed where its shutdown is brutal."""
    brutal = child.spec.shutdown is BRUTAL_KILL
    return replace(child, status=Status.KILLED if brutal else Status.STOPPING, since=now)


def _telling(child: Child) -> Action:
    if child.status is Status.KILLED:
        return KillChild(child.key, child.serial)
    return TerminateChild(child.key, child.serial, SHUTDOWN)


def _past_halted(state: SupervisorState, task: Halt, child: Child) -> SupervisorState:
    """Return the state in which the child whose turn it was is stopped."""
    temporary = child.spec.restart is Restart.TEMPORARY
    instance = state.spec.strategy.has_instances
    match task.then:
        case Leave():
            is_forgotten = False
        case AnswerStopped():
            is_forgotten = temporary or instance
        case _:
            is_forgotten = temporary
    if is_forgotten:
        state = state.without_child(child.key)
    else:
        state = state.with_child(replace(child, status=Status.UNDEFINED, is_gone=False))
    return replace(state, task=replace(task, index=task.index + 1, serial=0))


# --- outcomes -----------------------------------------------------------------------------


def with_outcome(state: SupervisorState, event: Outcome, do: Do) -> SupervisorState:
    """Return the state after a start has ended; one that nobody waits for changes nothing."""
    task = state.task
    if not isinstance(task, Launch) or task.serial != event.serial:
        return state
    child = state.children.get(event.child)
    assert child is not None, "a child that is being started is not removed"
    state = _without_alarm(state)
    past = replace(task, index=task.index + 1, serial=0)
    path = f"{state.path}/{child.key}"
    match event:
        case Started():
            do.append(Announce(ChildStarted(path, child.incarnation, event.at)))
            child = replace(
                child, status=Status.RUNNING, serial=event.serial, since=event.at,
                has_progressed=False,
            )  # fmt: skip
            return replace(state.with_child(child), task=past)
        case StartIgnored():
            if child.spec.restart is Restart.TEMPORARY or state.spec.strategy.has_instances:
                return replace(state.without_child(child.key), task=past)
            return replace(state.with_child(replace(child, status=Status.UNDEFINED)), task=past)
        case NotStarted():
            text = error_text(event.error)
            do.append(Announce(ChildStartFailed(path, child.incarnation, text, event.at)))
            failed = replace(task, serial=0, error=event.error)
            return replace(state.with_child(replace(child, status=Status.UNDEFINED)), task=failed)
        case _:
            assert_never(event)


def with_stopped(state: SupervisorState, event: Exited, do: Do) -> SupervisorState | None:
    """Return the state after an exit that the task waits for, None where it waits for no such."""
    child = state.children.get(event.child)
    if child is None or child.serial != event.serial or not child.has_process:
        return None
    task = state.task
    if isinstance(task, Halt) and task.serial == event.serial:
        state = _past_halted(_without_alarm(state), task, replace(child, last_exit=event.reason))
    elif isinstance(task, HaltAll) and child.status is not Status.RUNNING:
        state = state.without_child(child.key)
        state = replace(state, task=replace(task, waiting=task.waiting - 1))
    else:
        return None
    path = f"{state.path}/{child.key}"
    do.append(
        Announce(ChildExited(path, child.incarnation, event.reason, "was told to stop", event.at))
    )
    return state


# --- patience -----------------------------------------------------------------------------


def with_alarm_rung(state: SupervisorState, now: float, do: Do) -> SupervisorState:
    """Return the state after the time for what the task waits for is over."""
    state = replace(state, alarm=0)
    match state.task:
        case Launch() as task:
            child = state.children.get(task.keys[task.index])
            assert child is not None, "a child that is being started is not removed"
            limit = child.spec.start_within
            error = StartTookTooLong(f"{child.key}: not started within {limit:g} s")
            do.append(AbandonStart(child.key, task.serial))
            return with_outcome(state, NotStarted(child.key, task.serial, error, now), do)
        case Halt() as task:
            child = state.children.get(task.keys[task.index])
            assert child is not None, "a child that is being stopped is not removed"
            if child.status is Status.STOPPING and child.spec.killable:
                do.append(KillChild(child.key, child.serial))
                child = replace(child, status=Status.KILLED, since=now)
                return _with_alarm(state.with_child(child), _patience(child), do)
            do.append(_lost(state, child, now))
            return _past_halted(state, task, child)
        case HaltAll() as task:
            return _impatient(state, task, now, do)
        case None:
            return state
        case _:
            assert_never(state.task)


def halt_all(state: SupervisorState, then: Leave, now: float, do: Do) -> SupervisorState:
    """Return the state that stops every instance at once."""
    alive = [child for child in state.in_start_order() if child.has_process and not child.is_gone]
    told = [_told(child, now) for child in alive]
    for child in told:
        do.append(_telling(child))
        state = state.with_child(child)
    state = replace(state, task=HaltAll(then, len(told)))
    return _with_alarm(state, min(map(_patience, told), default=math.inf), do)


def _impatient(state: SupervisorState, task: HaltAll, now: float, do: Do) -> SupervisorState:
    """Return the state after every instance whose time is over was killed, or is lost."""
    following: list[float] = []
    for child in state.in_start_order():
        if not child.has_process or child.is_gone:
            continue
        left = child.since + _patience(child) - now
        is_over = left < ROUNDING
        if is_over and child.status is Status.STOPPING and child.spec.killable:
            # Killed first even where the alarm comes so late that its time for that is over too.
            do.append(KillChild(child.key, child.serial))
            state = state.with_child(replace(child, status=Status.KILLED, since=now))
            left = child.spec.kill_within
        elif is_over:
            do.append(_lost(state, child, now))
            state = state.without_child(child.key)
            task = replace(task, waiting=task.waiting - 1)
            continue
        following.append(left)
    return _with_alarm(replace(state, task=task), min(following, default=math.inf), do)


def _patience(child: Child) -> float:
    """Return how long to wait for a child that was told to end, before more is done."""
    match child.status:
        case Status.KILLED:
            return child.spec.kill_within
        case _ if child.spec.killable:
            return child.spec.stop_within
        case _:
            return child.spec.stop_within + child.spec.kill_within


def _lost(state: SupervisorState, child: Child, now: float) -> Announce:
    waited = now - child.since
    return Announce(ChildLost(f"{state.path}/{child.key}", child.incarnation, waited, now))


def _with_alarm(state: SupervisorState, delay: float | None, do: Do) -> SupervisorState:
    if delay is None or delay == math.inf:
        return _without_alarm(state)
    alarm = state.serials + 1
    do.append(SetAlarm(alarm, delay))
    return replace(state, serials=alarm, alarm=alarm)


def _without_alarm(state: SupervisorState) -> SupervisorState:
    return replace(state, alarm=0) if state.alarm else state
