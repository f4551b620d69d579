"""What an observer is shown of a group, and of the tree it is part of.

Guarantees: taken without asking anybody and without waiting; a group of any size fits, in parts.

Left to others: when it is asked for, and by whom (`runtime.glances`).
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from phalanx.runtime import ChildGlance, GroupGlance, RankGlance, TreeGlance

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from phalanx.actors.calls.rank import Progress
    from phalanx.actors.group.handle import Shared
    from phalanx.actors.spec.options import ExecutorSpec
    from phalanx.actors.spec.results import RankInfo
    from phalanx.runtime import LoggedEvent
    from phalanx.supervision import ChildSnapshot, SupervisorSnapshot

_PART = 200  # ranks in one record, which has a limit
_CHILDREN = 200  # of a tree that are told of; nobody reads more
_EXIT = 80  # characters of why a child last ended


def glance_of(
    spec: ExecutorSpec, shared: Shared, look: Callable[[], SupervisorSnapshot] | None
) -> Iterator[LoggedEvent]:
    """Yield what the group looks like now, and its tree, if *look* shows one."""
    view, counts, seated = shared.view, shared.plane.counts(), shared.plane.seated()
    now = time.monotonic()
    for first in range(0, max(1, len(view.ranks)), _PART):
        part = view.ranks[first : first + _PART]
        yield GroupGlance(
            group=spec.name,
            worker=spec.worker.__name__,
            strategy=str(spec.strategy),
            phase=str(view.phase),
            epoch=view.epoch,
            world_size=len(view.ranks),
            restarts=view.restarts,
            restarts_in_window=view.restarts_in_window,
            max_restarts=spec.intensity.max_restarts,
            period=spec.intensity.period,
            planned=view.planned,
            standby=view.standby,
            ranks=tuple(_rank(info, seated.get(info.rank)) for info in part),
            first=first,
            at=now,
            **counts,
        )
    if look is not None:
        yield _tree(look(), now)


def _rank(info: RankInfo, progress: Progress | None) -> RankGlance:
    known = RankGlance(
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
        method=f"{progress.method} (abandoned)" if progress.abandoned else progress.method or "",
        running_for=progress.running or 0.0,
    )


def _tree(top: SupervisorSnapshot, now: float) -> TreeGlance:
    children: list[ChildGlance] = []
    hidden = 0
    pending = list(reversed(top.children))  # no recursion, which a deep tree would end
    while pending:
        child = pending.pop()
        if child.supervisor is not None:
            pending += reversed(child.supervisor.children)
        if len(children) < _CHILDREN:
            children.append(_child(child))
        else:
            hidden += 1
    root = ChildGlance(
        path=top.path,
        restart="",
        state="running" if top.ended is None else "ended",
        incarnation=1,
        last_exit="" if top.ended is None else str(top.ended)[:_EXIT],
        strategy=str(top.strategy),
        restarts=top.restarts,
        max_restarts=top.max_restarts,
        period=top.period,
    )
    return TreeGlance(root=root, children=tuple(children), hidden=hidden, at=now)


def _child(child: ChildSnapshot) -> ChildGlance:
    known = ChildGlance(
        path=child.path,
        restart=str(child.restart),
        state=str(child.state),
        incarnation=child.incarnation,
        last_exit="" if child.last_exit is None else str(child.last_exit)[:_EXIT],
    )
    below = child.supervisor
    if below is None:
        return known
    return replace(
        known,
        strategy=str(below.strategy),
        restarts=below.restarts,
        max_restarts=below.max_restarts,
        period=below.period,
    )
