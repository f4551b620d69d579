"""What a supervisor does about what happened: one clause per row of OTP's tables.

Guarantees: `decide` is a pure function of a state and an event; the new state and the actions are
all there is. Without the additions of the spec (back-off, decider, limits of starts and kills)
the actions are those of OTP's ``supervisor`` and Elixir's ``DynamicSupervisor``; the vectors in
``tests/conformance`` were recorded from them.

Left to others: who is restarted and when to give up (`restarts`), starting and stopping in
sequence (`sequence`), requests (`requests`), and every effect (the actor).

Source: ``handle_info`` and ``restart/2`` of OTP's ``supervisor``, and
``maybe_restart_child`` of Elixir's ``DynamicSupervisor``.
"""

from __future__ import annotations

from dataclasses import replace
from enum import Enum, auto
from typing import TYPE_CHECKING, TypeAlias, assert_never

from .actions import Action, Announce, BecomeReady, Exit, FailStart, Reply, RetryLater
from .answers import Done, Refusal, Refused
from .decider import Directive
from .errors import error_text
from .events import (
    AlarmRang,
    Booted,
    Event,
    Exited,
    NotStarted,
    Progressed,
    Request,
    RetryDue,
    Started,
    StartIgnored,
    StopRequested,
)
from .exits import ExitKind, ExitReason
from .notices import (
    CallbackFailed,
    SupervisorBegan,
    SupervisorExited,
    SupervisorReady,
    SupervisorStartFailed,
)
from .requests import requested
from .restarts import announce_exit, failed_again, given_up, left, restarted, retry_due
from .sequence import advance, is_over, with_alarm_rung, with_outcome, with_stopped
from .state import (
    Add,
    AnswerStopped,
    Boot,
    Child,
    Halt,
    HaltAll,
    Launch,
    Leave,
    Mend,
    Postpone,
    Relaunch,
    Revive,
    Status,
    SupervisorState,
)
from .strategy import AutoShutdown, Restart

if TYPE_CHECKING:
    from .state import Task

Do: TypeAlias = list[Action]

SIGTERM = 15  # its number everywhere; importing `signal` is for code with effects


def decide(state: SupervisorState, event: Event) -> tuple[SupervisorState, tuple[Action, ...]]:
    """Return the state after *event*, and what is to be done, in order."""
    do: Do = []
    if state.ended is not None:
        return state, _refused(event)
    now = event.at
    state = _received(state, event, do)
    while state.ended is None:
        if (task := state.task) is not None:
            if is_over(task):
                state = _gone_on(replace(state, task=None), task, now, do)
            elif (further := advance(state, task, now, do)) is not None:
                state = further
            else:
                break
        elif state.mailbox:
            first, rest = state.mailbox.take()
            state = _handled(replace(state, mailbox=rest), first, now, do)
        else:
            break
    return state, tuple(do)


def _refused(event: Event) -> tuple[Action, ...]:
    if isinstance(event, Request):
        return (Reply(event.caller, Refused(Refusal.NOPROC)),)
    return ()


# --- receiving: what is waited for goes past the mailbox ----------------------------------


def _received(state: SupervisorState, event: Event, do: Do) -> SupervisorState:
    match event:
        case Started() | StartIgnored() | NotStarted():
            return with_outcome(state, event, do)
        case AlarmRang():
            return with_alarm_rung(state, event.at, do) if event.alarm == state.alarm else state
        case Progressed():
            return _progressed(state, event)
        case Exited() if state.task is not None:
            stopped = with_stopped(state, event, do)
            return _put_aside(state, event) if stopped is None else stopped
        case _:
            return replace(state, mailbox=state.mailbox.put(event))


def _put_aside(state: SupervisorState, event: Exited) -> SupervisorState:
    child = state.children.get(event.child)
    if child is not None and child.serial == event.serial and child.status is Status.RUNNING:
        state = state.with_child(replace(child, is_gone=True))
    return replace(state, mailbox=state.mailbox.put(event))


