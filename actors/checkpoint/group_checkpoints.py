"""The group actor's part of checkpoints: restore, reject, prune, and publish events.

A snapshot from which a rank could not be restored is used again only if there is no other. Without
a `CheckpointPolicy` every method does nothing. Used on the actor's thread alone.
"""

from __future__ import annotations

import contextlib
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from phalanx.actors.spec.checkpoint_policy import (
    CheckpointFailed,
    CheckpointRejected,
    CheckpointRestored,
    CheckpointTaken,
)
from phalanx.actors.spec.worker import WorkerActor
from phalanx.runtime import Lost
from phalanx.supervision import ExitKind

from .coordinator import checkpoint_call

if TYPE_CHECKING:
    from collections.abc import Mapping

    from phalanx.actors.group.handle import Group
    from phalanx.actors.group.worker import Worker
    from phalanx.runtime import RemoteFailure
    from phalanx.supervision import ExitReason, StartRanks

    from .snapshot_store import RestorePoint, Snapshot


_TAKEN_INTERVAL = 1.0  # seconds between two log records of checkpoints taken
_FAILED_INTERVAL = 60.0  # seconds between two log records of failures for the same cause


class CheckpointManager:
    """The checkpoints of *group*; observes their coordinator. See the module."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._coordinator = group.checkpoints
        self._logged_at = -_TAKEN_INTERVAL
        self._failing: dict[tuple[int, str], float] = {}  # rank, type of error: when it was logged
        # Notices of the coordinator, on any thread.
        self.due = partial(group.post, self._checkpoint)
        self.failed = partial(group.post, self._publish_failure)
        self.changed = partial(group.post, self._publish_kept)

    def open(self) -> None:
        """Claim the folder.

        Raises:
            SpecError, OSError: it, or what is in it, cannot be used.
        """
        if self._coordinator is not None:
            spec = self._group.spec
            can_reshard = spec.worker.reshard is not WorkerActor.reshard
            self._coordinator.open(
                self._group.runtime.loop, self, can_reshard=can_reshard, size=spec.world_size
            )

    def close(self) -> None:
        """Stop serving."""
        if self._coordinator is not None:
            self._coordinator.close(forget=self._group.owns_checkpoints)

    def _checkpoint(self) -> None:
        """Have every rank store its state."""
        plane = self._group.plane
        with contextlib.suppress(Exception):  # the group is ending, or memory is short
            plane.submit(checkpoint_call(plane), waits=False, at_once=True)

    def _publish_failure(self, rank: int, number: int, failure: RemoteFailure) -> None:
        """Publish that *rank* could not store its part of snapshot *number*."""
        now, cause = self._group.clock(), (rank, failure.type_name)  # each text may be another
        is_new = now - self._failing.get(cause, -_FAILED_INTERVAL) >= _FAILED_INTERVAL
        if is_new:
            self._failing[cause] = now
        about: dict[str, Any] = {"error": failure.headline, "trace": failure.trace}
        self._publish(CheckpointFailed, is_logged=is_new, rank=rank, number=number, **about)

    def _publish_kept(self, kept: Snapshot | None) -> None:
        """Remove what is void, and publish what is *kept*."""
        assert self._coordinator is not None
        self._coordinator.prune()
        if kept is None:
            return
        self._failing.clear()
        now = self._group.clock()
        is_logged = now - self._logged_at >= _TAKEN_INTERVAL
        if is_logged:
            self._logged_at = now
        taken = kept.show(self._coordinator.store.where)
        self._publish(CheckpointTaken, is_logged=is_logged, checkpoint=taken, took=now - kept.began)

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

    def publish_restored(self, worker: Worker) -> None:
        """Publish that *worker*, which is ready, has been restored."""
        if (point := worker.restore_point) is not None:
            took = self._group.clock() - worker.restoring if worker.restoring else 0.0
            who: dict[str, Any] = {"rank": worker.rank, "incarnation": worker.incarnation}
            number, age = point.number, point.age
            self._publish(CheckpointRestored, number=number, age=age, took=took, **who)

    def reject_if_restore_failed(self, worker: Worker, reason: ExitReason) -> None:
        """Reject the snapshot of *worker* if it died of restoring it."""
        point = worker.restore_point
        # A kill, a lost link or node and a fault of the device say nothing about the state, and may
        # hit the next snapshot too.
        is_own = reason.kind in (ExitKind.CRASH, ExitKind.UNRESPONSIVE)
        is_own = is_own and worker.lost is Lost.RANK and not worker.fault
        if point is None or worker.ready or not (worker.restoring and is_own):
            return
        assert self._coordinator is not None
        if self._coordinator.store.reject(worker.rank, point.number):
            why = f"rank {worker.rank} could not be restored from it: {reason}"
            self._reject(point.number, why)

    def prune(self) -> None:
        """Remove what dead ranks have left in the folder."""
        if self._coordinator is not None:
            self._coordinator.prune(everything=True)

    def describe_restore_point(self, rank: int) -> str:
        """Return the snapshot for *rank*'s next incarnation, in words; empty without a policy."""
        if self._coordinator is None:
            return ""
        next_one = self._coordinator.store.latest(rank)
        if next_one is None:
            return "none was kept: it begins anew"
        age = max(0.0, time.time() - next_one.at)
        return f"snapshot {next_one.number}, {age:.1f} s old, in {next_one.where or 'memory'}"

    def _reject(self, number: int, why: str) -> None:
        self._publish(CheckpointRejected, number=number, why=why)

    def _publish(self, kind: type[Any], *, is_logged: bool = True, **about: Any) -> None:
        event = kind(group=self._group.spec.name, at=self._group.clock(), **about)
        (self._group.publish if is_logged else self._group.deliver)(event)
