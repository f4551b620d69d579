"""A snapshot: the state of some ranks at one call, where its parts lie, and how they are read."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from phalanx.actors.spec.checkpoint_policy import Checkpoint
from phalanx.runtime import SnapshotName, descriptors, join_snapshots

if TYPE_CHECKING:
    from collections.abc import Iterable

    from phalanx.runtime import RemoteFailure, SnapshotFolder


@dataclass(slots=True)
class SnapshotPart:
    """The state of one rank.

    Attributes:
        file: The descriptor of its memory; -1 if it lies in the folder.
        size: In bytes.
    """

    file: int
    size: int

    def close(self) -> None:
        """Release its memory."""
        if self.file >= 0:
            descriptors.close(self.file)
            self.file = -1


@dataclass(slots=True, eq=False)
class Snapshot:
    """The state of *ranks* at one call.

    Attributes:
        number: Increases, also from one executor to the next in the same folder.
        covers: How many calls it contains, by rank or for the group.
        waiting: The ranks that have not answered its call yet.
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
    parts: dict[int, SnapshotPart] = field(default_factory=dict[int, SnapshotPart])
    failures: dict[int, RemoteFailure] = field(default_factory=dict[int, "RemoteFailure"])
    end: str = ""
    bad: bool = False
    damaged: bool = False

    def name(self, rank: int) -> SnapshotName:
        """Return the name of *rank*'s part in a folder."""
        return SnapshotName(self.number, rank, self.world_size)

    def show(self, where: str) -> Checkpoint:
        """Return it as users see it."""
        size = sum(part.size for part in self.parts.values())
        ranks = tuple(sorted(self.ranks))
        return Checkpoint(number=self.number, ranks=ranks, at=self.at, size_bytes=size, where=where)

    def close(self) -> None:
        """Release the memory of its parts."""
        for part in self.parts.values():
            part.close()


def find_snapshots(
    folder: SnapshotFolder, names: Iterable[SnapshotName], *, together: bool
) -> list[Snapshot]:
    """Return the complete snapshots in *folder* among *names*, oldest first.

    *together* says whether one snapshot has the state of all ranks, or of one.
    """
    sets: dict[tuple[int, int], list[int]] = {}
    for name in names:
        sets.setdefault((name.number, name.world_size), []).append(name.rank)
    found: list[Snapshot] = []
    for (number, size), ranks in sorted(sets.items()):
        if together and set(ranks) != set(range(size)):
            continue
        for each in [frozenset(ranks)] if together else [frozenset((rank,)) for rank in ranks]:
            snapshot = Snapshot(number, size, each, end="kept")
            for rank in each:
                seen = folder.look(snapshot.name(rank))
                snapshot.parts[rank] = SnapshotPart(-1, seen.st_size)
                snapshot.at = max(snapshot.at, seen.st_mtime)
            found.append(snapshot)
    return found


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


def open_restore_points(
    snapshot: Snapshot,
    folder: SnapshotFolder | None,
    ranks: Iterable[int],
    *,
    spread: bool,
    sealed: bool = False,
) -> dict[int, RestorePoint]:
    """Return what each of *ranks* is given of *snapshot*; the caller closes them.

    Args:
        folder: Where it lies; None for memory.
        spread: Whether each is given all parts.
        sealed: Whether parts in a folder are copied into memory, to travel to another machine.

    Raises:
        ValueError: a part is damaged.
    """
    opened: dict[int, int] = {}
    try:
        for rank in sorted(snapshot.ranks) if spread else ranks:
            if folder is None:
                opened[rank] = os.dup(snapshot.parts[rank].file)
            else:
                opened[rank] = folder.open(snapshot.name(rank))
        files = {rank: (file, os.fstat(file).st_size) for rank, file in opened.items()}
        if sealed and folder is not None and not spread:
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
        return {
            rank: RestorePoint(snapshot.number, snapshot.at, os.dup(whole), spans, is_spread=True)
            for rank in ranks
        }
    finally:
        for file in opened.values():
            os.close(file)
