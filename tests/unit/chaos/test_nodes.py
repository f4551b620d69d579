"""Nodes in chaos runs: how their faults are drawn and refused, and what histories say of them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.histories import Teller, whole
from tests.support.processes import wait_until

from phalanx.chaos import FAULTS, Chaos, NodeNetwork, Schedule
from phalanx.chaos.history.events import (
    CallBegan,
    FaultInjected,
    GroupDown,
    RankDied,
    RankExited,
    RankRan,
)
from phalanx.chaos.history.journal import read_history
from phalanx.chaos.nemesis.catalog import FaultPattern
from phalanx.cluster import Ray
from phalanx.supervision import SpecError

NODES = ("node", "agent", "freeze")
NETWORKS = ("cut", "cut_in", "cut_out", "delay")
LOST = "unresponsive (node {} (host-{}) was lost: silent for 3.0 s)"


class Cut(Ray):
    def disturb(self, node: int, inward: float, outward: float) -> Callable[[], object]:
        return list


# --- faults -------------------------------------------------------------------------------


def test_a_fault_of_nodes_is_refused_without_nodes_and_a_cut_without_a_network_to_disturb() -> None:
    plain, cut = Ray(ranks_per_node=1), Cut(ranks_per_node=1)

    def refused(cluster: object) -> list[str]:
        return [name for name in FAULTS if FAULTS[name].refusal_of(cluster)]

    assert isinstance(cut, NodeNetwork)
    assert (refused(None), refused(plain), refused(cut)) == ([*NODES, *NETWORKS], [*NETWORKS], [])
    for name in NODES + NETWORKS:
        refusal = FAULTS[name].refusal_of(None)
        assert refusal is not None
        assert (refusal.field, refusal.value) == ("faults", name)
        assert "cluster=" in refusal.remedy


@pytest.mark.parametrize("name", NETWORKS)
def test_a_cut_that_a_killed_driver_would_not_end_is_refused(name: str) -> None:
    with pytest.raises(SpecError, match="would outlive a driver") as caught:
        Chaos(faults=(f"{name}:0", "kill:driver"), duration=60.0, rate=1.0, seed=1)

    assert (caught.value.field, caught.value.value) == ("faults", name)


@pytest.mark.parametrize("lease", [1.0, 3.0, 10.0])
def test_a_drawn_cut_may_be_shorter_and_longer_than_a_lease(lease: float) -> None:
    patterns = [FaultPattern(name) for name in ("cut", "freeze")]
    drawn = Schedule.draw(5, duration=100.0, rate=1.0, patterns=patterns)

    seconds = [each.seconds for each in drawn]
    assert all(0.3 < each <= 20.0 for each in seconds)
    assert min(seconds) < lease < max(seconds)


# --- what ranks say of themselves ---------------------------------------------------------


def ran(teller: Teller, incarnation: int, since: float, seconds: float, rank: int = 0) -> None:
    who = {"group": "g", "rank": rank, "incarnation": incarnation, "epoch": incarnation}
    teller.add(RankRan, **who, at=since, pid=100 + incarnation, seconds=seconds)


RUNS = st.lists(
    st.tuples(st.floats(0.001, 10.0), st.floats(0.0, 10.0)), min_size=2, max_size=8
)  # seconds before each, and of it


@given(runs=RUNS)
def test_incarnations_that_follow_one_another_have_not_run_at_once(
    runs: list[tuple[float, float]],
) -> None:
    teller, at = whole(), 0.0
    for incarnation, (gap, seconds) in enumerate(runs, 1):
        ran(teller, incarnation, at + gap, seconds)
        ran(teller, incarnation, at + gap, seconds, rank=1)  # other ranks may
        at += gap + seconds

    assert "one_incarnation" not in teller.broken()


@given(runs=RUNS, data=st.data(), more=st.floats(0.01, 30.0))
def test_an_incarnation_that_outlives_the_start_of_a_later_one_is_found(
    runs: list[tuple[float, float]], data: st.DataObject, more: float
) -> None:
    late = data.draw(st.integers(0, len(runs) - 2))
    teller, at = whole(), 0.0
    for number, (gap, seconds) in enumerate(runs):
        length = seconds + 0.1
        longer = length + runs[number + 1][0] + more if number == late else length
        ran(teller, number + 1, at + gap, longer)
        at += gap + length

    assert "one_incarnation" in teller.broken()


@pytest.mark.parametrize(
    ("fault", "since", "seconds", "new", "end", "is_broken"),
    [
        ("freeze", 2.0, 5.0, 6.0, 7.1, False),  # replaced meanwhile, and thawed
        ("freeze", 2.0, 5.0, 7.1, 7.2, False),  # about to end, as it is thawed
        ("freeze", 2.0, 5.0, 6.0, 9.5, True),  # goes on, thawed
        ("freeze", 2.0, 0.5, 6.0, 7.1, True),  # had been thawed long before
        ("freeze", 7.0, 5.0, 6.0, 7.1, True),  # was frozen too late for that
        ("cut", 2.0, 5.0, 6.0, 7.1, True),
    ],
)
def test_what_was_frozen_may_end_when_it_is_thawed(
    fault: str, since: float, seconds: float, new: float, end: float, is_broken: bool
) -> None:
    teller = whole()
    ran(teller, 1, 1.0, end - 1.0)
    ran(teller, 2, new, 5.0)
    who = {"group": "g", "rank": 0, "incarnation": 1, "node": 0}
    what = {"number": 1, "fault": fault, "target": "0", "seconds": seconds}
    teller.add(FaultInjected, at=since, **who, **what)

    assert ("one_incarnation" in teller.broken()) is is_broken


BEATING = """
import sys, time
from pathlib import Path
from types import SimpleNamespace
from phalanx.chaos.instrumentation.worker_probe import WorkerProbe

