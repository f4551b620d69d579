"""A machine in namespaces that joins as a pod does: its command is the init there."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import pytest
from tests.privileged.test_node_executors import Pulsing
from tests.support.joining_nodes import NodeCommand, Site
from tests.support.processes import LONG, wait_until
from tests.support.relayed_links import ip, namespace
from tests.support.workers import Echo

from phalanx.actors import Launch
from phalanx.cluster import NodeFenced, NodeLost
from phalanx.runtime import Runtime, procfs

POD = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")


def zombies(pod: NodeCommand) -> list[procfs.Task]:
    inside = pod.processes()
    every = procfs.read_all().values()
    return [task for task in every if task.state == "Z" and task.parent in inside]


@pytest.mark.soak
def test_a_pod_joins_again_after_its_node_was_killed_and_ends_its_ranks_when_it_is_cut_off(
    tmp_path: Path, torch_runtime: Runtime
) -> None:
    journal = tmp_path / "journal"
    journal.mkdir()
    with namespace() as (name, cable, here, _), contextlib.closing(Site(tmp_path, here)) as site:
        ip("netns", "exec", name, "ip", "link", "set", "lo", "up")
        pod = site.join(prefix=("ip", "netns", "exec", name, *POD))
        group = site.group(
            Pulsing,
            1,
            torch_runtime,
            args=(str(journal),),
            spare_nodes=1,
            launch=Launch(preload=("torch",)),
        )

        site.lose(pod)
        assert group.collective_rpc("total", LONG, retries=3) == [1.0]
        wait_until(lambda: not zombies(pod), "the collection of what the node has left")
        site.join()
        wait_until(lambda: [each.state for each in group.status().nodes] == ["up", "up"])
        ip("link", "set", cable, "down")

        assert group.collective_rpc("total", LONG, retries=3) == [1.0]
        wait_until(lambda: len(site.of(NodeFenced)) == 2)
        assert [each.ranks for each in site.of(NodeLost)] == [(0,), (0,)]
        wait_until(lambda: pod.node_process() is None, "the end of the node that is cut off")
        assert pod.process.poll() is None  # it waits for the driver
        runs = {int(file.name.partition("-")[2]): file for file in journal.iterdir()}
        times = [[float(line) for line in runs[n].read_text().splitlines()[:-1]] for n in (1, 2, 3)]
        assert times[0][-1] < times[1][0]
        assert times[1][-1] < times[2][0]


def test_a_pod_that_is_ended_ends_its_node_and_says_so(tmp_path: Path, runtime: Runtime) -> None:
    with contextlib.closing(Site(tmp_path)) as site:
        pod = site.join(prefix=POD)
        group = site.group(Echo, 1, runtime)
        group.collective_rpc("grandchild", kwargs={"daemon": True})
        outer = pod.process.pid
        init = Path(f"/proc/{outer}/task/{outer}/children").read_text()

        os.kill(int(init), signal.SIGTERM)

        assert pod.ended() == 130
