"""A cut: the state of some ranks at one call, and where each part of it lies.

Guarantees: what is found in a folder is offered as a cut only where all of it is there.

Left to others: when a cut is kept (`cuts`), what is in its parts (`runtime.snapshots`).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from phalanx.actors.spec.checkpoint_policy import Checkpoint
from phalanx.runtime import SnapshotName, descriptors

if TYPE_CHECKING:
    from collections.abc import Iterable

    from phalanx.runtime import RemoteFailure, SnapshotFolder


@dataclass(slots=True)
class Part:
    """One rank's state in a cut.

    Attributes:
        file: The memory it lies in, or -1 where it lies in the folder.
        size: Bytes of it.
    """

    file: int
    size: int

    def close(self) -> None:
        """Give its memory back."""
        if self.file >= 0:
            descriptors.close(self.file)
            self.file = -1


@dataclass(slots=True, eq=False)
class Cut:
    """The state of *ranks* at one call.

    Attributes:
        number: Rises from cut to cut, also from one executor to the next in the same folder.
        ranks: Whose state it is.
        covers: How many calls it has in it.
        waiting: Those that have not answered its call yet.
        failures: Those that could not store their part, and why.
        end: What has become of it.
        bad: A rank could not be restored from it: used only where there is no other.
        damaged: It is not what was stored: never used.
    """

    number: int
    world_size: int
    ranks: frozenset[int]
    began: float = field(default_factory=time.monotonic)
    at: float = 0.0
    covers: dict[int, int] = field(default_factory=dict[int, int])
    waiting: set[int] = field(default_factory=set[int])
    parts: dict[int, Part] = field(default_factory=dict[int, Part])
    failures: dict[int, RemoteFailure] = field(default_factory=dict[int, "RemoteFailure"])
    end: str = ""
    bad: bool = False
    damaged: bool = False

    def name(self, rank: int) -> SnapshotName:
        """Return what *rank*'s part is called in a folder."""
        return SnapshotName(self.number, rank, self.world_size)

    def show(self, where: str) -> Checkpoint:
        """Return it as users see it."""
        size = sum(part.size for part in self.parts.values())
        ranks = tuple(sorted(self.ranks))
        return Checkpoint(number=self.number, ranks=ranks, at=self.at, size_bytes=size, where=where)

    def close(self) -> None:
        """Give the memory of its parts back."""
        for part in self.parts.values():
            part.close()


def find_cuts(
    folder: SnapshotFolder, names: Iterable[SnapshotName], *, together: bool
) -> list[Cut]:
    """Return the cuts in *folder* of which all parts are there, oldest first.

    Args:
        folder: Where they lie.
        names: What is there.
        together: Whether all ranks make one cut.
    """
    sets: dict[tuple[int, int], list[int]] = {}
    for name in names:
        sets.setdefault((name.number, name.world_size), []).append(name.rank)
    found: list[Cut] = []
    for (number, size), ranks in sorted(sets.items()):
        if together and set(ranks) != set(range(size)):
            continue
        for each in [frozenset(ranks)] if together else [frozenset((rank,)) for rank in ranks]:
            cut = Cut(number, size, each, end="kept")
            for rank in each:
                seen = folder.look(cut.name(rank))
                cut.parts[rank] = Part(-1, seen.st_size)
                cut.at = max(cut.at, seen.st_mtime)
            found.append(cut)
    return found