def _progressed(state: SupervisorState, event: Progressed) -> SupervisorState:
    child = state.children.get(event.child)
    if child is None or child.serial != event.serial or child.has_progressed:
        return state
    return state.with_child(replace(child, has_progressed=True, fruitless=0))


# --- handling: one message from the mailbox -----------------------------------------------


def _handled(state: SupervisorState, event: Event, now: float, do: Do) -> SupervisorState:
    match event:
        case Booted():
            do.append(Announce(SupervisorBegan(state.path, now)))
            keys = tuple(child.key for child in state.in_start_order())
            return replace(state, task=Launch(keys, Boot()))
        case Exited():
            return _exited(state, event, now, do)
        case RetryDue():
            return retry_due(state, event, now, do)
        case StopRequested():
            return left(state, Leave(event.reason), now, do)
        case Started() | StartIgnored() | NotStarted() | AlarmRang() | Progressed():
            raise AssertionError(f"{event} never lies in the mailbox")
        case _:
            return requested(state, event, do)


# --- an exit ------------------------------------------------------------------------------


class Verdict(Enum):
    """What the end of a child leads to."""

    RESTART = auto()
    KEEP = auto()
    REMOVE = auto()
    GIVE_UP = auto()


def verdict(restart: Restart, reason: ExitReason, directive: Directive | None = None) -> Verdict:
    """Return what the end of a child leads to: OTP's table of restart types and exits."""
    match directive, restart, reason.is_failure:
        case Directive.ESCALATE, _, _:
            return Verdict.GIVE_UP
        case _, Restart.TEMPORARY, _:
            return Verdict.REMOVE
        case Directive.STOP, _, _:
            return Verdict.KEEP
        case Directive.RESTART, _, _:
            return Verdict.RESTART
        case _, Restart.PERMANENT, _:
            return Verdict.RESTART
        case _, Restart.TRANSIENT, True:
            return Verdict.RESTART
        case _:  # a transient child that ended normally
            return Verdict.KEEP


def _exited(state: SupervisorState, event: Exited, now: float, do: Do) -> SupervisorState:
    child = state.children.get(event.child)
    if child is None or child.serial != event.serial or child.status is not Status.RUNNING:
        return state  # an earlier incarnation, or absorbed when the child was stopped
    directive = event.directive
    if directive is None and state.spec.decider is not None:
        path = f"{state.path}/{child.key}"
        directive = state.spec.decider.directive(
            event.reason,
            child.spec.id,
            failed=lambda error: do.append(
                Announce(CallbackFailed(path, "decider", error_text(error), now))
            ),
        )
    useless = child.incarnation > 1 and not child.has_progressed
    child = replace(
        child, last_exit=event.reason, is_gone=False, fruitless=child.fruitless + useless
    )
    outcome = verdict(child.spec.restart, event.reason, directive)
    match outcome:
        case Verdict.RESTART:
            preempted = event.reason.signal == SIGTERM and event.reason.is_failure
            free = preempted and not state.spec.count_preemption
            healthy_for = now - child.since
            return restarted(state, child, now, do, healthy_for=healthy_for, free=free)
        case Verdict.KEEP if not state.spec.strategy.has_instances:
            announce_exit(state, child, "not restarted", now, do)
            state = state.with_child(replace(child, status=Status.UNDEFINED))
            return _after_end(state, child, now, do)
        case Verdict.KEEP | Verdict.REMOVE:
            announce_exit(state, child, "not restarted; removed", now, do)
            return _after_end(state.without_child(child.key), child, now, do)
        case Verdict.GIVE_UP:
            announce_exit(state, child, "escalated by the decider", now, do)
            return given_up(state, child, "escalated by the decider", now, do)
        case _:
            assert_never(outcome)


