"""What a supervisor answers and does when it is asked: one clause per row of OTP's table.

Guarantees: a request never fails because of a child's state: every one is answered, with OTP's
result. Children asked for by name are found whatever state they are in.

Source: the ``handle_call`` clauses of OTP's ``supervisor`` and Elixir's ``DynamicSupervisor``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias, assert_never

from .actions import Action, Reply
from .answers import Children, ChildRow, Counts, Done, Found, Refusal, Refused, Shown
from .events import (
    ChildrenRequested,
    ChildSpecRequested,
    CountRequested,
    DeleteChildRequested,
    Request,
    RestartChildRequested,
    StartChildRequested,
    TerminateChildRequested,
)
from .state import Add, AnswerStopped, Child, Halt, Launch, Revive, SupervisorState
from .strategy import Strategy

if TYPE_CHECKING:
    from .answers import Answer
    from .spec import ChildSpec

Do: TypeAlias = list[Action]


def requested(state: SupervisorState, event: Request, do: Do) -> SupervisorState:
    """Return the state after *event*; its answer is in *do*, or follows when its task is over."""
    result: SupervisorState | Answer  # the answer to a request that changes nothing
    match event:
        case StartChildRequested():
            result = _start_child(state, event, do)
        case TerminateChildRequested():
            result = _terminate_child(state, event)
        case RestartChildRequested():
            result = _restart_child(state, event)
        case DeleteChildRequested():
            result = _delete_child(state, event, do)
        case ChildSpecRequested():
            result = _child_spec(state, event.child)
        case ChildrenRequested():
            result = _children(state)
        case CountRequested():
            result = _counts(state, event.dead)
        case _:
            assert_never(event)
    if isinstance(result, SupervisorState):
        return result
    do.append(Reply(event.caller, result))
    return state


# --- start_child --------------------------------------------------------------------------


def _start_child(
    state: SupervisorState, event: StartChildRequested, do: Do
) -> SupervisorState | Answer:
    if state.spec.strategy.has_instances:
        return _start_instance(state, event, do)
    spec = event.spec
    if spec is None or event.args:
        return Refused(Refusal.INVALID_SPEC)
    if state.spec.refuses(spec):
        return Refused(Refusal.BAD_COMBINATION, spec.id)
    known = state.children.get(spec.id)
    if known is None:
        return _added(state, spec.id, spec, event)
    if known.has_process:
        return Refused(Refusal.ALREADY_STARTED, spec.id)
    return Refused(Refusal.ALREADY_PRESENT, spec.id)


def _start_instance(
    state: SupervisorState, event: StartChildRequested, do: Do
) -> SupervisorState | Answer:
    if state.spec.strategy is Strategy.SIMPLE_ONE_FOR_ONE:
        if event.spec is not None:
            return Refused(Refusal.INVALID_SPEC, event.spec.id)
        spec = state.spec.children[0]
        if event.args:
            spec = replace(spec, args=(*spec.args, *event.args))
    elif event.spec is None or event.args:
        return Refused(Refusal.INVALID_SPEC)
    else:
        spec = event.spec
    if state.spec.refuses(spec):
        return Refused(Refusal.BAD_COMBINATION, spec.id)
    number = state.instances + 1
    state = replace(state, instances=number)
    limit = state.spec.max_children
    if limit is not None and len(state.children) >= limit:
        do.append(Reply(event.caller, Refused(Refusal.MAX_CHILDREN, spec.id)))
        return state
    return _added(state, f"{spec.id}#{number}", spec, event)


def _added(
    state: SupervisorState, key: str, spec: ChildSpec, event: StartChildRequested
) -> SupervisorState:
    position = state.positions + 1
    state = replace(state.with_child(Child(key, spec, position)), positions=position)
    return replace(state, task=Launch((key,), Add(event.caller)))


# --- terminate, restart, delete -----------------------------------------------------------


def _terminate_child(
    state: SupervisorState, event: TerminateChildRequested
) -> SupervisorState | Answer:
    child = state.children.get(event.child)
    if child is not None and event.serial in (None, child.serial):
        return replace(state, task=Halt((child.key,), AnswerStopped(event.caller)))
    if state.spec.strategy is not Strategy.SIMPLE_ONE_FOR_ONE:
        return Refused(Refusal.NOT_FOUND, event.child)
    if event.serial is not None or _is_ended_instance(state, event.child):
        return Done(event.child)
    return Refused(Refusal.SIMPLE_ONE_FOR_ONE, event.child)


def _is_ended_instance(state: SupervisorState, key: str) -> bool:
    template, _, number = key.rpartition("#")
    known = template == state.spec.children[0].id and number.isdecimal()
    return known and 1 <= int(number) <= state.instances


def _restart_child(
    state: SupervisorState, event: RestartChildRequested
) -> SupervisorState | Answer:
    match _stopped(state, event.child):
        case Child() as child:
            return replace(state, task=Launch((child.key,), Revive(event.caller)))
        case refused:
            return refused


def _delete_child(
    state: SupervisorState, event: DeleteChildRequested, do: Do
) -> SupervisorState | Answer:
    match _stopped(state, event.child):
        case Child() as child:
            do.append(Reply(event.caller, Done(child.key)))
            return state.without_child(child.key)
        case refused:
            return refused


def _stopped(state: SupervisorState, key: str) -> Child | Refused:
    """Return the child *key*, which does not run, or why it cannot be restarted or deleted."""
    if state.spec.strategy is Strategy.SIMPLE_ONE_FOR_ONE:
        return Refused(Refusal.SIMPLE_ONE_FOR_ONE, key)
    child = state.children.get(key)
    if child is None:
        return Refused(Refusal.NOT_FOUND, key)
    shown = child.shown
    match shown:
        case Shown.RUNNING:
            return Refused(Refusal.RUNNING, key)
        case Shown.RESTARTING:
            return Refused(Refusal.RESTARTING, key)
        case Shown.UNDEFINED:
            return child
        case _:
            assert_never(shown)


# --- looking ------------------------------------------------------------------------------


def _child_spec(state: SupervisorState, key: str) -> Answer:
    child = state.children.get(key)
    if child is not None:
        return Found(child.spec)
    if state.spec.strategy is Strategy.SIMPLE_ONE_FOR_ONE and key == state.spec.children[0].id:
        return Found(state.spec.children[0])
    return Refused(Refusal.NOT_FOUND, key)


def _children(state: SupervisorState) -> Answer:
    rows = [_row(child) for child in reversed(state.in_start_order())]
    return Children(tuple(rows))


def _row(child: Child) -> ChildRow:
    assert child.spec.type is not None, "a spec fills in its type"
    return ChildRow(child.key, child.shown, child.spec.type)


def _counts(state: SupervisorState, dead: frozenset[int]) -> Answer:
    children = list(state.children.values())
    supervisors = sum(child.spec.is_supervisor for child in children)
    specs, active = len(children), sum(child.shown is Shown.RUNNING for child in children)
    match state.spec.strategy:
        case Strategy.SIMPLE_ONE_FOR_ONE:
            specs = 1
        case Strategy.DYNAMIC:
            pass
        case _:
            # Only here does OTP look whether the process lives.
            active -= sum(
                child.shown is Shown.RUNNING and (child.is_gone or child.serial in dead)
                for child in children
            )
    return Counts(specs, active, supervisors, len(children) - supervisors)
