"""Nodes on a real Ray: they start, end with whatever is killed, are replaced, and leave nothing."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.node_groups import ended, kill, seconds_until
from tests.support.processes import is_alive, wait_until
from tests.support.ray_cluster import RayCluster
from tests.support.ray_groups import SLOW, RayGroup

from phalanx.cluster.link.messages import Kill
from phalanx.runtime import process_tree
from phalanx.supervision import RuntimeFault

Make = Callable[..., RayGroup]
Machines = Callable[..., RayCluster]
SOON = 10.0  # seconds for what takes one on an idle machine


def spread(group: RayGroup, *numbers: int) -> set[int]:
    """Return the raylets of these nodes."""
    return {group.raylet(number) for number in numbers}


def test_ranks_run_on_two_machines_and_nothing_is_left_at_the_end(
    two_machines: RayCluster, group_of: Make, tmp_path: Path
) -> None:
    before = two_machines.available()
    group = group_of(two_machines, resources={"CPU": 2})
    group.open(2)
    assert "ray" not in sys.modules
    pids = [
        *group.start(0, "scatter", str(tmp_path / "there")),
        *group.start(1, "stay", ranks=(1, 2)),
    ]
    wait_until((tmp_path / "there").exists)
    tags = [f"{group.told.wait('admitted', n)[0].place}/".encode() for n in (0, 1)]

    assert len(spread(group, 0, 1)) == 2
    assert two_machines.available().get("CPU", 0) == before["CPU"] - 4
    group.owner.send(0, Kill(rank=0, incarnation=1))
    end, _ = group.told.wait("Ended", 0)
    assert ended(end).signal == signal.SIGKILL

    broker = group.ray.pid
    assert broker is not None
    group.close()

    assert not any(map(is_alive, [*pids, broker]))
    assert [process_tree.find(process_tree.TreeTarget(tag))[0] for tag in tags] == [{}, {}]
    wait_until(lambda: two_machines.available() == before)
    assert group.told.of("lost") == []


@pytest.mark.parametrize("victim", ["node process", "agent"])
def test_a_node_that_is_killed_is_replaced_on_the_same_machine(
    two_machines: RayCluster, group_of: Make, tmp_path: Path, victim: str
) -> None:
    """There is no other: its bundle is used again, and a new node ends what is left there."""
    group = group_of(two_machines, resources={"CPU": 2})
    group.open(2)
    group.start(0, "scatter", str(tmp_path / "there"))
    wait_until((tmp_path / "there").exists)
    (other,) = group.start(1, "stay", ranks=(1,))

    at = kill(group.agent(0) if victim == "agent" else group.node_process(0))

    nothing_left = seconds_until(lambda: not group.processes(0), at)
    group.told.wait("fenced", 0)
    group.told.wait("admitted", 2)
    assert nothing_left < SOON
    assert len(group.told.of("lost")) == 1
    assert is_alive(other)
    assert group.start(2, "stay")
    assert len(spread(group, 1, 2)) == 2


def test_spares_are_on_machines_of_their_own_and_keep_no_ranks_waiting(
    machines: Machines, group_of: Make
) -> None:
    ray = machines(2)  # with room for two nodes on each
    group = group_of(ray, spare_nodes=1, limits=replace(SLOW, wait=8.0))
    group.gateway.open()

    group.owner.want(3)

    for number in (0, 1):
        group.told.wait("admitted", number)
    assert len(spread(group, 0, 1)) == 2
    group.told.wait("admitted", 2)  # beside another, for there is no other machine
    ray.add("c")
    group.owner.want(4)
    group.told.wait("admitted", 3)
    assert group.raylet(3) not in spread(group, 0, 1, 2)


def test_all_nodes_end_with_the_broker_and_are_counted_once(
    two_machines: RayCluster, group_of: Make
) -> None:
    group = group_of(two_machines)
    group.open(2)
    pids = [*group.start(0, "stay"), *group.start(1, "stay", ranks=(1,))]
    old = group.ray.pid
    assert old is not None

    at = kill(old)

    nothing_left = seconds_until(lambda: not any(map(is_alive, pids)), at)
    group.told.wait("admitted", 2)
    group.told.wait("admitted", 3)
    group.told.wait("fenced", 0)
    group.told.wait("fenced", 1)
    assert nothing_left < SOON
    assert sorted(number for what, number, *_ in group.told.all if what == "lost") == [0, 1]
    assert all("the Ray broker has ended" in why for why, _ in group.told.of("lost"))
    assert group.ray.pid != old
    assert group.start(2, "stay")


@pytest.mark.parametrize("how", ["raylet", "removed", "removed gracefully"])
def test_a_machine_that_is_lost_is_replaced_by_another(
    machines: Machines, group_of: Make, tmp_path: Path, how: str
) -> None:
    ray = machines(0)
    raylets = {ray.add(name): name for name in "abc"}
    group = group_of(ray, resources={"CPU": 2})
    group.open(2)
    group.start(0, "scatter", str(tmp_path / "there"))
    wait_until((tmp_path / "there").exists)
    (other,) = group.start(1, "stay", ranks=(1,))
    raylet = group.raylet(0)

    at = time.monotonic()
    if how == "raylet":
        os.kill(raylet, signal.SIGKILL)
    else:
        ray.remove(raylets[raylet], graceful="gracefully" in how)

    nothing_left = seconds_until(lambda: not group.processes(0), at)
    group.told.wait("fenced", 0)
    group.told.wait("admitted", 2)
    assert nothing_left < SOON
    assert is_alive(other)
    assert group.start(2, "stay")
    assert not spread(group, 1, 2) & {raylet}
    assert len(group.told.of("lost")) == 1


def test_nodes_end_with_the_head_of_ray_and_the_driver_goes_on(
    machines: Machines, group_of: Make
) -> None:
    quick = {"RAY_gcs_rpc_server_reconnect_timeout_s": "5"}  # Ray's own is a minute
    ray = machines(1, **quick)
    group = group_of(ray)
    group.open(1)
    (pid,) = group.start(0, "stay")

    at = kill(ray.head)

    why, told_at = group.told.wait("engine_gone")
    _, lost_at = group.told.wait("lost", 0)
    assert f"Ray's head at {ray.address} is not reached" in why
    assert told_at - at < 4.0 < lost_at - at
    group.told.wait("fenced", 0)
    wait_until(lambda: not is_alive(pid))
    assert len(group.told.of("lost")) == 1
    assert group.told.of("failed") == []


def test_gpus_and_variables_reach_the_ranks_and_a_node_that_is_released_gives_them_back(
    two_machines: RayCluster, group_of: Make, tmp_path: Path
) -> None:
    environment = {"env_vars": {"WORD": "from Ray"}}
    group = group_of(two_machines, gpus_per_rank=0.5, ranks_per_node=None, runtime_env=environment)
    assert group.cluster.ranks_per_node == 2
    group.open(1)
    group.start(0, "tell", str(tmp_path / "word"))
    wait_until((tmp_path / "word").exists)

    assert (tmp_path / "word").read_text() == "from Ray"
    assert two_machines.available()["GPU"] == 1
    group.owner.want(0)
    group.owner.leave(0)
    wait_until(lambda: two_machines.available()["GPU"] == 2)


def test_resources_that_no_machine_has_are_told_with_what_there_is(
    two_machines: RayCluster, group_of: Make
) -> None:
    group = group_of(
        two_machines, limits=replace(SLOW, wait=8.0), resources={"CPU": 64, "teapot": 1}
    )
    group.gateway.open()

    group.owner.want(1)

    error, _ = group.told.wait("failed")
    assert "no machine in 8 s: a node needs CPU 64, teapot 1, and Ray has: " in str(error)
    assert "CPU 2, GPU 1" in str(error)


def test_a_node_that_cannot_be_prepared_is_given_up_after_three(
    two_machines: RayCluster, group_of: Make
) -> None:
    group = group_of(two_machines, runtime_env={"working_dir": "https://127.0.0.1:9/code.zip"})
    group.gateway.open()

    group.owner.want(1)

    error, _ = group.told.wait("failed")
    assert "3 nodes in a row have not joined" in str(error)


@pytest.mark.parametrize("address", ["127.0.0.1:9", "auto"])
def test_no_cluster_is_told_at_once(
    two_machines: RayCluster, group_of: Make, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    monkeypatch.setattr(two_machines, "address", address)
    monkeypatch.setitem(two_machines.environment, "RAY_ADDRESS", "127.0.0.1:9")

    with pytest.raises(RuntimeFault, match=rf"Ray at address='{address}': ConnectionRefused"):
        group_of(two_machines)


def test_a_wrong_token_is_told(machines: Machines, group_of: Make) -> None:
    ray = machines(0, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="x" * 40)
    ray.environment["RAY_AUTH_TOKEN"] = "y" * 40

    with pytest.raises(RuntimeFault, match="Ray at address="):
        group_of(ray)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            {"runtime_env": {"working_dir": "/no/such/folder"}},
            "/no/such/folder must be an existing directory",
        ),
        ({"ranks_per_node": None}, r"cluster\.ranks_per_node has to be given"),  # without GPUs
        ({"resources": {"CPU": 0}}, r"by cluster\.resources a node reserves nothing"),
    ],
)
def test_what_no_node_could_be_started_with_is_told_at_once(
    two_machines: RayCluster, group_of: Make, options: dict[str, Any], told: str
) -> None:
    with pytest.raises(RuntimeFault, match=told):
        group_of(two_machines, **options)
