"""Snapshots of ranks' states, and their store: retention, pruning, the choice of a restore point.

- The newest good snapshot is chosen; a rejected one only if there is no other, the oldest first.
- At most *keep* of each rank stay, besides those added since the last `prune`.
- A part in a folder is read and its checksum is verified before it is given to a rank.

For any thread; its lock is the innermost, and nothing waits under it.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.actors.spec.checkpoint_policy import Checkpoint
from phalanx.runtime import OwnedLock, SnapshotFolder, SnapshotName, descriptors, join_snapshots
from phalanx.supervision import MessageTooLarge, RuntimeFault, SpecError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from phalanx.actors.spec.checkpoint_policy import CheckpointPolicy
    from phalanx.runtime import RemoteFailure

_BACKLOG = 64  # snapshots beyond `keep` until the next prune; each costs descriptors


@dataclass(slots=True, eq=False)
class Snapshot:
    """The state of *ranks* at one call.

    Attributes:
        number: Increases, also from one executor to the next in the same folder.
        covers: How many calls it contains, by rank or for the group.
        waiting: The ranks that have not answered its call yet.
        parts: The descriptor of each rank's part, -1 if it lies in the folder, and its bytes.
        failures: Why ranks could not store their part.
        end: ``"kept"``, ``"failed"`` or ``"void"``; empty while it is under way.
        bad: A rank could not be restored from it: used only if there is no other.
        damaged: Its bytes are not those that were stored: never used.
    """

    number: int
    world_size: int
    ranks: frozenset[int]
    began: float = field(default_factory=time.monotonic)
    at: float = 0.0
    covers: dict[int, int] = field(default_factory=dict[int, int])
    waiting: set[int] = field(default_factory=set[int])
    parts: dict[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])
    failures: dict[int, RemoteFailure] = field(default_factory=dict[int, "RemoteFailure"])
    end: str = ""
    bad: bool = False
    damaged: bool = False

    def name(self, rank: int) -> SnapshotName:
        """Return the name of *rank*'s part in a folder."""
        return SnapshotName(self.number, rank, self.world_size)

    def show(self, where: str) -> Checkpoint:
        """Return it as users see it."""
        size = sum(size for _, size in self.parts.values())
        ranks = tuple(sorted(self.ranks))
        return Checkpoint(number=self.number, ranks=ranks, at=self.at, size_bytes=size, where=where)

    def close(self) -> None:
        """Release the memory of its parts."""
        for rank, (file, size) in self.parts.items():
            if file >= 0:
                descriptors.close(file)
                self.parts[rank] = -1, size


@dataclass(frozen=True, slots=True)
class RestorePoint:
    """The state that a new incarnation is given.

    Attributes:
        file: The descriptor of the data.
        spans: The (start, size) of its parts: the rank's own, or those of all ranks there were.
        is_spread: Whether it is a snapshot of another number of ranks, for `reshard`.
    """

    number: int
    at: float
    file: int
    spans: tuple[tuple[int, int], ...]
    is_spread: bool = False

    @property
    def age(self) -> float:
        """Seconds since the snapshot was complete."""
        return max(0.0, time.time() - self.at)

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self.file)


