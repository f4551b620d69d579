"""What observers (`phalanx top`) are shown of a group and of the supervision tree that it is in.

Snapshots are taken from published state, without a message to the actor and without waiting. A
large group is split into several records.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from phalanx.runtime import ChildStatus, GroupStatus, TreeStatus

from .call_meter import CallMeter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from phalanx.actors.group.handle import Group
    from phalanx.actors.spec.options import ExecutorSpec
    from phalanx.runtime import LoggedEvent
    from phalanx.supervision import ExitReason, SupervisorSnapshot

_PART = 200  # ranks in one record, whose size is limited
_CHILDREN = 200  # of a tree; further ones are only counted
_EXIT = 80  # characters of the reason of a child's last exit


def status_of(
    spec: ExecutorSpec, group: Group, look: Callable[[], SupervisorSnapshot] | None
) -> Iterator[LoggedEvent]:
    """Yield the present state of the group, and of its tree if *look* returns one."""
    view, ranks, now = group.view, group.ranks(), time.monotonic()
    plane = group.plane
    meter = plane.meter = plane.meter or CallMeter(plane.clock)
    counts: dict[str, Any] = {**plane.counts(), **meter.counts()}
    for first in range(0, max(1, len(ranks)), _PART):
        yield GroupStatus(
            group=spec.name,
            worker=spec.worker.__name__,
            strategy=str(spec.policy.strategy),
            phase=str(view.phase),
            epoch=view.epoch,
            world_size=len(ranks),
            restarts=view.restarts,
            restarts_in_window=view.restarts_in_window,
            max_restarts=spec.policy.intensity.max_restarts,
            period=spec.policy.intensity.period,
            planned=view.planned,
            standby=view.standby,
            ranks=ranks[first : first + _PART],
            first=first,
            at=now,
            releasing_bytes=sum(device.releasing_bytes for device in group.devices()),
            **counts,
        )
    if look is not None:
        yield _tree(look(), now)


def _tree(top: SupervisorSnapshot, now: float) -> TreeStatus:
    children: list[ChildStatus] = []
    hidden = 0
    pending = list(reversed(top.children))  # not recursive: a deep tree would exceed the limit
    while pending:
        child = pending.pop()
        if child.supervisor is not None:
            pending += reversed(child.supervisor.children)
        if len(children) < _CHILDREN:
            about = {"restart": str(child.restart), "state": str(child.state)}
            last, below = child.last_exit, child.supervisor
            children.append(_child(child.path, below, last, child.incarnation, **about))
        else:
            hidden += 1
    state = "running" if top.ended is None else "ended"
    root = _child(top.path, top, top.ended, 1, restart="", state=state)
    return TreeStatus(root=root, children=tuple(children), hidden=hidden, at=now)


def _child(
    path: str,
    below: SupervisorSnapshot | None,
    last_exit: ExitReason | None,
    incarnation: int,
    **known: Any,
) -> ChildStatus:
    if below is not None:
        known |= {"strategy": str(below.strategy), "restarts": below.restarts}
        known |= {"max_restarts": below.max_restarts, "period": below.period}
    last = "" if last_exit is None else str(last_exit)[:_EXIT]
    return ChildStatus(path=path, incarnation=incarnation, last_exit=last, **known)
