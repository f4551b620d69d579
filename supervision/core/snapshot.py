"""A tree as a value at one moment, and as text.

A snapshot is taken under the lock of each supervisor in turn, which is held only while one event is
decided; two supervisors of one snapshot may be seen a moment apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from .restart_rules import in_period

if TYPE_CHECKING:
    from .machine import Child, Status, SupervisorMachine
    from .restart_rules import ChildType, ExitReason, Restart, Strategy


@dataclass(frozen=True, slots=True)
class ChildSnapshot:
    """One child.

    Attributes:
        path: The ids from the top supervisor down.
        incarnation: How often it has been started.
        restarts_in_a_row: Since its last healthy time; counted only with a back-off.
        last_exit: None if it has never ended.
        since: When it was last started, or requested to end.
        supervisor: The supervisor and its children, if this child is one that runs.
    """

    path: str
    type: ChildType
    restart: Restart
    state: Status
    incarnation: int
    restarts_in_a_row: int
    last_exit: ExitReason | None
    since: float
    supervisor: SupervisorSnapshot | None


@dataclass(frozen=True, slots=True)
class SupervisorSnapshot:
    """One supervisor and what is below it, in start order.

    Attributes:
        path: The ids from the top supervisor down.
        restarts: Restarts inside the window of *period* seconds.
        ended: The reason of its end; None before.
    """

    path: str
    strategy: Strategy
    restarts: int
    max_restarts: int
    period: float
    ended: ExitReason | None
    children: tuple[ChildSnapshot, ...]


Below: TypeAlias = Mapping[str, SupervisorSnapshot]


def snapshot_of(machine: SupervisorMachine, now: float, below: Below) -> SupervisorSnapshot:
    """Return *machine* at *now*; *below* are the snapshots of its supervisors, by path."""
    return SupervisorSnapshot(
        machine.path,
        machine.spec.strategy,
        machine.window.count(now),
        machine.spec.intensity.max_restarts,
        machine.spec.intensity.period,
        machine.ended,
        tuple(_child(machine, child, below) for child in machine.children.values()),
    )


def _child(machine: SupervisorMachine, child: Child, below: Below) -> ChildSnapshot:
    path = f"{machine.path}/{child.key}"
    return ChildSnapshot(
        path,
        child.spec.kind,
        child.spec.restart,
        child.status,
        child.incarnation,
        child.attempt,
        child.last_exit,
        child.since,
        below.get(path) if child.has_process and child.spec.is_supervisor else None,
    )


def render(snapshot: SupervisorSnapshot) -> str:
    """Return the tree as text, one line per child."""
    lines = [f"{snapshot.path.rpartition('/')[2]}  {_supervisor(snapshot)}"]
    pending = _below(snapshot, "")  # a stack: a deep tree would end a recursion
    while pending:
        child, indent, is_last = pending.pop()
        branch, bar = ("└─ ", "   ") if is_last else ("├─ ", "│  ")
        lines.append(f"{indent}{branch}{child.path.rpartition('/')[2]}  {_described(child)}")
        if child.supervisor is not None:
            pending += _below(child.supervisor, indent + bar)
    return "\n".join(lines)


def _below(snapshot: SupervisorSnapshot, indent: str) -> list[tuple[ChildSnapshot, str, bool]]:
    last = len(snapshot.children) - 1
    rows = [(child, indent, index == last) for index, child in enumerate(snapshot.children)]
    return rows[::-1]


def _described(child: ChildSnapshot) -> str:
    parts = [str(child.restart), str(child.state)]
    if child.incarnation > 1:
        parts.append(f"incarnation {child.incarnation}")
    if child.last_exit is not None:
        parts.append(f"last exit: {child.last_exit}")
    if child.supervisor is not None:
        parts.append(_supervisor(child.supervisor))
    return ", ".join(parts)


def _supervisor(snapshot: SupervisorSnapshot) -> str:
    spent = f"{snapshot.restarts} of {snapshot.max_restarts} restarts{in_period(snapshot.period)}"
    ended = "" if snapshot.ended is None else f", ended: {snapshot.ended}"
    return f"[{snapshot.strategy}, {spent}{ended}]"
