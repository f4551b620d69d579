"""Nodes with real processes: ranks start, end and leave nothing, whatever is killed or stopped."""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.node_groups import (
    QUICK,
    Cluster,
    ended,
    kill,
    last_pulse,
    seconds_until,
)
from tests.support.processes import LONG, is_alive, wait_until

from phalanx.cluster.link.messages import (
    Ended,
    Kill,
    Launch,
    Message,
    NodeOrder,
    RankLaunch,
    Signal,
    Stacks,
    Started,
)
from phalanx.cluster.node_process.output import OutputWindow
from phalanx.cluster.node_process.ranks import Ranks
from phalanx.runtime import EventLoop, Launcher, procfs

Make = Callable[..., Cluster]
SOON = 5.0  # seconds for what takes a tenth of one on an idle machine


def helper(cluster: Cluster, what: str) -> int:
    """Return the pid of that helper of node 0; 0 for none."""
    node = cluster.engine.pid_of(0)
    for pid, task in procfs.read_all().items():
        if task.parent == node and what in procfs.command(pid):
            return pid
    return 0


def test_the_end_of_a_rank_is_told_with_its_exit_code(cluster: Cluster) -> None:
    cluster.start(0, "leave", "3", ranks=(0, 1))
    cluster.start(0, "leave", "0", ranks=(2,))

    ends = [ended(cluster.told.wait("Ended", 0, count)[0]) for count in (1, 2, 3)]

    assert {end.rank: end.code for end in ends} == {0: 3, 1: 3, 2: 0}
    names = [what for what, *_ in cluster.told.all]
    assert names.index("Started") < names.index("Ended")


def test_a_rank_is_told_as_ended_when_all_that_came_from_it_is_gone(
    cluster: Cluster, tmp_path: Path
) -> None:
    before = cluster.processes(0).keys()
    cluster.start(0, "scatter", str(tmp_path / "there"))
    wait_until((tmp_path / "there").exists)
    assert len(cluster.processes(0)) >= len(before) + 4

    cluster.owner.send(0, Kill(rank=0, incarnation=1))
    end, _ = cluster.told.wait("Ended", 0)

    assert ended(end).signal == signal.SIGKILL
    assert ended(end).rusage["ru_maxrss"] > 0
    zygote = helper(cluster, "zygote")  # which came with the first launch
    assert cluster.processes(0).keys() == before | {zygote}


def test_orders_for_an_earlier_incarnation_do_nothing(cluster: Cluster, tmp_path: Path) -> None:
    (pid,) = cluster.start(0, "tell", str(tmp_path / "there"), incarnation=2)
    wait_until((tmp_path / "there").exists)  # a signal before that is not its own

    cluster.owner.send(0, Kill(rank=0, incarnation=1))
    cluster.owner.send(0, Stacks(rank=0, incarnation=2))
    stacks, _ = cluster.told.wait("StackText", 0)
    assert f"thread {pid} (" in stacks.text
    cluster.owner.send(0, Signal(rank=0, incarnation=2, signal=signal.SIGTERM))
    end, _ = cluster.told.wait("Ended", 0)

    assert (ended(end).incarnation, ended(end).signal) == (2, signal.SIGTERM)


def test_a_node_has_descriptors_for_more_ranks_than_its_soft_limit_allows_which_these_have(
    cluster_of: Make,
) -> None:
    few = ("sh", "-c", 'ulimit -Sn 64; exec "$@"', "sh")
    cluster = cluster_of(prefix=lambda _: few)
    cluster.open(1)

    cluster.start(0, "files", ranks=tuple(range(16)))  # each takes four while it is started

    cluster.told.wait("Ended", 0, 16)
    assert {ended(end).code for end, _ in cluster.told.of("Ended", 0)} == {64}


