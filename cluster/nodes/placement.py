"""Placement: assigns ranks to nodes."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def place(
    ranks: Sequence[int], slots: Mapping[int, int], before: Mapping[int, int]
) -> dict[int, int] | None:
    """Return the node of each rank, or None if there is not room for all.

    - A rank whose node is still there stays on it.
    - Those that were on one node, which is not, go together to one node if any has room for all
      of them: to the one that they leave the least of free. So do the ranks that are new.
    - What fits no node whole is cut into blocks of consecutive ranks, as few as can be.

    Args:
        ranks: Those that get a node, or stay on theirs.
        slots: How many ranks each node may hold.
        before: Where ranks were, the node lost or not; a rank that is new is not in it.
    """
    placed = {rank: before[rank] for rank in ranks if before.get(rank) in slots}
    free = dict(slots)
    for held in placed.values():
        free[held] -= 1
    if min(free.values(), default=0) < 0:
        return None
    unplaced = [rank for rank in ranks if rank not in placed]
    unplaced.sort(key=lambda rank: before.get(rank, -1))
    groups = [list(group) for _, group in groupby(unplaced, lambda rank: before.get(rank, -1))]
    # The largest first, which are the hardest to fit; what has to be cut gets what then is left.
    groups.sort(key=len, reverse=True)
    cut = list[list[int]]()
    for group in groups:
        node = _tightest(free, len(group))
        if node is None:
            cut.append(group)
        else:
            _put(group, node, placed, free)
    for group in cut:
        rest: Sequence[int] = group
        while rest:
            node = _tightest(free, len(rest))
            if node is None:
                if not any(free.values()):
                    return None
                node = max(free, key=lambda each: free[each])
            block, rest = rest[: free[node]], rest[free[node] :]
            _put(block, node, placed, free)
    return placed


def _tightest(free: Mapping[int, int], size: int) -> int | None:
    """Return the node with the least room that has room for *size*."""
    return min((n for n in free if free[n] >= size), key=lambda n: (free[n], n), default=None)


def _put(ranks: Sequence[int], node: int, placed: dict[int, int], free: dict[int, int]) -> None:
    placed |= dict.fromkeys(ranks, node)
    free[node] -= len(ranks)
