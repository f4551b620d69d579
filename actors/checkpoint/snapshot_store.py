"""Snapshot store: retention, pruning, and the choice of the snapshot that ranks are restored from.

- The newest good snapshot is chosen; a rejected one only if there is no other, the oldest first.
- At most *keep* of each rank stay, besides those added since the last `prune`.
- A part in a folder is read and its checksum is verified before it is given to a rank.

For any thread; its lock is the innermost, and nothing waits under it.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from phalanx.runtime import OwnedLock, SnapshotFolder
from phalanx.supervision import RuntimeFault, SpecError

from .snapshot import find_snapshots, open_restore_points

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from phalanx.actors.spec.checkpoint_policy import Checkpoint, CheckpointPolicy

    from .snapshot import RestorePoint, Snapshot


_BACKLOG = 64  # snapshots beyond `keep` until the next prune; each costs descriptors


class SnapshotStore:
    """The snapshots of one executor, or of those that follow each other in one place of a tree.

    Args:
        path: The folder; None for memory.
        together: Whether one snapshot has the state of all ranks, or of one.
        sealed: See `open_restore_points`.
    """

    def __init__(
        self, policy: CheckpointPolicy, path: Path | None, *, together: bool, sealed: bool
    ) -> None:
        self._policy = policy
        self._path = path
        self._together = together
        self._sealed = sealed
        self._lock = OwnedLock()
        self._folder: SnapshotFolder | None = None
        self._snapshots: list[Snapshot] = []  # by number
        self._gone: list[Snapshot] = []  # to be removed by the next prune
        self._stray = False  # whether the folder may have files of no known snapshot
        self._bound = _BACKLOG
        self._foreign = 0  # files in the folder up to this number belong to others

    def is_locked(self) -> bool:
        """Whether this thread holds the lock."""
        return self._lock.is_mine()

    @property
    def where(self) -> str:
        """The folder; empty for memory."""
        return "" if self._path is None else str(self._path)

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
        last = 0 if self._path is None or self._folder is not None else self._claim(self._path)
        if self._together and not can_reshard and self._snapshots:
            had = self._snapshots[-1].world_size
            if had != size:
                raise SpecError(
                    "world_size",
                    size,
                    f"what is kept is the state of {had} ranks; start as many, or give the worker "
                    "class a method reshard(states)",
                )
        if self._policy.resume:
            self._foreign = 0
        return last

    def _claim(self, path: Path) -> int:
        with contextlib.ExitStack() as undo:
            folder = SnapshotFolder(path)
            undo.callback(folder.close)
            folder.tidy()
            names = folder.names()
            last = max((name.number for name in names), default=0)
            self._foreign = last  # until its snapshots are known to fit
            if self._policy.resume:
                self._snapshots = find_snapshots(folder, names, together=self._together)
                if names and not self._snapshots:
                    raise SpecError(
                        "checkpoint.resume",
                        self.where,
                        f"of {len(names)} snapshots there, none is complete; "
                        "to begin anew, give another folder",
                    )
            undo.pop_all()
        self._folder = folder
        return last

    def close(self) -> None:
        """Release the memory and the folder; the files stay."""
        with self._lock.asked():
            kept, self._snapshots = self._snapshots, []
            folder, self._folder = self._folder, None
        for snapshot in kept:
            snapshot.close()
        if folder is not None:
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
            if self._folder is not None and self._folder.remove(names):
                self._folder.sync()

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
        for snapshot in gone:
            snapshot.close()
        if folder is None or not (gone or stray):
            return
        # In this order: a snapshot begun later is not among the names, and one kept later was
        # begun before.
        try:
            names = folder.names()
        except OSError:
            self.note_stray()  # the disk cannot be read now: with the next prune
            return
        under_way = begun()
        with self._lock.asked():
            kept = {(each.number, rank) for each in self._snapshots for rank in each.ranks}
        folder.remove(
            name
            for name in names
            if name.number > self._foreign
            and name.number not in under_way
            and (name.number, name.rank) not in kept
        )

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
            RuntimeFault: there are snapshots, and all are damaged.
        """
        ranks = list(ranks)
        points: dict[int, RestorePoint] = {}
        try:
            for each in [ranks] if self._together else [[rank] for rank in ranks]:
                points |= self._choose(each, size, reject)
        except BaseException:
            for point in points.values():
                point.close()
            raise
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
                return open_restore_points(
                    snapshot, self._folder, ranks, spread=spread, sealed=self._sealed
                )
            except ValueError as error:
                snapshot.damaged = True
                reject(snapshot.number, str(error))
        if not kept:
            return {}
        msg = f"there are {len(kept)} snapshots in {self.where or 'memory'}, all of them damaged"
        raise RuntimeFault(msg)