def test_what_a_node_at_its_limit_of_threads_has_to_do_is_done_when_there_is_one(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: queue.Queue[Message] = queue.Queue()
    ranks = Ranks(launcher, told.put, str, OutputWindow(1.0))
    wanted, start = {"phalanx-launch", "phalanx-reap"}, threading.Thread.start

    def refuse_first(thread: threading.Thread) -> None:
        if thread.name in wanted:
            wanted.remove(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse_first)
    ranks.launch(launch_of("leave", 1))

    assert isinstance(told.get(timeout=LONG), Started)
    assert ended(told.get(timeout=LONG)).code == 0
    assert not wanted


class Devices:
    """Stands for `NodeDevices`; gives none back while the next incarnation may lease them.

    Attributes:
        did: What has been done for which incarnation.
    """

    def __init__(self) -> None:
        self.did: list[tuple[str, int]] = []
        self._is_leased_again = threading.Event()

    def lease(self, ranks: Sequence[RankLaunch], *_how: object) -> dict[int, Any]:
        self.did.append(("lease", ranks[0].incarnation))
        if ranks[0].incarnation > 1:
            self._is_leased_again.set()
        return {}

    def give_back(self, rank: int, incarnation: int, pid: int | None) -> None:
        self._is_leased_again.wait(0.3)
        self.did.append(("give back", incarnation))


def test_a_rank_is_started_anew_once_the_devices_of_the_one_before_it_are_given_back(
    launcher: Launcher,
) -> None:
    told: queue.Queue[Message] = queue.Queue()
    ranks: Any = Ranks(launcher, told.put, str, OutputWindow(1.0))
    ranks._devices = devices = Devices()
    ranks.launch(launch_of("stay", 1))
    assert isinstance(told.get(timeout=LONG), Started)

    ranks.signal(Kill(rank=0, incarnation=1))
    ranks.launch(launch_of("leave", 2))

    incarnations = {1, 2}
    while incarnations:
        if isinstance(end := told.get(timeout=LONG), Ended):
            incarnations.remove(end.incarnation)
    assert devices.did[:3] == [("lease", 1), ("give back", 1), ("lease", 2)]


def launch_of(entry: str, incarnation: int) -> Launch:
    """Return the order to launch rank 0."""
    rank = RankLaunch(
        rank=0,
        incarnation=incarnation,
        entry=f"tests.support.node_ranks:{entry}",
        label="tp/0",
        payload=b"0",
    )
    return Launch(number=incarnation, ranks=(rank,))


def test_a_launch_that_fails_is_told_and_leaves_nothing_as_is_one_of_a_rank_that_runs(
    cluster: Cluster,
) -> None:
    rank = RankLaunch(rank=0, incarnation=1, entry="tests.support.node_ranks:stay", label="tp/0")

    cluster.owner.send(0, Launch(number=7, ranks=(rank,), preload=("no_such_module",)))

    failure, _ = cluster.told.wait("NotStarted", 0)
    assert failure.number == 7
    assert "no_such_module" in failure.error
    assert cluster.start(0, "stay")
    cluster.owner.send(0, Launch(number=8, ranks=(replace(rank, incarnation=2),)))
    failure, _ = cluster.told.wait("NotStarted", 0, 2)
    assert "runs here already" in failure.error
    cluster.owner.send(0, Kill(rank=0, incarnation=1))
    assert cluster.start(0, "stay", incarnation=2)  # once nothing is left of the first


@pytest.mark.parametrize("with_agent", [False, True])
def test_nothing_is_left_of_a_node_whose_process_is_killed(
    cluster_of: Make, tmp_path: Path, *, with_agent: bool
) -> None:
    cluster = cluster_of(agents=with_agent)
    cluster.open(1)
    cluster.start(0, "scatter", str(tmp_path / "there"), ranks=(0, 1))
    wait_until(lambda: len(cluster.processes(0)) >= 11)  # with guardian and zygote

    starter = cluster.engine.starters[0]
    victims = [starter.pid, *([starter.agent] if with_agent else [])]
    at = time.monotonic()
    for victim in victims:
        os.kill(victim, signal.SIGKILL)

    nothing_left = seconds_until(lambda: not cluster.processes(0), at)
    _, lost_at = cluster.told.wait("lost", 0)
    why, _ = cluster.told.wait("fenced", 0)
    cluster.told.wait("admitted", 1)
    assert nothing_left < SOON
    assert lost_at - at < SOON
    assert ("its lease is over" if with_agent else "its process has ended: killed") in why


@pytest.mark.parametrize("guardian", ["first", "replaced"])
def test_a_node_process_that_is_stopped_for_long_ends_with_its_ranks_when_its_lease_is_over(
    cluster: Cluster, tmp_path: Path, guardian: str
) -> None:
    """By its guardian, which knows the lease: the process itself cannot."""
    cluster.start(0, "pulse", str(tmp_path / "pulse"))
    if guardian == "replaced":
        first = helper(cluster, "guardian")
        kill(first)
        wait_until(lambda: helper(cluster, "guardian") not in (0, first))

    at = kill(cluster.engine.pid_of(0), signal.SIGSTOP)

    cluster.told.wait("suspected", 0)
    cluster.told.wait("lost", 0)
    _, fenced_at = cluster.told.wait("fenced", 0)
    last = last_pulse(tmp_path / "pulse")
    assert at < last <= at + QUICK.lease + 1.0
    assert last < fenced_at
    assert cluster.processes(0) == {}


def test_nodes_end_with_the_gateway_and_others_take_their_place(cluster_of: Make) -> None:
    cluster = cluster_of()
    cluster.open(2)
    pids = [*cluster.start(0, "stay"), *cluster.start(1, "stay", ranks=(1,))]
    old = cluster.gateway.pid
    assert old is not None

    at = kill(old)

    nothing_left = seconds_until(lambda: not any(map(is_alive, pids)), at)
    cluster.told.wait("admitted", 2)
    cluster.told.wait("admitted", 3)
    assert cluster.gateway.pid != old
    assert nothing_left < SOON
    assert cluster.start(2, "stay")


def test_a_driver_that_is_busy_for_two_leases_loses_no_node(
    cluster: Cluster, loop: EventLoop
) -> None:
    (pid,) = cluster.start(0, "stay")

    loop.call(lambda: time.sleep(2 * QUICK.lease))  # what is tested is that this much passes

    cluster.owner.send(0, Stacks(rank=0, incarnation=1))
    cluster.told.wait("StackText", 0)
    assert cluster.told.of("lost") == []
    assert is_alive(pid)


def test_a_gateway_that_is_stopped_ends_its_nodes_by_their_leases_and_is_replaced(
    cluster: Cluster, tmp_path: Path
) -> None:
    cluster.start(0, "pulse", str(tmp_path / "pulse"))
    old = cluster.gateway.pid
    assert old is not None

    at = kill(old, signal.SIGSTOP)

    _, fenced_at = cluster.told.wait("fenced", 0)
    assert last_pulse(tmp_path / "pulse") <= at + QUICK.lease + 1.0
    assert last_pulse(tmp_path / "pulse") < fenced_at
    cluster.told.wait("admitted", count=2)
    assert cluster.gateway.pid != old


def test_a_node_with_the_key_of_another_gateway_does_not_speak_to_this_one_and_ends_by_itself(
    cluster_of: Make,
) -> None:
    def edit(order: NodeOrder) -> NodeOrder:
        return replace(order, gateway_key="rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7")

    cluster = cluster_of(replace(QUICK, join=6.0), edit=edit)
    cluster.gateway.open()
    cluster.owner.want(1)

    why, _ = cluster.told.wait("refused")

    assert why == "its handshake is not one of this group"
    wait_until(lambda: cluster.engine.told or len(cluster.engine.starters) > 1)
    wait_until(lambda: not cluster.processes(0))
    assert cluster.told.of("admitted") == []
