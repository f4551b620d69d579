"""The rules of supervision hold in random worlds (`random_worlds` checks them as they go)."""

from __future__ import annotations

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.random_worlds import World, end, live, random_spec

from phalanx.supervision import Intensity

worlds = st.integers(0, 2**48)


@settings(max_examples=300)
@given(seed=worlds, steps=st.integers(0, 120))
def test_a_world_keeps_the_rules_and_comes_to_rest(seed: int, steps: int) -> None:
    random = Random(seed)
    world = World(random, random_spec(random))

    live(world, steps)

    assert world.pending == set(), "every request is answered"
    assert world.machine.is_idle


@settings(max_examples=200)
@given(seed=worlds, steps=st.integers(0, 80))
def test_a_stopped_world_has_ended_and_has_no_children(seed: int, steps: int) -> None:
    random = Random(seed)
    world = World(random, random_spec(random))
    for _ in range(steps):
        world.step()

    end(world)

    assert world.machine.ended is not None
    assert world.over
    assert world.pending == set()
    assert [p for p in world.alive() if not p.killed] == []


@settings(max_examples=300)
@given(
    limit=st.integers(0, 6),
    period=st.floats(0.1, 10),
    gaps=st.lists(st.floats(0, 12), max_size=40),
)
def test_no_window_ever_holds_more_restarts_than_the_intensity(
    limit: int, period: float, gaps: list[float]
) -> None:
    window = Intensity(limit, period).window()
    now, admitted = 0.0, list[float]()
    for gap in gaps:
        now += gap
        after = window.admit(now)
        if after is not None:
            window = after
            admitted.append(now)

    # Any period that ends with an admitted restart, both ends counted.
    for last in admitted:
        inside = [at for at in admitted if at <= last and last - at <= period]
        assert len(inside) <= limit
