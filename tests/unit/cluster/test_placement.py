"""Which rank goes to which node."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.cluster.nodes.placement import place


@pytest.mark.parametrize(
    ("ranks", "slots", "before", "placed"),
    [
        (4, {0: 4}, {}, [0, 0, 0, 0]),
        (16, {0: 8, 1: 8}, {}, [0] * 8 + [1] * 8),
        (3, {0: 8, 1: 3}, {}, [1, 1, 1]),
        (4, {0: 2, 2: 4}, {0: 0, 1: 0, 2: 1, 3: 1}, [0, 0, 2, 2]),
        (4, {0: 4, 2: 2}, {0: 0, 1: 0, 2: 1, 3: 1}, [0, 0, 0, 0]),  # of two that fit, the first
        (6, {2: 2, 3: 4}, {0: 0, 1: 0, 2: 1, 3: 1, 4: 1, 5: 1}, [2, 2, 3, 3, 3, 3]),
        (6, {2: 3, 3: 3}, {0: 0, 1: 0, 2: 1, 3: 1, 4: 1, 5: 1}, [2, 2, 3, 3, 3, 2]),
        (6, {0: 4, 1: 2}, {0: 0, 1: 0, 2: 0, 3: 0}, [0, 0, 0, 0, 1, 1]),
        (2, {0: 1}, {}, None),
    ],
)
def test_ranks_of_one_node_go_on_together(
    ranks: int, slots: dict[int, int], before: dict[int, int], placed: list[int] | None
) -> None:
    found = place(range(ranks), slots, before)

    assert (found and [found[rank] for rank in range(ranks)]) == placed


@given(
    ranks=st.integers(1, 12),
    slots=st.dictionaries(st.integers(0, 5), st.integers(0, 6), max_size=5),
    before=st.dictionaries(st.integers(0, 11), st.integers(0, 5)),
)
def test_any_ranks_are_placed_if_there_is_room(
    ranks: int, slots: dict[int, int], before: dict[int, int]
) -> None:
    stay = {rank: before[rank] for rank in range(ranks) if before.get(rank) in slots}
    held = Counter(stay.values())
    free = {node: slots[node] - held[node] for node in slots}
    fits = min(free.values(), default=0) >= 0 and sum(free.values()) >= ranks - len(stay)

    placed = place(range(ranks), slots, before)

    assert (placed is not None) == fits
    if placed is None:
        return
    assert sorted(placed) == list(range(ranks))
    assert placed | stay == placed
    taken = Counter(placed.values())
    assert all(taken[node] <= slots[node] for node in taken)
    left = {node: slots[node] - taken[node] for node in slots}
    for old in {before.get(rank, -1) for rank in range(ranks)} - set(slots):
        group = [rank for rank in range(ranks) if before.get(rank, -1) == old]
        nodes_of = {placed[rank] for rank in group}
        if len(nodes_of) > 1:  # it was cut: no node has room for all of it
            assert max(left[n] for n in slots) < len(group)
            for node in nodes_of:
                block = [rank for rank in group if placed[rank] == node]
                at = [group.index(rank) for rank in block]
                assert at == list(range(at[0], at[0] + len(at)))
