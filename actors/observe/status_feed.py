"""Status records of a group and its supervision tree for observers (`phalanx top`).

Snapshots are taken from published state, without a message to the actor and without waiting. A
large group is split into several records.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from typing import TYPE_CHECKING, Any

from phalanx.actors.calls.call import GATHER
from phalanx.runtime import CALL_SECONDS, ChildStatus, GroupStatus, TreeStatus

from .tracing import kind_of, outcome_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from phalanx.actors.calls.call import Call
    from phalanx.actors.group.handle import Group
    from phalanx.actors.spec.options import ExecutorSpec
    from phalanx.runtime import LoggedEvent
    from phalanx.supervision import ExitReason, SupervisorSnapshot

_PART = 50  # ranks and nodes in one record, whose size is limited: 16 KiB and, with GPUs, 30
_CHILDREN = 200  # of a tree; further ones are only counted
_ROOM = 56 << 10  # bytes for those in their record
_CHILD = 200  # bytes of one without its path and its last exit
_EXIT = 80  # characters of the reason of a child's last exit


class CallMeter:
    """Counts and durations of the calls of a group that have ended, by outcome.

    A group has one from the moment at which an observer first requests its status; before that a
    call pays a test for None. Written under the plane's lock; read without it, so that the outcomes
    may be one call behind the seconds. *clock* is the plane's.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ok = 0
        self._others: dict[str, int] = {}
        self._buckets = [0] * (len(CALL_SECONDS) + 1)
        self._sum = 0.0

    def begun(self, call: Call) -> None:
        """Note that *call* is being made."""
        call.made_at = self._clock()

    def settled(self, call: Call, cause: BaseException | None = None) -> None:
        """Count *call*, which has its outcome, or ends by *cause*, unless that has been done."""
        if not call.made_at:
            return
        seconds = self._clock() - call.made_at
        call.made_at = 0.0
        self._sum += seconds
        self._buckets[bisect_left(CALL_SECONDS, seconds)] += 1
        if cause is not None:
            outcome = kind_of(cause)
        elif call.error is None and call.failed is None and call.shape is not GATHER:
            self._ok += 1
            return
        else:
            outcome = outcome_of(call)[0]
        self._others[outcome] = self._others.get(outcome, 0) + 1

    def counts(self) -> dict[str, Any]:
        """Return the counts, as fields of `GroupStatus`."""
        others = dict(self._others)
        return {
            "calls": others | {"ok": self._ok + others.get("ok", 0)},
            "call_seconds": tuple(self._buckets),
            "call_seconds_sum": self._sum,
        }


def status_of(
    spec: ExecutorSpec, group: Group, look: Callable[[], SupervisorSnapshot] | None
) -> Iterator[LoggedEvent]:
    """Yield the present state of the group, and of its tree if *look* returns one."""
    view, ranks, nodes, now = group.view, group.ranks(), group.nodes(), group.clock()
    plane = group.plane
    meter = plane.meter = plane.meter or CallMeter(plane.clock)
    counts: dict[str, Any] = {**plane.counts(), **meter.counts()}
    releasing_bytes = sum(device.releasing_bytes for device in group.devices())
    for first in range(0, max(1, len(ranks), len(nodes)), _PART):
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
            nodes=nodes[first : first + _PART],
            at=now,
            releasing_bytes=releasing_bytes,
            **counts,
        )
    if look is not None:
        yield _tree(look(), now)


def _tree(top: SupervisorSnapshot, now: float) -> TreeStatus:
    children: list[ChildStatus] = []
    hidden, room = 0, _ROOM
    pending = list(reversed(top.children))  # not recursive: a deep tree would exceed the limit
    while pending:
        child = pending.pop()
        if child.supervisor is not None:
            pending += reversed(child.supervisor.children)
        if len(children) < _CHILDREN and room > 0:
            about = {"restart": str(child.restart), "state": str(child.state)}
            last, below = child.last_exit, child.supervisor
            each = _child(child.path, below, last, child.incarnation, **about)
            room -= _CHILD + len(json.dumps(each.path + each.last_exit))
            children.append(each)
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
