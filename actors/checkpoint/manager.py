"""The group actor's part of checkpoints: restore, reject, prune, and publish events.

A snapshot from which a rank could not be restored is used again only if there is no other. Without
a `CheckpointPolicy` every method does nothing. Used on the actor's thread alone.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

from phalanx.actors.group.messages import CheckpointDue, SnapshotFailed, SnapshotsChanged
from phalanx.actors.spec.checkpoint_policy import (
    CheckpointFailed,
    CheckpointRejected,
    CheckpointRestored,
    CheckpointTaken,
)
from phalanx.actors.spec.worker import WorkerActor
from phalanx.supervision import ExitKind

from .coordinator import checkpoint_call

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from phalanx.actors.calls.plane import CallPlane
    from phalanx.actors.group.worker import Worker
    from phalanx.actors.spec.options import ExecutorSpec
    from phalanx.runtime import EventLoop
    from phalanx.supervision import ExitReason, StartRanks

    from .coordinator import CheckpointCoordinator
    from .snapshot import RestorePoint


_TAKEN_INTERVAL = 1.0  # seconds between two log records of checkpoints taken
_FAILED_INTERVAL = 60.0  # seconds between two log records of failures for the same cause


class CheckpointManager:
    """See the module.

    Args:
        coordinator: None without a policy.
        publish: Logs an event and passes it to the subscribers.
        deliver: Only passes it to the subscribers.
        ends: Whether the snapshots end with the executor.
    """

    def __init__(
        self,
        spec: ExecutorSpec,
        coordinator: CheckpointCoordinator | None,
        plane: CallPlane,
        publish: Callable[[Any], None],
        deliver: Callable[[Any], None],
        *,
        ends: bool,
    ) -> None:
        self._spec = spec
        self._coordinator = coordinator
        self._plane = plane
        self._publish = publish
        self._deliver = deliver
        self._logged_at = -_TAKEN_INTERVAL
        self._failing: dict[str, float] = {}  # error: when it was logged
        self._ends = ends

    def open(self, loop: EventLoop, tell: Callable[[Any], None]) -> int | None:
        """Claim the folder; return `CheckpointCoordinator.base`.

        Raises:
            SpecError, OSError: it, or what is in it, cannot be used.
        """
        if self._coordinator is None:
            return None
        can_reshard = self._spec.worker.reshard is not WorkerActor.reshard
        self._coordinator.open(loop, tell, can_reshard=can_reshard, size=self._spec.world_size)
        return self._coordinator.base

    def close(self) -> None:
        """Stop serving."""
        if self._coordinator is not None:
            self._coordinator.close(forget=self._ends)

    def hear(self, notice: CheckpointDue | SnapshotFailed | SnapshotsChanged) -> None:
        """Handle a message of the coordinator."""
        assert self._coordinator is not None
        now = time.monotonic()
        group = self._spec.name
        match notice:
            case CheckpointDue():
                with contextlib.suppress(Exception):  # the group is ending, or memory is short
                    self._plane.insert(checkpoint_call(self._plane, 0, None, now))
            case SnapshotFailed(rank, number, failure):
                error = failure.headline
                lost = CheckpointFailed(
                    group=group, rank=rank, number=number, error=error, trace=failure.trace, at=now
                )
                if now - self._failing.get(error, -_FAILED_INTERVAL) >= _FAILED_INTERVAL:
                    self._failing[error] = now
                    self._publish(lost)
                else:
                    self._deliver(lost)
            case SnapshotsChanged(kept):
                self._coordinator.prune()
                if kept is not None:
                    self._failing.clear()
                    taken = kept.show(self._coordinator.store.where)
                    took = now - kept.began
                    event = CheckpointTaken(group=group, checkpoint=taken, took=took, at=now)
                    if now - self._logged_at >= _TAKEN_INTERVAL:
                        self._logged_at = now
                        self._publish(event)
                    else:
                        self._deliver(event)

    def restore_points(self, start: StartRanks) -> Mapping[int, RestorePoint]:
        """Return what the ranks of *start* are restored from; the caller closes them.

        Raises:
            RuntimeFault: there are snapshots, and all are damaged.
        """
        if self._coordinator is None:
            return {}
        return self._coordinator.store.choose(
            [rank for rank, _ in start.ranks], start.size, self._reject
        )

    def welcome(self, member: Worker) -> None:
        """Publish that *member*, which is ready, has been restored."""
        if (point := member.restore_point) is not None:
            self._publish(
                CheckpointRestored(
                    group=self._spec.name,
                    rank=member.rank,
                    incarnation=member.incarnation,
                    number=point.number,
                    age=point.age,
                    at=time.monotonic(),
                )
            )

    def blame(self, member: Worker, reason: ExitReason) -> None:
        """Reject the snapshot of *member* if it died of restoring it."""
        if (
            self._coordinator is None
            or member.restore_point is None
            or member.ready
            or not member.restoring
        ):
            return
        # A kill says nothing about the state, and may hit the next snapshot too.
        if reason.kind not in (ExitKind.CRASH, ExitKind.UNRESPONSIVE):
            return
        if self._coordinator.store.reject(member.rank, member.restore_point.number):
            self._reject(
                member.restore_point.number,
                f"rank {member.rank} could not be restored from it: {reason}",
            )

    def prune(self) -> None:
        """Remove what dead ranks have left in the folder."""
        if self._coordinator is not None:
            self._coordinator.prune(everything=True)

    def prospect(self, rank: int) -> str:
        """Return the snapshot for *rank*'s next incarnation, in words; empty without a policy."""
        if self._coordinator is None:
            return ""
        next_one = self._coordinator.store.latest(rank)
        if next_one is None:
            return "none was kept: it begins anew"
        age = max(0.0, time.time() - next_one.at)
        return f"snapshot {next_one.number}, {age:.1f} s old, in {next_one.where or 'memory'}"

    def _reject(self, number: int, why: str) -> None:
        now = time.monotonic()
        self._publish(CheckpointRejected(group=self._spec.name, number=number, why=why, at=now))
