"""Chaos runs of groups on nodes that are local processes: nodes are killed, frozen and cut off."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.chaos.targets import in_turn
from tests.support.disturbed_nodes import RelayedNodes
from tests.support.node_engine import ONE_ZYGOTE, LocalNodes
from tests.support.processes import LONG
from tests.support.workers import Echo

from phalanx.actors import Executor
from phalanx.chaos import ChaosResult, run_chaos
from phalanx.chaos.history.events import FaultInjected, FaultMissed, RankDied, RankExited, RankRan
from phalanx.runtime import Runtime
from phalanx.supervision import SpecError, Strategy

TIMEOUT = 2.0  # seconds of silence that make a node lost
SHORT, LONGER = 0.5, 6.0  # seconds, of which the one costs no node, and the other costs one
EVERYTHING = ("node", "agent", "freeze", "cut", "cut_in", "cut_out", "delay", "kill", "stop")
LOCAL: dict[str, Any] = {
    "ranks_per_node": 2,
    "spare_nodes": 1,
    "node_timeout": TIMEOUT,
    "node_wait": LONG,
}

pytestmark = pytest.mark.timeout(180)
Run = Callable[..., ChaosResult]


@pytest.fixture
def run(runtime: Runtime) -> Run:
    """Runs chaos in which every invariant has to hold, on nodes with agents that can be cut off."""

    def run(
        *strikes: str,
        seconds: float = SHORT,
        strategy: Strategy = Strategy.ONE_FOR_ALL,
        nodes: LocalNodes | None = None,
        **plan: Any,
    ) -> ChaosResult:
        nodes = nodes or RelayedNodes(**LOCAL, engine_options={"agents": True})
        if strikes:
            plan["schedule"] = in_turn(*strikes, first=0.5, gap=1.2, seconds=seconds)
        result = run_chaos(on(nodes, runtime, strategy=strategy), **plan)
        assert result.ok, result.render()
        return result

    return run


def on(nodes: LocalNodes, runtime: Runtime, **options: Any) -> Callable[[], Executor[Any]]:
    """Return a target of four ranks on *nodes*, two on each."""

    def build() -> Executor[Any]:
        more: dict[str, Any] = {"launch": ONE_ZYGOTE, "devices": "cpu", **options}
        return Executor(Echo, 4, cluster=nodes, runtime=runtime, **more)

    return build


def hit(result: ChaosResult) -> list[tuple[str, int | None]]:
    """Return which faults hit which nodes, in their order, each once."""
    every = [(each.fault, each.node) for each in result.history.every(FaultInjected)]
    return list(dict.fromkeys(every))


@pytest.mark.soak
@pytest.mark.parametrize("seed", [1, 2])
def test_faults_of_nodes_break_no_invariant(run: Run, seed: int) -> None:
    result = run(duration=10.0, rate=0.8, faults=EVERYTHING, targets=("random", "spare"), seed=seed)

    assert result.history.every(RankRan)


def test_each_fault_of_a_node_hits_the_one_of_its_rank(run: Run) -> None:
    gentle = [f"{fault}:2" for fault in ("cut", "cut_in", "cut_out", "delay", "freeze")]
    faults = [*gentle, "agent:0", "node:3"]

    result = run(*faults, duration=10.0)

    assert [fault for fault, _ in hit(result)] == [each.partition(":")[0] for each in faults]
    assert len({node for _, node in hit(result)[: len(gentle)]}) == 1
    hits = [each for each in result.history.every(FaultInjected) if each.fault == "agent"]
    assert [each.rank for each in hits] == [0, 1]
    assert min(each.at for each in result.history.every(RankExited)) > hits[0].at


@pytest.mark.soak
def test_a_node_that_is_frozen_for_longer_than_its_lease_is_replaced_meanwhile(run: Run) -> None:
    result = run("freeze:0", seconds=LONGER, duration=9.0, strategy=Strategy.ONE_FOR_ONE)

    (frozen, _) = result.history.every(FaultInjected)
    runs = {(each.rank, each.incarnation): each for each in result.history.every(RankRan)}
    assert runs.keys() == {(0, 1), (1, 1), (2, 1), (3, 1), (0, 2), (1, 2)}
    for rank in (0, 1):
        assert frozen.at < runs[rank, 2].at < frozen.at + LONGER


@pytest.mark.soak
def test_a_spare_node_is_hit_and_no_rank_dies_of_it(run: Run) -> None:
    result = run("freeze:spare", "node:spare", duration=3.0)

    assert [fault for fault, _ in hit(result)] == ["freeze", "node"]
    assert {each.rank for each in result.history.every(FaultInjected)} == {None}
    assert result.history.every(RankDied) == ()


@pytest.mark.parametrize(
    ("fault", "deaths"),
    [
        ("kill:group", 1),
        pytest.param("stop:1", 0, marks=pytest.mark.soak),
        pytest.param("kill:1", 1, marks=pytest.mark.soak),
    ],
)
def test_signals_reach_ranks_on_nodes(run: Run, fault: str, deaths: int) -> None:
    result = run(fault, nodes=LocalNodes(**LOCAL), duration=2.0)

    assert result.history.every(FaultMissed) == ()
    assert result.deaths >= deaths


def test_a_network_that_cannot_be_disturbed_is_refused(runtime: Runtime) -> None:
    with pytest.raises(SpecError, match="see NodeNetwork"):
        run_chaos(on(LocalNodes(**LOCAL), runtime), duration=2.0, faults=("cut_in",))


def test_an_agent_that_is_the_driver_is_missed(runtime: Runtime) -> None:
    result = run_chaos(on(LocalNodes(**LOCAL), runtime), duration=2.0, faults=("agent",))

    assert result.violations == ()
    assert result.render().endswith("faults could be injected")
    assert {each.why for each in result.history.every(FaultMissed)} == {
        "the driver itself has started the node"
    }
