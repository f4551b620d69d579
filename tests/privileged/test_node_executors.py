"""Executors on nodes in namespaces: the network between machines is cut, and nothing runs twice."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.support.disturbed_nodes import INIT
from tests.support.node_engine import ONE_ZYGOTE, LocalNodes
from tests.support.processes import LONG, wait_until
from tests.support.relayed_links import ip, namespace
from tests.support.survivors import Keeper
from tests.support.workers import Echo

from phalanx.actors import Executor, Launch, WorkerContext
from phalanx.cluster import NodeFenced, NodeLost
from phalanx.errors import AddressNotReached, StartFailed
from phalanx.runtime import Runtime

TIMEOUT = 3.0  # seconds of silence that make a node lost


class Pulsing(Keeper):
    """Meets the others, and writes down that it runs, every few milliseconds.

    Args:
        journal: The folder for that: a file for each incarnation.
    """

    def __init__(self, journal: str) -> None:
        super().__init__()
        self.journal = Path(journal)

    def on_start(self, ctx: WorkerContext) -> None:
        super().on_start(ctx)
        file = self.journal / f"{ctx.rank}-{ctx.incarnation}"

        lines = os.open(file, os.O_CREAT | os.O_WRONLY | os.O_APPEND)

        def write() -> None:
            os.write(lines, f"{time.monotonic()}\n".encode())

        def go_on() -> None:
            while True:
                time.sleep(0.003)
                write()

        for _ in range(2):  # before it is ready, for it may be killed at once
            write()
        threading.Thread(target=go_on, daemon=True).start()


@dataclass
class Site:
    """A group whose first node is in a namespace, behind a cable."""

    group: Executor[Any]
    nodes: LocalNodes
    ends: tuple[tuple[str, ...], ...]  # what sets where each end sends its frames
    journal: Path
    told: list[Any]

    def cut(self) -> None:
        self.nodes.engines[0].cut_off(0)  # what started the node there would be cut off too
        for end in self.ends:  # frames are lost; the carrier stays, and so do the kernel's routes
            ip(*end, "lladdr", "02:00:00:00:00:01", "nud", "permanent")

    def heal(self) -> None:
        for end in self.ends:
            ip(*(word.replace("replace", "del") for word in end))

    def runs(self) -> dict[int, list[tuple[float, float]]]:
        """Return when each incarnation of each rank has run: from and to, in their order."""
        found: dict[int, dict[int, tuple[float, float]]] = defaultdict(dict)
        for file in self.journal.iterdir():
            rank, incarnation = map(int, file.name.split("-"))
            times = [float(line) for line in file.read_text().splitlines()[:-1]]
            found[rank][incarnation] = times[0], times[-1]
        return {rank: [runs[each] for each in sorted(runs)] for rank, runs in found.items()}


@pytest.fixture
def site(tmp_path: Path, torch_runtime: Runtime, request: pytest.FixtureRequest) -> Iterator[Site]:
    with namespace() as (name, cable, here, there):
        # Ranks of one machine meet by its address, which takes its loopback interface.
        ip("netns", "exec", name, "ip", "link", "set", "lo", "up")
        prefix = ("ip", "netns", "exec", name, *INIT)
        nodes = LocalNodes(
            ranks_per_node=2,
            spare_nodes=1,
            node_timeout=getattr(request, "param", TIMEOUT),
            bind=here,
            engine_options={"prefix": lambda slot: () if slot else prefix},
        )
        told: list[Any] = []
        journal = tmp_path / "journal"
        journal.mkdir()
        with Executor(
            Pulsing,
            4,
            args=(str(journal),),
            cluster=nodes,
            devices="cpu",
            launch=Launch(preload=("torch",)),
            runtime=torch_runtime,
        ) as group:
            group.subscribe(told.append)
            if not any(0 in each.ranks for each in group.status().nodes if each.node == 0):
                group.resize(6, timeout=LONG)  # the node there has joined last, and is the spare
            ends = (
                ("neigh", "replace", there, "dev", cable),
                ("-n", name, "neigh", "replace", here, "dev", f"{cable[:-1]}b"),
            )
            yield Site(group, nodes, ends, journal, told)


def test_ranks_that_are_cut_off_end_before_others_take_their_place(site: Site) -> None:
    size, epoch = len(site.group.ranks), site.group.status().epoch
    assert site.group.collective_rpc("total", LONG) == [float(size)] * size

    site.cut()
    calls = [site.group.collective_rpc("total", LONG, retries=3, non_block=True) for _ in range(5)]
    assert [call.result(LONG) for call in calls] == [[float(size)] * size] * 5

    (lost,) = [event for event in site.told if isinstance(event, NodeLost)]
    wait_until(lambda: any(isinstance(event, NodeFenced) for event in site.told))
    assert lost.node == 0
    runs = site.runs()
    for rank in lost.ranks:
        old, new = runs[rank]
        assert old[1] < new[0], f"rank {rank} ran twice"
    status = site.group.status()
    assert (status.restarts, status.epoch) == (1, epoch + 1)
    site.heal()
    assert site.group.collective_rpc("total", LONG) == [float(size)] * size


@pytest.mark.soak
@pytest.mark.parametrize("site", [10.0], indirect=True)
def test_a_cut_that_is_shorter_than_the_timeout_costs_time_alone(site: Site) -> None:
    """After it TCP would be silent for longer than the lease lasts."""
    size = len(site.group.ranks)
    before = [each.pid for each in site.group.ranks]

    site.cut()
    call = site.group.collective_rpc("total", LONG, non_block=True)
    time.sleep(8.0)  # what is tested is that this much passes
    site.heal()

    assert call.result(LONG) == [float(size)] * size
    assert [each.pid for each in site.group.ranks] == before
    assert site.group.status().restarts == 0


def one_node(namespace: str, here: str) -> dict[str, Any]:
    """Return the options of a group whose one rank is on a node in that namespace."""
    prefix = ("ip", "netns", "exec", namespace, *INIT)
    nodes = LocalNodes(
        ranks_per_node=1,
        node_timeout=TIMEOUT,
        bind=here,
        engine_options={"slots": 1, "prefix": lambda _slot: prefix},
    )
    return {"cluster": nodes, "devices": "cpu", "launch": ONE_ZYGOTE}


def test_an_argument_that_takes_longer_than_the_timeout_to_cross_loses_no_node(
    runtime: Runtime,
) -> None:
    load = os.urandom(10_000_000)
    with namespace() as (name, cable, here, _):
        rate = ("rate", "8mbit", "burst", "32kb", "latency", "400ms")  # so it takes ten seconds
        subprocess.run(["tc", "qdisc", "add", "dev", cable, "root", "tbf", *rate], check=True)
        given = one_node(name, here)
        with Executor(Echo, 1, args=(load,), runtime=runtime, **given) as group:
            size = group.collective_rpc(lambda worker: len(worker.greeting), LONG)
            assert size == [len(load)]
            assert [node.node for node in group.status().nodes] == [0]  # the first one
            assert group.status().restarts == 0


def test_output_without_end_and_a_large_answer_over_a_slow_wire_lose_no_node(
    runtime: Runtime,
) -> None:
    with namespace() as (name, cable, here, _):
        rate = ("root", "tbf", "rate", "512kbit", "burst", "16kb", "latency", "400ms")
        ip("netns", "exec", name, "tc", "qdisc", "add", "dev", f"{cable[:-1]}b", *rate)
        given = one_node(name, here)
        with Executor(Echo, 1, runtime=runtime, **given) as group:
            group.collective_rpc(_write_without_end, LONG)
            answer = group.collective_rpc(lambda _worker: os.urandom(700_000), 2 * LONG)
            assert len(answer[0]) == 700_000
            assert [node.node for node in group.status().nodes] == [0]  # the first one
            assert group.status().restarts == 0


def _write_without_end(_worker: Any) -> None:
    def write() -> None:
        while True:
            sys.stdout.write("x" * 3000 + "\n")
            sys.stdout.flush()
            time.sleep(0.005)

    threading.Thread(target=write, daemon=True).start()


def test_an_address_that_other_machines_do_not_reach_is_told_with_its_option(
    runtime: Runtime,
) -> None:
    with namespace() as (name, _, _, _):
        ip("netns", "exec", name, "ip", "link", "set", "lo", "up")
        prefix = ("ip", "netns", "exec", name, *INIT)
        nodes = LocalNodes(
            ranks_per_node=1,
            bind="127.0.0.1",  # is another one there
            engine_options={"prefix": lambda _slot: prefix},
        )
        given: dict[str, Any] = {"cluster": nodes, "devices": "cpu", "launch": ONE_ZYGOTE}
        with pytest.raises(StartFailed, match="Connection refused") as failed:
            Executor(Echo, 2, runtime=runtime, **given)

    error = failed.value.__cause__
    assert isinstance(error, AddressNotReached)
    assert error.address.startswith("tcp://127.0.0.1:")
    assert error.address in str(error)
    assert "cluster.bind" in str(error)
