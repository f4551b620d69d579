"""Nodes in namespaces: a machine that is cut off, or that is gone at once."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.support.node_groups import QUICK, Cluster, kill, last_pulse, seconds_until
from tests.support.processes import wait_until
from tests.support.relayed_links import free_port, ip, namespace

from phalanx.cluster.nodes.lease import over_at
from phalanx.runtime import EventLoop, Zmq, procfs
from phalanx.runtime.process.launcher import Launcher

LEASE = QUICK.lease
SLACK = 3.0  # seconds that a loaded machine may take for what is due
# The node is not the init of its pid namespace, which SIGKILL from inside does not reach.
MACHINE = ("unshare", "--pid", "--fork", "--mount-proc", "sh", "-c", '"$@"; exit $?', "init")


@pytest.fixture
def machine(loop: EventLoop, launcher: Launcher) -> Iterator[tuple[Cluster, str]]:
    """A cluster whose first machine is a namespace, and the cable to that."""
    with namespace() as (name, cable, here, _):
        prefix = ("ip", "netns", "exec", name, *MACHINE)
        options = Zmq(bind=f"tcp://{here}:{free_port()}")
        with contextlib.closing(
            Cluster(
                loop,
                launcher,
                options=options,
                prefix=lambda slot: () if slot else prefix,
            )
        ) as cluster:
            cluster.open(1)
            yield cluster, cable


def test_a_machine_that_is_cut_off_ends_its_ranks_before_they_may_start_elsewhere(
    machine: tuple[Cluster, str],
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    cluster, cable = machine
    greeting, _ = cluster.told.wait("admitted", 0)
    assert greeting.address.startswith("10.")
    cluster.start(0, "pulse", str(tmp_path / "pulse"), ranks=(0,))
    wait_until(lambda: last_pulse(tmp_path / "pulse"))

    cluster.engine.cut_off(0)  # its starter would be cut off too
    ip("link", "set", cable, "down")
    cut_at = time.monotonic()

    _, lost_at = cluster.told.wait("lost", 0)
    cluster.told.wait("admitted", 1)
    _, fenced_at = cluster.told.wait("fenced", 0)
    last = last_pulse(tmp_path / "pulse")
    assert cut_at < last <= cut_at + LEASE + 1.0
    assert last < fenced_at <= over_at(cut_at, LEASE) + SLACK
    assert cluster.start(1, "stay")
    record_property(
        "last pulse, lost, fenced", [f"{at - cut_at:.2f}" for at in (last, lost_at, fenced_at)]
    )


def test_a_machine_that_is_cut_off_for_half_a_lease_keeps_its_ranks(
    machine: tuple[Cluster, str], tmp_path: Path
) -> None:
    cluster, cable = machine
    cluster.start(0, "pulse", str(tmp_path / "pulse"))

    ip("link", "set", cable, "down")
    time.sleep(LEASE / 2)  # what is tested is that this much passes
    ip("link", "set", cable, "up")

    seen = time.monotonic() + LEASE
    wait_until(lambda: last_pulse(tmp_path / "pulse") > seen)
    assert cluster.told.of("lost") == []


def test_a_machine_that_is_gone_at_once_is_lost_at_once_and_leaves_nothing(
    machine: tuple[Cluster, str],
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    cluster, _ = machine
    cluster.start(0, "scatter", str(tmp_path / "there"))
    wait_until((tmp_path / "there").exists)
    (init,) = children_of(cluster.engine.pid_of(0))

    at = kill(init)

    nothing_left = seconds_until(lambda: not cluster.processes(0), at)
    _, lost_at = cluster.told.wait("lost", 0)
    cluster.told.wait("fenced", 0)
    assert lost_at - at < 2 * SLACK
    assert nothing_left < 2 * SLACK
    record_property("lost, nothing left", [f"{lost_at - at:.3f}", f"{nothing_left:.3f}"])


def children_of(pid: int) -> list[int]:
    return [task.pid for task in procfs.read_all().values() if task.parent == pid]
