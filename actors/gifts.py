"""What a new incarnation is given back: a part of a cut, or all of one.

Guarantees: a part that lies in a folder has been read and found whole before it is given.

Left to others: which cut it is (`kept`), the way to the worker (`members`).
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from phalanx.runtime import join_snapshots

if TYPE_CHECKING:
    from collections.abc import Iterable

    from phalanx.runtime import SnapshotFolder

    from .cut import Cut


@dataclass(frozen=True, slots=True)
class Gift:
    """What a new incarnation is given back.

    Attributes:
        file: The descriptor it lies behind.
        is_spread: Whether it is all of a cut that was taken with another number of ranks.
        spans: Where in it (start, size) the parts lie: the rank's own, or all there are.
    """

    number: int
    at: float
    file: int
    spans: tuple[tuple[int, int], ...]
    is_spread: bool = False

    @property
    def age(self) -> float:
        """Seconds since it was complete."""
        return max(0.0, time.time() - self.at)

    def close(self) -> None:
        """Let go of it, once it has been sent."""
        os.close(self.file)


def give(
    cut: Cut,
    folder: SnapshotFolder | None,
    ranks: Iterable[int],
    *,
    spread: bool,
    sealed: bool = False,
) -> dict[int, Gift]:
    """Return what each of *ranks* gets of *cut*; it is theirs to close.

    Args:
        cut: As above.
        folder: Where it lies; None for memory.
        ranks: As above.
        spread: Whether each gets all of it.
        sealed: Whether what lies in a folder must be brought into memory: it travels on.

    Raises:
        ValueError: a part of it is damaged.
    """
    opened: dict[int, int] = {}
    try:
        for rank in sorted(cut.ranks) if spread else ranks:
            if folder is None:
                opened[rank] = os.dup(cut.parts[rank].file)
            else:
                opened[rank] = folder.open(cut.name(rank))
        files = {rank: (file, os.fstat(file).st_size) for rank, file in opened.items()}
        if sealed and folder is not None and not spread:
            for rank, (file, size) in list(files.items()):
                opened[rank], _ = join_snapshots([(file, size)])
                files[rank] = opened[rank], size
                os.close(file)
        if not spread:
            opened.clear()
            return {
                rank: Gift(cut.number, cut.at, file, ((0, size),))
                for rank, (file, size) in files.items()
            }
        whole, spans = join_snapshots(list(files.values()))
        opened[-1] = whole
        return {
            rank: Gift(cut.number, cut.at, os.dup(whole), spans, is_spread=True) for rank in ranks
        }
    finally:
        for file in opened.values():
            os.close(file)
