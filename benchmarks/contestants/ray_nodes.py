"""Ray actors on one of two far nodes of Ray; the head, which runs nothing, is beside the driver.

The variant is JSON: ``here`` and the ``addresses`` of two machines, and the ``prefixes`` with which
command lines begin that are to run on these.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import Any

from . import protocol
from .ray_actors import RayActors, ray

_STARTED = 120.0  # seconds
_STORE = 600 << 20  # bytes of each object store
_FAR = "far"  # the resource that far nodes have


class RayNodes(RayActors):
    """Actors that prefer the first of the far nodes, and are started anew wherever one is."""

    def open(self, ranks: int, variant: str) -> None:
        self._where = json.loads(variant)
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}
        os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
        head = {
            "num_cpus": 0,
            "include_dashboard": False,
            "node_ip_address": self._where["here"],
            "object_store_memory": _STORE,
            "temp_dir": str(Path(tempfile.gettempdir()) / "ray"),  # where Ray notes its address
        }
        cluster: Any = import_module("ray.cluster_utils")
        self._cluster = cluster.Cluster(initialize_head=True, head_node_args=head)
        ray.init(
            address=self._cluster.address,
            log_to_driver=False,
            logging_level="ERROR",
            configure_logging=False,
            _node_ip_address=self._where["here"],
        )
        self._complete()
        first = next(each["NodeID"] for each in ray.nodes() if _FAR in each["Resources"])
        near: Any = import_module("ray.util.scheduling_strategies").NodeAffinitySchedulingStrategy
        actor = ray.remote(
            num_cpus=0,
            resources={_FAR: 0.01},
            max_restarts=-1,
            scheduling_strategy=near(first, soft=True),
        )(protocol.Echo)
        self._actors = [actor.remote() for _ in range(ranks)]
        self.works(_STARTED)

    def close(self) -> None:
        ray.shutdown()
        for each in self._nodes.values():
            each.terminate()
        for each in self._nodes.values():
            each.wait(30)
        self._cluster.shutdown()

    def call(self, method: str, *args: Any) -> Any:
        """Call all, or, where *method* begins with ``first.``, the first only."""
        everybody, name = self._actors, method.removeprefix("first.")
        self._actors = everybody[:1] if name != method else everybody
        try:
            return super().call(name, *args)
        finally:
            self._actors = everybody

    def slow(self, seconds: float, notes: str) -> list[str]:
        """Do as all do, once both far nodes are there, and all actors."""
        self._complete()
        deadline = time.monotonic() + _STARTED
        while True:
            try:
                self.works(_STARTED)
            except ray.exceptions.RayError:  # one that is being started anew
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
            else:
                return super().slow(seconds, notes)

    def _complete(self) -> None:
        """Start the far nodes whose processes have ended, one by one: they share a folder."""
        for address, prefix in zip(self._where["addresses"], self._where["prefixes"], strict=True):
            if address in self._nodes and self._nodes[address].poll() is None:
                continue
            words = [
                *prefix,
                str(Path(sys.executable).with_name("ray")),
                *("start", "--block", f"--address={self._cluster.address}", "--num-cpus=4"),
                *(f"--node-ip-address={address}", f'--resources={{"{_FAR}": 1}}'),
                *(f"--object-store-memory={_STORE}", "--min-worker-port=0", "--max-worker-port=0"),
            ]
            self._nodes[address] = subprocess.Popen(words, stdout=sys.stderr)
            deadline = time.monotonic() + _STARTED
            while address not in {n["NodeManagerAddress"] for n in ray.nodes() if n["Alive"]}:
                if time.monotonic() > deadline:
                    message = f"the node of Ray at {address} did not come up"
                    raise TimeoutError(message)
                time.sleep(0.1)


def make() -> RayNodes:
    """Return the contestant."""
    return RayNodes()