class SnapshotStore:
    """The snapshots of one executor, or of those that follow each other in one place of a tree.

    Args:
        together: Whether one snapshot has the state of all ranks, or of one.
        sealed: Whether parts in a folder are copied into memory, to travel to another machine.
    """

    def __init__(self, policy: CheckpointPolicy, *, together: bool, sealed: bool) -> None:
        self._policy = policy
        self._together = together
        self._sealed = sealed
        self._lock = OwnedLock()
        self._folder: SnapshotFolder | None = None
        self._snapshots: list[Snapshot] = []  # by number
        self._gone: list[Snapshot] = []  # to be removed by the next prune
        self._unsynced = False  # whether files were removed since the folder was synced
        self._stray = False  # whether the folder may have files of no known snapshot
        self._bound = _BACKLOG
        self._others_up_to = 0  # files in the folder up to this number belong to others

    def is_locked(self) -> bool:
        """Whether this thread holds the lock."""
        return self._lock.is_mine()

    @property
    def where(self) -> str:
        """The folder; empty for memory."""
        return str(self._policy.where or "")

    @property
    def is_held(self) -> bool:
        """Whether there is anything for `close` to release."""
        return bool(self._snapshots) or self._folder is not None

    def open(self, size: int, *, can_reshard: bool) -> int:
        """Serve an executor of *size* ranks; return the highest number in the folder, or 0.

        Raises:
            SpecError: another executor uses the folder, no snapshot to be resumed from is complete,
                or they are of another number of ranks, and the worker has no `reshard`.
        """
        last = self._claim() if self.where and self._folder is None else 0
        had = self._snapshots[-1].world_size if self._snapshots else size
        if self._together and not can_reshard and had != size:
            remedy = "start as many, or give the worker class a method reshard(states)"
            raise SpecError(
                "world_size", size, f"the snapshots hold the state of {had} ranks; {remedy}"
            )
        if self._policy.resume:
            self._others_up_to = 0
        return last

    def _claim(self) -> int:
        with contextlib.ExitStack() as undo:
            folder = SnapshotFolder(Path(self.where))
            undo.callback(folder.close)
            folder.tidy()
            names = folder.names()
            last = max((name.number for name in names), default=0)
            self._others_up_to = last  # until its snapshots are known to fit
            if self._policy.resume:
                self._snapshots = self._find(folder, names)
                if names and not self._snapshots:
                    text = f"of {len(names)} snapshots there, none is complete"
                    remedy = f"{text}; to begin anew, give another folder"
                    raise SpecError("checkpoint.resume", self.where, remedy)
            undo.pop_all()
        self._folder = folder
        return last

    def _find(self, folder: SnapshotFolder, names: Iterable[SnapshotName]) -> list[Snapshot]:
        """Return the complete snapshots in *folder* among *names*, oldest first."""
        sets: dict[tuple[int, int], list[int]] = {}
        for name in names:
            sets.setdefault((name.number, name.world_size), []).append(name.rank)
        found: list[Snapshot] = []
        for (number, size), ranks in sorted(sets.items()):
            if self._together and set(ranks) != set(range(size)):
                continue
            for each in self._sets_of(ranks):
                snapshot = Snapshot(number, size, frozenset(each), end="kept")
                for rank in each:
                    seen = folder.look(snapshot.name(rank))
                    snapshot.parts[rank] = -1, seen.st_size
                    snapshot.at = max(snapshot.at, seen.st_mtime)
                found.append(snapshot)
        return found

    def _sets_of(self, ranks: list[int]) -> list[list[int]]:
        """Return *ranks*, those together whose states belong together."""
        return [ranks] if self._together else [[rank] for rank in ranks]

    def close(self) -> None:
        """Release the memory and the folder; the files stay."""
        with self._lock.asked():
            kept, self._snapshots = self._snapshots, []
            folder, self._folder = self._folder, None
        for snapshot in kept:
            snapshot.close()
        if folder is not None:
            with contextlib.suppress(OSError):  # its disk cannot be read now
                folder.tidy()  # a rank that was killed may have been writing
            if self._unsynced:
                folder.sync()
            folder.close()

    # --- retention --------------------------------------------------------------------------

    def add(self, snapshot: Snapshot) -> None:
        """Keep *snapshot*, the newest."""
        with self._lock.asked():
            self._snapshots.append(snapshot)
            if len(self._snapshots) > self._bound:
                self._trim()  # the thread that prunes is busy with a death

    def discard(self, snapshot: Snapshot) -> None:
        """Remove the files of *snapshot* now, and its memory with the next `prune`.

        The files at once: a caller that gets the error of the call may end the driver, and a later
        resume must not have that call in it. A stopped rank may still write its part afterwards, a
        dead one never does: so no complete set is left.
        """
        with self._lock.asked():
            self._gone.append(snapshot)
            names = map(snapshot.name, snapshot.ranks)
            if self._folder is not None:
                self._unsynced |= self._folder.remove(names) > 0

    def note_stray(self) -> None:
        """Have the next `prune` remove files that belong to no known snapshot."""
        with self._lock.asked():
            self._stray = True

    def latest(self, rank: int | None = None) -> Checkpoint | None:
        """Return the newest good one: of *rank*, or of any."""
        with self._lock.asked():
            for snapshot in reversed(self._snapshots):
                mine = rank is None or self._together or rank in snapshot.ranks
                if mine and not (snapshot.bad or snapshot.damaged):
                    return snapshot.show(self.where)
        return None

    def prune(self, begun: Callable[[], set[int]], *, everything: bool = False) -> None:
        """Remove the memory and the files of snapshots that are not kept.

        With *everything* also files that belong to no known snapshot. *begun* returns the numbers
        of the snapshots under way.
        """
        folder = self._folder
        with self._lock.asked():
            self._trim()
            gone, self._gone = self._gone, []
            stray, self._stray = self._stray or everything, False
            unsynced, self._unsynced = self._unsynced, False
        for snapshot in gone:
            snapshot.close()
        if unsynced and folder is not None:
            folder.sync()  # here, for it may take long
        if folder is None or not (gone or stray):
            return
        # In this order: a snapshot begun later is not among the names, and one kept later was
        # begun before.
        try:
            names, unfinished = folder.names(), folder.unfinished()
        except OSError:
            self.note_stray()  # the disk cannot be read now: with the next prune
            return
        under_way = begun()
        with self._lock.asked():
            kept = {(each.number, rank) for each in self._snapshots for rank in each.ranks}

        def is_over(number: int) -> bool:
            return number > self._others_up_to and number not in under_way

        folder.remove(
            name for name in names if is_over(name.number) and (name.number, name.rank) not in kept
        )
        folder.remove(name for name, number in unfinished.items() if is_over(number))

    def _trim(self) -> None:
        """Set aside the snapshots that are older than *keep* good ones."""
        kept: list[Snapshot] = []
        good: dict[frozenset[int] | None, int] = {}
        for snapshot in reversed(self._snapshots):
            key = None if self._together else snapshot.ranks
            if good.get(key, 0) >= self._policy.keep:
                self._gone.append(snapshot)
                snapshot.close()
                continue
            kept.append(snapshot)
            good[key] = good.get(key, 0) + (not (snapshot.bad or snapshot.damaged))
        self._snapshots = kept[::-1]
        self._bound = len(kept) + _BACKLOG

    # --- restoring --------------------------------------------------------------------------

    def choose(
        self, ranks: Iterable[int], size: int, reject: Callable[[int, str], None]
    ) -> Mapping[int, RestorePoint]:
        """Return what each of *ranks* is restored from; the caller closes them.

        A rank without an entry begins anew: no state of it was ever kept.

        *ranks* are about to be started, together, in a group of *size*. *reject* is called with the
        number of a snapshot that is damaged, and how.

        Raises:
            RuntimeFault: there are snapshots, and all are damaged; or memory is short.
        """
        ranks = list(ranks)
        points: dict[int, RestorePoint] = {}
        with contextlib.ExitStack() as undo:
            for each in self._sets_of(ranks):
                for rank, point in self._choose(each, size, reject).items():
                    points[rank] = point
                    undo.callback(point.close)
            undo.pop_all()
        return points

    def reject(self, rank: int, number: int) -> bool:
        """Use *rank*'s snapshot *number* only if there is no other; False if that was so."""
        with self._lock.asked():
            for snapshot in self._snapshots:
                mine = self._together or rank in snapshot.ranks
                if snapshot.number == number and mine and not snapshot.bad:
                    snapshot.bad = True
                    return True
        return False

    def _choose(
        self, ranks: list[int], size: int, reject: Callable[[int, str], None]
    ) -> dict[int, RestorePoint]:
        with self._lock.asked():
            kept = [each for each in self._snapshots if self._together or ranks[0] in each.ranks]
        # The newest good one first; of the rejected ones the oldest.
        good = [each for each in reversed(kept) if not each.bad]
        for snapshot in (*good, *(each for each in kept if each.bad)):
            if snapshot.damaged:
                continue
            spread = self._together and snapshot.world_size != size
            try:
                return self._open(snapshot, ranks, spread=spread)
            except MessageTooLarge as error:
                msg = f"no memory to give back snapshot {snapshot.number}: {error}"
                raise RuntimeFault(msg) from error
            except ValueError as error:
                snapshot.damaged = True
                reject(snapshot.number, str(error))
        if not kept:
            return {}
        msg = f"there are {len(kept)} snapshots in {self.where or 'memory'}, all of them damaged"
        raise RuntimeFault(msg)

    def _open(
        self, snapshot: Snapshot, ranks: list[int], *, spread: bool
    ) -> dict[int, RestorePoint]:
        """Return what each of *ranks* is given of *snapshot*: all of its parts if *spread*.

        Raises:
            ValueError: a part is damaged.
        """
        folder = self._folder
        opened: dict[int, int] = {}
        try:
            for rank in sorted(snapshot.ranks) if spread else ranks:
                if folder is None:
                    opened[rank] = os.dup(snapshot.parts[rank][0])
                else:
                    opened[rank] = folder.open(snapshot.name(rank))
            files = {rank: (file, os.fstat(file).st_size) for rank, file in opened.items()}
            if self._sealed and folder is not None and not spread:
                for rank, (file, size) in list(files.items()):
                    opened[rank], _ = join_snapshots([(file, size)])
                    files[rank] = opened[rank], size
                    os.close(file)
            if not spread:
                opened.clear()
                return {
                    rank: RestorePoint(snapshot.number, snapshot.at, file, ((0, size),))
                    for rank, (file, size) in files.items()
                }
            whole, spans = join_snapshots(list(files.values()))
            opened[-1] = whole
            points: dict[int, RestorePoint] = {}
            with contextlib.ExitStack() as made:
                for rank in ranks:
                    made.callback(os.close, file := os.dup(whole))
                    about = snapshot.number, snapshot.at, file, spans
                    points[rank] = RestorePoint(*about, is_spread=True)
                made.pop_all()
            return points
        finally:
            for file in opened.values():
                os.close(file)
