"""The choice of the state from which a new epoch continues: pure, the same on every rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from .errors import StateLost

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True, slots=True)
class Claim:
    """The states that a rank can continue from.

    Attributes:
        step: The step of the state in its own memory; -1 if it has none that is whole.
        kept: The steps of its buffers.
    """

    step: int
    kept: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Source:
    """The source of the ranks' state.

    Attributes:
        kind: ``"memory"``: a rank that has applied *step*, for those that have not. ``"buffers"``.
            ``"new"``: there is no state yet; rank 0 has the first.
        complete: The newest complete set of buffers; -1 for none.
        leader: The rank that the others take it from; -1 for the buffers.
    """

    kind: Literal["memory", "buffers", "new"]
    step: int
    complete: int
    leader: int


def agree(claims: Sequence[Claim], *, sharded: bool, used: bool) -> Source:
    """Return the source: the highest step that every rank can have.

    Args:
        claims: Of all ranks.
        sharded: Whether each rank's state is different; else all ranks have the same state.
        used: Whether there has been a complete set of buffers.

    Raises:
        StateLost: there has been a state, and no complete one is left.
    """
    common = set(claims[0].kept).intersection(*(each.kept for each in claims))
    complete = max(common, default=-1)
    best = max(each.step for each in claims)
    if not sharded and best >= 0 and best >= complete:
        leader = next(rank for rank, each in enumerate(claims) if each.step == best)
        return Source("memory", best, complete, leader)
    if complete >= 0:
        return Source("buffers", complete, complete, -1)
    if used:
        kept = {rank: each.kept for rank, each in enumerate(claims)}
        msg = f"no step is whole on every rank; the buffers hold {kept}; give another folder"
        raise StateLost(msg)
    return Source("new", 0, -1, 0)


def is_due(count: int) -> bool:
    """Whether *count* is 1, 2, 4, 8 and so on: for what takes long, and finds what stays."""
    return count > 0 and not count & count - 1


def difference(rows: Sequence[Mapping[str, int]]) -> str:
    """Say which objects are not what rank 0 has, by the *rows* of all ranks: names and checksums.

    Nothing where all are alike.
    """
    for rank, row in enumerate(rows):
        if odd := [name for name, check in row.items() if rows[0].get(name) != check]:
            return f"{', '.join(odd)} of rank {rank} is not that of rank 0"
    return ""
