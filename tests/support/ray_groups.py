"""For tests of Ray as the engine: an owner and a gateway whose nodes are on a real Ray."""

from __future__ import annotations

from typing import Any

from tests.support.node_groups import QUICK, NodeGroup

from phalanx.cluster.nodes.decide import NodeLimits
from phalanx.cluster.ray.options import Ray
from phalanx.runtime import EventLoop, Launcher, Zmq, process_tree, procfs

EVENT_TIMEOUT = 150.0  # seconds
SLOW = NodeLimits(lease=QUICK.lease, wait=120.0, join=60.0, leave=30.0)
"""Limits for a machine on which Ray starts a process in ten seconds."""


class RayGroup(NodeGroup):
    """Nodes on a Ray."""

    def __init__(
        self,
        loop: EventLoop,
        launcher: Launcher,
        address: str,
        limits: NodeLimits = SLOW,
        gpus_per_rank: float = 0,
        **options: Any,
    ) -> None:
        options = {"ranks_per_node": 1, **options}
        self.ray = Ray(address=address, **options).engine(loop, gpus_per_rank=gpus_per_rank)
        self.cluster = self.ray.open()
        host = Zmq(bind=f"tcp://{self.cluster.address}")
        super().__init__(loop, launcher, self.ray, limits, host, event_timeout=EVENT_TIMEOUT)

    def processes(self, number: int) -> dict[int, Any]:
        greeting, _ = self.told.wait("admitted", number)
        tag = process_tree.TreeTarget(f"{greeting.place}/".encode())
        return dict(process_tree.find(tag)[0])

    def node_process(self, number: int) -> int:
        """Return the pid of the node process."""
        there = self.processes(number)
        (pid,) = (pid for pid in there if "node_process.main" in procfs.command(pid))
        return pid

    def agent(self, number: int) -> int:
        """Return the pid of Ray's worker that has started it."""
        return _parent(self.node_process(number))

    def raylet(self, number: int) -> int:
        """Return the pid of the raylet that has started that."""
        return _parent(self.agent(number))


def _parent(pid: int) -> int:
    task = procfs.read(pid)
    assert task is not None
    return task.parent