probe = WorkerProbe(Path(sys.argv[1]), "g", 0, 1, True)
probe.woke(SimpleNamespace(rendezvous=None, epoch=1), kept=False)
probe.woke(SimpleNamespace(rendezvous=None, epoch=2), kept=True)
time.sleep(1000)
"""


def test_a_rank_on_a_node_writes_until_it_is_killed_that_it_runs(tmp_path: Path) -> None:
    def runs() -> list[RankRan]:
        return list(read_history(tmp_path).every(RankRan))

    with subprocess.Popen([sys.executable, "-c", BEATING, str(tmp_path)]) as worker:
        try:
            wait_until(lambda: any(each.seconds > 0.1 for each in runs()))
        finally:
            worker.kill()

    (one,) = runs()
    assert (one.rank, one.incarnation, one.epoch, one.pid) == (0, 1, 1, worker.pid)


# --- what a driver says of nodes that are lost --------------------------------------------


def lose(teller: Teller, node: int, *ranks: int, stopped: tuple[int, ...] = ()) -> None:
    for rank in ranks:
        who = {**teller.who(rank), "pid": teller.pid(rank), "reason": LOST.format(node, node)}
        teller.add(RankExited, **who)
    for rank in ranks:
        who = {**teller.who(rank), "pid": teller.pid(rank), "reason": LOST.format(node, node)}
        teller.add(RankDied, **who, decision="restart ranks")
    teller.add(GroupDown, group="g", epoch=teller.epoch, cause="a node was lost")
    for rank in stopped:
        teller.add(RankExited, **teller.who(rank), pid=teller.pid(rank), reason="shutdown")


@pytest.mark.parametrize(("node", "is_broken"), [(0, False), (1, True)])
def test_the_loss_of_a_node_is_one_death_and_that_of_two_is_not(node: int, is_broken: bool) -> None:
    teller = whole(4, intensity=1)
    lose(teller, 0, 0, 1, stopped=() if is_broken else (2, 3))
    if is_broken:
        lose(teller, node, 2, 3)
    teller.start(0, 1, 2, 3)
    teller.close()

    assert ("intensity" in teller.broken()) is is_broken


def test_a_call_may_fail_with_the_death_of_another_rank_of_its_node() -> None:
    teller = whole(4, strategy="one_for_one")
    call = teller.issue(shape="single", rank=1)
    teller.begin(call, teller.send(call, 1), 1)
    lose(teller, 0, 0, 1)
    teller.settle(call, "died", deaths=((0, 1),))
    teller.start(0, 1, meets=False, new_epoch=False)
    teller.close()

    assert teller.broken() == set()


def test_a_rank_of_a_lost_node_may_run_until_it_is_fenced() -> None:
    teller = whole()
    call = teller.issue()
    wire = teller.send(call)
    old = [teller.who(rank) for rank in (0, 1)]
    lose(teller, 0, 0, 1)
    teller.settle(call, "died", deaths=((0, 1),))
    for who in old:
        teller.add(CallBegan, **who, call=call, wire=wire, turn=2)
    teller.start(0, 1)
    teller.close()

    assert teller.broken() == set()