def _after_end(state: SupervisorState, child: Child, now: float, do: Do) -> SupervisorState:
    """Return the state after *child* ended by itself for good: auto-shutdown."""
    if not child.spec.significant:
        return state
    match state.spec.auto_shutdown:
        case AutoShutdown.NEVER:
            return state
        case AutoShutdown.ANY_SIGNIFICANT:
            ends = True
        case AutoShutdown.ALL_SIGNIFICANT:
            ends = not any(
                other.spec.significant and other.status is not Status.UNDEFINED
                for other in state.children.values()
            )
        case _:
            assert_never(state.spec.auto_shutdown)
    if not ends:
        return state
    why = f"auto-shutdown: {child.key} ended"
    return left(state, Leave(ExitReason(ExitKind.SHUTDOWN, why)), now, do)


# --- going on, when a task is over --------------------------------------------------------


def _gone_on(state: SupervisorState, task: Task, now: float, do: Do) -> SupervisorState:
    match task:
        case Launch(error=None):
            return _launched(state, task, now, do)
        case Launch():
            return _not_launched(state, task, now, do)
        case Halt() | HaltAll():
            return _halted(state, task, now, do)
        case _:
            assert_never(task)


def _launched(state: SupervisorState, task: Launch, now: float, do: Do) -> SupervisorState:
    match task.then:
        case Boot():
            do.append(Announce(SupervisorReady(state.path, now)))
            do.append(BecomeReady())
            return replace(state, is_ready=True)
        case Mend():
            return state
        case Add(caller) | Revive(caller):
            key = task.keys[0]
            child = state.children.get(key)
            kept = child is not None
            running = child is not None and child.has_process
            do.append(Reply(caller, Done(key if kept else "", running)))
            return state
        case _:
            assert_never(task.then)


def _not_launched(state: SupervisorState, task: Launch, now: float, do: Do) -> SupervisorState:
    key = task.keys[task.index]
    child = state.children.get(key)
    error = task.error
    assert child is not None, "a child that is being started is not removed"
    assert error is not None, "only called about a start that failed"
    match task.then:
        case Boot():
            reason = ExitReason(ExitKind.SHUTDOWN, f"failed to start {key}")
            return left(state, Leave(reason, key, error), now, do)
        case Mend():
            return failed_again(state, child, now, do)
        case Add(caller):
            do.append(Reply(caller, Refused(Refusal.START_FAILED, key, error)))
            return state.without_child(key)
        case Revive(caller):
            do.append(Reply(caller, Refused(Refusal.START_FAILED, key, error)))
            return state
        case _:
            assert_never(task.then)


def _halted(state: SupervisorState, task: Halt | HaltAll, now: float, do: Do) -> SupervisorState:
    match task.then:
        case Relaunch(cause, keys):
            return replace(state, task=Launch(keys, Mend(cause)))
        case Postpone(cause):
            child = state.children.get(cause)
            assert child is not None, "only a child that is restarted is waited with"
            ticket = state.serials + 1
            do.append(RetryLater(cause, ticket, child.attempt))
            child = replace(child, status=Status.RESTARTING, ticket=ticket)
            return replace(state.with_child(child), serials=ticket)
        case AnswerStopped(caller):
            assert isinstance(task, Halt), "one child is stopped in a sequence of one"
            do.append(Reply(caller, Done(task.keys[0])))
            return state
        case Leave() as leave:
            return _gone(state, leave, now, do)
        case _:
            assert_never(task.then)


def _gone(state: SupervisorState, leave: Leave, now: float, do: Do) -> SupervisorState:
    if leave.error is not None:
        error = error_text(leave.error)
        do.append(Announce(SupervisorStartFailed(state.path, leave.failed, error, now)))
        do.append(FailStart(leave.failed, leave.error))
    else:
        do.append(Announce(SupervisorExited(state.path, leave.reason, now)))
        do.append(Exit(leave.reason))
    for event in state.mailbox:
        do.extend(_refused(event))
    return replace(state, mailbox=type(state.mailbox)(), ended=leave.reason)
