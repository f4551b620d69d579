"""Checkpoint coordinator: decides when ranks store their state and commits complete snapshots.

A snapshot has the state of some ranks at one call: of all ranks if they are formed together, else
of one. It is kept once each of its ranks has stored its part and has then answered the call. So no
snapshot has half of a call in it, nor a call that ended in a death or is about to be sent again; at
every moment the newest kept one is complete.

For any thread. Its lock is inside the plane's and outside the store's; nothing waits under it.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from phalanx.actors.calls.call import Call, Shape, check_timeout, options_of
from phalanx.actors.spec.worker import declared_limit
from phalanx.runtime import Kind, LargeFrame, OwnedLock, RemoteFailure, descriptors, encode
from phalanx.supervision import RuntimeFault, Strategy

from .snapshot_store import Snapshot, SnapshotStore

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from phalanx.actors.calls.plane import CallPlane
    from phalanx.actors.spec.checkpoint_policy import Checkpoint, CheckpointPolicy
    from phalanx.actors.spec.options import ExecutorSpec
    from phalanx.runtime import EventLoop, Frame, Timer

    from .group_checkpoints import CheckpointManager


@dataclass(slots=True)
class Count:
    """The calls *sent*, those up to the last snapshot *begun*, and those *saved*."""

    sent: int = 0
    begun: int = 0
    saved: int = 0


_GROUP = -1  # the key of the one `Count` of ranks that are formed together


class CheckpointCoordinator:
    """The checkpoints of one executor, or of those that follow each other in one place of a tree.

    Args:
        together: Whether one snapshot has the state of all ranks, or of one.
        limit: Seconds a rank may take to store its state; None for no limit.
        sealed: See `SnapshotStore`.

    Attributes:
        store: The snapshots that are kept.
        base: The number of a snapshot less the wire id of its call.
    """

    def __init__(
        self,
        policy: CheckpointPolicy,
        *,
        together: bool,
        limit: float | None = None,
        sealed: bool = False,
    ) -> None:
        self.store = SnapshotStore(policy, together=together, sealed=sealed)
        self._policy = policy
        self.limit = limit
        self._together = together
        self._lock = OwnedLock()
        self._open: dict[tuple[int, int], Snapshot] = {}  # by (wire id, rank)
        self.base = 0
        self._last = 0  # the highest number so far
        self._counts: defaultdict[int, Count] = defaultdict(Count)  # by rank, or `_GROUP`
        self._marked: tuple[int, Collection[int]] = 0, ()  # the call sent last, by wire id
        self._timer: Timer | None = None
        self._observer: CheckpointManager | None = None  # None while no executor is served
        self._loop: EventLoop | None = None
        self._pid = os.getpid()

    def is_locked(self) -> bool:
        """Whether this thread holds a lock of it."""
        return self._lock.is_mine() or self.store.is_locked()

    # --- the life of an executor --------------------------------------------------------

    def open(
        self, loop: EventLoop, observer: CheckpointManager, *, can_reshard: bool, size: int
    ) -> None:
        """Serve an executor of *size* ranks, and claim the folder.

        Raises:
            SpecError: see `SnapshotStore.open`.
        """
        with self._lock.asked():
            self._loop, self._observer = loop, observer
            self._marked = 0, ()
            last = self.store.open(size, can_reshard=can_reshard)
            self.base = self._last = max(self._last, last)

    def close(self, *, forget: bool) -> None:
        """Stop serving; *forget* also releases memory and folder."""
        with self._lock.asked():
            self._void(list(self._open.values()))
            self._stop_timer()
            self._counts.clear()
            self._loop, self._observer = None, None
        self.prune(everything=True)
        if forget:
            self.store.close()

    def __del__(self) -> None:
        # Its place in a tree has gone. In a forked child these descriptor numbers are others'.
        if self._pid == os.getpid() and self.store.is_held:
            self.close(forget=True)

    # --- calls in flight (under the plane's lock) --------------------------------------

    def mark(self, call: Call, ranks: Collection[int], size: int) -> Collection[int]:
        """Return those of *ranks* that store their state with *call*, which is being sent.

        The same if an exception has interrupted that and it is sent once more.
        """
        with self._lock.asked():
            wire, marked = self._marked
            if wire == call.wire:
                return marked
            if call.snapshots is not None:
                call.snapshots = self._begin(call.wire, ranks, size)
                self._marked = call.wire, ranks
                return ranks
            marked = self._count(ranks, size)
            if marked:
                self._begin(call.wire, marked, size)
            self._marked = call.wire, marked
            seconds = self._policy.every_seconds
            if seconds is not None and len(marked) < len(ranks) and self._timer is None:
                assert self._loop is not None
                self._timer = self._loop.call_at(self._loop.time() + seconds, self._due)
            return marked

    def on_frame(self, rank: int, frame: Frame) -> None:
        """Take *rank*'s part, or why it could not be stored."""
        with self._lock.asked():
            snapshot = self._open.get((frame.call_id, rank))
            if snapshot is None:  # void since: a rank has died
                frame.drop()
                self.store.note_stray()  # it may have left a file
                self._changed(None)
            elif frame.kind == Kind.NOT_SAVED:
                self._failed(snapshot, rank, RemoteFailure.read(frame))
            elif isinstance(frame, LargeFrame) and frame.fds:
                file = descriptors.own(frame.fds.pop())
                snapshot.parts[rank] = file, os.fstat(file).st_size
            else:
                try:
                    snapshot.parts[rank] = -1, frame.value()
                except Exception as error:  # noqa: BLE001  # lost on the way: no descriptor was free
                    self._failed(snapshot, rank, RemoteFailure.of(error))

    def answered(self, rank: int, wire: int) -> None:
        """Note that *rank* has answered the call *wire*."""
        with self._lock.asked():
            snapshot = self._open.pop((wire, rank), None)
            if snapshot is None:
                return
            snapshot.waiting.discard(rank)
            if snapshot.waiting:
                return
            if len(snapshot.parts) < len(snapshot.ranks):
                snapshot.end = "failed"
                self.store.discard(snapshot)
                self._changed(None)
                return
            snapshot.end = "kept"
            snapshot.at = time.time()
            self.store.add(snapshot)
            for key, calls in snapshot.covers.items():
                self._counts[key].saved = max(self._counts[key].saved, calls)
            self._changed(snapshot)

    def abandon(self, wire: int) -> None:
        """Void the snapshots of the call *wire*, which not every rank will answer."""
        with self._lock.asked():
            self._void([each for (number, _), each in self._open.items() if number == wire])

    def lose(self, ranks: Collection[int], *, everybody: bool) -> None:
        """Note that *ranks* have ended or will be stopped; their answers have been read."""
        with self._lock.asked():
            lost = [
                each for (_, rank), each in self._open.items() if self._together or rank in ranks
            ]
            self._void(lost)
            if everybody or not self._together:
                for key in self._keys(ranks):
                    self._counts.pop(key, None)  # what is restored lacks the calls since
            if self._is_begun():
                self._stop_timer()
            if lost:
                self._changed(None)

    # --- kept snapshots ---------------------------------------------------------------------

    def is_unsaved(self) -> bool:
        """Whether a call has been sent that no kept snapshot covers."""
        with self._lock.asked():
            return any(count.saved < count.sent for count in self._counts.values())

    def prune(self, *, everything: bool = False) -> None:
        """See `SnapshotStore.prune`."""
        self.store.prune(self._begun, everything=everything)

    def outcome(self, call: Call) -> Checkpoint:
        """Return what *call*, a `checkpoint_call` that has been answered, has stored.

        Raises:
            Exception: what `WorkerActor.checkpoint` raised on a rank.
        """
        with self._lock.asked():
            snapshots = list(call.snapshots or ())
            for snapshot in snapshots:
                for rank, failure in sorted(snapshot.failures.items()):
                    error = failure.revive()
                    with contextlib.suppress(Exception):  # it may refuse further attributes
                        trace = failure.trace.rstrip()
                        error.add_note(f"raised by rank {rank} in checkpoint; remote:\n{trace}")
                    raise error
                if snapshot.end != "kept":
                    msg = f"snapshot {snapshot.number} did not arrive: {snapshot.end}"
                    raise RuntimeFault(msg)
            shown = [snapshot.show(self.store.where) for snapshot in snapshots]
        return replace(
            shown[0],
            ranks=tuple(rank for each in shown for rank in each.ranks),
            at=max(each.at for each in shown),
            size_bytes=sum(each.size_bytes for each in shown),
        )

    # --- inside -------------------------------------------------------------------------

    def _failed(self, snapshot: Snapshot, rank: int, failure: RemoteFailure) -> None:
        """Note why *rank*'s part of *snapshot* will be missing."""
        snapshot.failures[rank] = failure
        if self._observer is not None:
            self._observer.failed(rank, snapshot.number, failure)

    def _keys(self, ranks: Collection[int]) -> Collection[int]:
        return (_GROUP,) if self._together else ranks

    def _is_begun(self) -> bool:
        """Whether a snapshot has begun behind every call."""
        return all(count.begun >= count.sent for count in self._counts.values())

    def _count(self, ranks: Collection[int], size: int) -> Collection[int]:
        """Count a call to *ranks*; return the ranks that store their state with it."""
        every = self._policy.every_calls
        due: list[int] = []
        for key in self._keys(ranks):
            count = self._counts[key]
            count.sent += 1
            if every is not None and count.sent - count.begun >= every:
                due.append(key)
        if not self._together or not due:
            return due
        if len(ranks) == size:
            return ranks
        # It goes to some ranks only: a call with which all ranks store their state follows it.
        self._cover(ranks)
        if self._observer is not None:
            self._observer.due()
        return ()

    def _cover(self, ranks: Collection[int]) -> dict[int, int]:
        """Note that a snapshot of *ranks* begins; return how many calls it covers, by key."""
        covers = {key: self._counts[key].sent for key in self._keys(ranks)}
        for key, calls in covers.items():
            self._counts[key].begun = calls
        return covers

    def _begin(self, wire: int, ranks: Collection[int], size: int) -> list[Snapshot]:
        self._last = self.base + wire
        snapshots: list[Snapshot] = []
        for each in [frozenset(ranks)] if self._together else [frozenset((r,)) for r in ranks]:
            covers = self._cover(each)
            snapshot = Snapshot(self._last, size, each, waiting=set(each), covers=covers)
            for rank in each:
                self._open[wire, rank] = snapshot
            snapshots.append(snapshot)
        if self._is_begun():
            self._stop_timer()
        return snapshots

    def _begun(self) -> set[int]:
        """Return the numbers of the snapshots under way."""
        with self._lock.asked():
            return {snapshot.number for snapshot in self._open.values()}

    def _void(self, snapshots: Iterable[Snapshot]) -> None:
        for snapshot in snapshots:
            if snapshot.end:
                continue
            snapshot.end = "void"
            for rank in snapshot.ranks:
                self._open.pop((snapshot.number - self.base, rank), None)
            self.store.discard(snapshot)
            for key in snapshot.covers.keys() & self._counts.keys():
                self._counts[key].begun = self._counts[key].saved  # the next call is due again

    def _changed(self, kept: Snapshot | None) -> None:
        if self._observer is not None:
            self._observer.changed(kept)

    def _stop_timer(self) -> None:
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()

    def _due(self) -> None:
        """Have a snapshot taken after `every_seconds`; runs on the event loop."""
        with self._lock.asked():
            self._timer = None
            observer = None if self._is_begun() else self._observer
        if observer is not None:
            observer.due()


_RETRIES = 3  # of a checkpoint that deaths interrupt; arbitrary


def checkpoint_call(plane: CallPlane, seq: int = 0, timeout: float | None = None) -> Call:
    """Return a call with which every rank stores its state; `outcome` is what it has stored."""
    if timeout is not None:
        check_timeout(timeout)
    options = options_of(now=plane.clock(), timeout=timeout, retries=_RETRIES)
    payload = plane.pack(encode((_nothing, (), dict[str, Any]()), "checkpoint"))
    call = Call(seq, "checkpoint", Shape.COLLECTIVE, [payload], options)
    call.snapshots = []
    return call


def coordinator_of(spec: ExecutorSpec) -> CheckpointCoordinator | None:
    """Return what keeps the states of an executor's ranks, where they are to be kept."""
    if spec.checkpoint is None:
        return None
    limit = declared_limit(spec.worker.checkpoint, spec.limits.hang)
    return CheckpointCoordinator(
        spec.checkpoint,
        together=spec.policy.strategy is not Strategy.ONE_FOR_ONE,
        limit=None if limit == math.inf else limit,
        sealed=spec.is_remote,
    )


def _nothing(_worker: object) -> None:
    """Do nothing."""
