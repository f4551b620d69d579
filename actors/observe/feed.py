"""What observers (`phalanx top`) are shown of a group and of the supervision tree that it is in.

Snapshots are taken from published state, without a message to the actor and without waiting. A
large group is split into several records.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from phalanx.runtime import ChildStatus, GroupStatus, RankStatus, TreeStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from phalanx.actors.calls.rank import Progress
    from phalanx.actors.group.handle import Group
    from phalanx.actors.spec.options import ExecutorSpec
    from phalanx.actors.spec.results import RankInfo
    from phalanx.runtime import LoggedEvent
    from phalanx.supervision import ChildSnapshot, SupervisorSnapshot

_PART = 200  # ranks in one record, whose size is limited
_CHILDREN = 200  # of a tree; further ones are only counted
_EXIT = 80  # characters of the reason of a child's last exit


def status_of(
    spec: ExecutorSpec, group: Group, look: Callable[[], SupervisorSnapshot] | None
) -> Iterator[LoggedEvent]:
    """Yield the present state of the group, and of its tree if *look* returns one."""
    view, counts, seated = group.view, group.plane.counts(), group.plane.progress_by_rank()
    now = time.monotonic()
    for first in range(0, max(1, len(view.ranks)), _PART):
        part = view.ranks[first : first + _PART]
        yield GroupStatus(
            group=spec.name,
            worker=spec.worker.__name__,
            strategy=str(spec.policy.strategy),
            phase=str(view.phase),
            epoch=view.epoch,
            world_size=len(view.ranks),
            restarts=view.restarts,
            restarts_in_window=view.restarts_in_window,
            max_restarts=spec.policy.intensity.max_restarts,
            period=spec.policy.intensity.period,
            planned=view.planned,
            standby=view.standby,
            ranks=tuple(_rank(info, seated.get(info.rank)) for info in part),
            first=first,
            at=now,
            **counts,
        )
    if look is not None:
        yield _tree(look(), now)


def _rank(info: RankInfo, progress: Progress | None) -> RankStatus:
    known = RankStatus(
        rank=info.rank,
        pid=info.pid,
        incarnation=info.incarnation,
        state=info.state,
        device=info.device,
    )
    if progress is None:
        return known
    return replace(
        known,
        served=progress.served,
        owed=progress.queued + (progress.running is not None),
        method=f"{progress.method} (abandoned)" if progress.abandoned else progress.method,
        running_for=progress.running or 0.0,
    )


def _tree(top: SupervisorSnapshot, now: float) -> TreeStatus:
    children: list[ChildStatus] = []
    hidden = 0
    pending = list(reversed(top.children))  # not recursive: a deep tree would exceed the limit
    while pending:
        child = pending.pop()
        if child.supervisor is not None:
            pending += reversed(child.supervisor.children)
        if len(children) < _CHILDREN:
            children.append(_child(child))
        else:
            hidden += 1
    root = ChildStatus(
        path=top.path,
        restart="",
        state="running" if top.ended is None else "ended",
        incarnation=1,
        last_exit="" if top.ended is None else str(top.ended)[:_EXIT],
    )
    return TreeStatus(
        root=_with_supervisor(root, top), children=tuple(children), hidden=hidden, at=now
    )


def _child(child: ChildSnapshot) -> ChildStatus:
    known = ChildStatus(
        path=child.path,
        restart=str(child.restart),
        state=str(child.state),
        incarnation=child.incarnation,
        last_exit="" if child.last_exit is None else str(child.last_exit)[:_EXIT],
    )
    return known if child.supervisor is None else _with_supervisor(known, child.supervisor)


def _with_supervisor(known: ChildStatus, supervisor: SupervisorSnapshot) -> ChildStatus:
    return replace(
        known,
        strategy=str(supervisor.strategy),
        restarts=supervisor.restarts,
        max_restarts=supervisor.max_restarts,
        period=supervisor.period,
    )
