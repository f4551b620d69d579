"""Chaos runs of groups on machines at the ends of wires, which are cut and slow: none runs twice.

And a node that keeps its lease for longer than its driver thinks is found out.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from tests.support.disturbed_nodes import Machine, WiredNodes, wired_machine
from tests.support.node_engine import ONE_ZYGOTE
from tests.support.processes import LONG
from tests.support.workers import Echo

from phalanx.actors import Executor
from phalanx.chaos import Schedule, ScheduledFault, run_chaos
from phalanx.chaos.history.events import RankDied, RankRan
from phalanx.cluster.link.messages import NodeOrder
from phalanx.runtime import Runtime

FAULTS = ("cut", "cut_in", "cut_out", "delay", "freeze", "node")
TIMEOUT = 2.0  # seconds of silence that make a node lost
CUT = 9.0
TOO_LONG = 7.0  # seconds of a lease; its beats are as frequent as a driver expects that thinks 3

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def machines() -> Iterator[tuple[Machine, ...]]:
    with contextlib.ExitStack() as up:
        yield tuple(up.enter_context(wired_machine()) for _ in range(4))


def on(
    machines: tuple[Machine, ...], runtime: Runtime, timeout: float = TIMEOUT, **engine: Any
) -> Callable[[], Executor[Any]]:
    """Return a target of two ranks on two machines; there is a spare one, and one more."""
    nodes = WiredNodes(
        machines=machines,
        ranks_per_node=1,
        spare_nodes=1,
        node_timeout=timeout,
        node_wait=LONG,
        bind=machines[0].here,
        engine_options=engine,
    )

    def build() -> Executor[Any]:
        more: dict[str, Any] = {"launch": ONE_ZYGOTE, "devices": "cpu"}
        return Executor(Echo, 2, cluster=nodes, runtime=runtime, **more)

    return build


def cut(name: str, seconds: float) -> Schedule:
    return Schedule((ScheduledFault(number=1, at=1.0, fault=name, target="0", seconds=seconds),))


@pytest.mark.soak
def test_cuts_and_delays_break_no_invariant(
    machines: tuple[Machine, ...], runtime: Runtime
) -> None:
    # Of a node that keeps its lease for too long, too, this seed finds out.
    result = run_chaos(on(machines, runtime), duration=15.0, rate=0.4, faults=FAULTS, seed=1)

    assert result.ok, result.render()


@pytest.mark.parametrize("name", [pytest.param("cut_in", marks=pytest.mark.soak), "cut_out"])
def test_a_machine_that_is_cut_off_has_ended_its_rank_before_another_starts(
    machines: tuple[Machine, ...], runtime: Runtime, name: str
) -> None:
    result = run_chaos(on(machines, runtime), duration=CUT, schedule=cut(name, CUT))

    assert result.ok, result.render()
    old, new = (each for each in result.history.every(RankRan) if each.rank == 0)
    assert (old.incarnation, new.incarnation) == (1, 2)
    assert old.at + old.seconds < new.at


@pytest.mark.soak
@pytest.mark.parametrize("name", ["cut_in", "cut_out", "delay"])
def test_a_cut_that_is_shorter_than_the_timeout_kills_no_rank(
    machines: tuple[Machine, ...], runtime: Runtime, name: str
) -> None:
    result = run_chaos(on(machines, runtime), duration=4.0, schedule=cut(name, TIMEOUT / 2))

    assert result.ok, result.render()
    assert result.history.every(RankDied) == ()


def test_a_node_that_keeps_its_lease_for_too_long_is_found(
    machines: tuple[Machine, ...], runtime: Runtime
) -> None:
    def keep(order: NodeOrder) -> NodeOrder:
        return replace(order, lease=TOO_LONG)

    target = on(machines, runtime, 3.0, edit=keep)
    result = run_chaos(target, duration=CUT, schedule=cut("cut", CUT))

    assert result.record is not None
    shutil.rmtree(result.record)
    # Of the rank that was cut off: on a busy machine the other's node may be lost as well.
    found = [each for each in result.violations if each.invariant == "one_incarnation"]
    (found_one,) = [each for each in found if each.message.startswith("rank 0 of ")]
    assert "ran as incarnation 1 and as 2 at once" in found_one.message
    assert [event.kind for event in found_one.events] == ["RankRan", "RankRan"]
