"""A Ray cluster of several nodes on this machine, owned by a program beside the tests.

Run as a program it obeys JSON lines: it adds and removes nodes, and says what Ray knows.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

from phalanx.runtime import procfs

ROOT = Path(__file__).parents[2]
_STORE = 80 << 20  # bytes of an object store, the least that Ray takes; nothing is put into it


class RayCluster:
    """Ray's head, which runs nothing, and the nodes that are added.

    Attributes:
        environment: What a driver needs to reach it, and no other.
        address: Of its head.
    """

    def __init__(self, folder: Path, **environment: str) -> None:
        home = tempfile.mkdtemp(prefix="r", dir="/tmp")  # socket paths are short
        self.environment = {
            "HOME": str(folder),  # a token that lies about in another would switch checks on
            "RAY_TMPDIR": home,
            "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0",
            "PYTHONPATH": str(ROOT),
            **environment,
        }
        # Those of the tests hide all GPUs; the ones that a node is told to have are not there.
        inherited = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(folder / "ray.log").open("w"),
            env={**inherited, **self.environment},
            cwd=ROOT,
            text=True,
            start_new_session=True,
        )
        self._started: dict[int, procfs.Task] = {}
        self.address = str(self._ask())

    def add(self, name: str, **options: Any) -> int:
        """Add a node with two processors; return the pid of its raylet."""
        raylet = int(self._ask(add=name, options={"num_cpus": 2, **options}))
        tasks = procfs.read_all()
        self._started |= procfs.descendants(tasks, {self._process.pid})
        return raylet

    def remove(self, name: str, *, graceful: bool) -> None:
        self._ask(remove=name, graceful=graceful)

    def available(self) -> dict[str, float]:
        """Return what nobody has reserved."""
        return dict(self._ask(available=True))

    @property
    def head(self) -> int:
        """The pid of Ray's ``gcs_server``."""
        return int(self._ask(head=True))

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        finally:
            for task in self._started.values():  # helpers of Ray's that have lost their raylet
                if procfs.is_same(task):
                    os.kill(task.pid, signal.SIGKILL)
            self._process.wait()
            subprocess.run(["rm", "-rf", self.environment["RAY_TMPDIR"]], check=True)

    def _ask(self, **order: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if order:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
        while line := self._process.stdout.readline():
            if line.startswith("{"):
                return json.loads(line)["answer"]
        raise AssertionError("the program that owns the Ray cluster has ended: see ray.log")


def main() -> None:
    ray: Any = import_module("ray")  # which need not be installed

    def answer(value: Any) -> None:
        print(json.dumps({"answer": value}), flush=True)

    options = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": _STORE}
    cluster: Any = import_module("ray.cluster_utils").Cluster(
        initialize_head=True, head_node_args=options
    )
    nodes: dict[str, Any] = {}
    ray.init(address=cluster.address, log_to_driver=False)
    answer(cluster.address)
    for line in sys.stdin:
        match json.loads(line):
            case {"add": name, "options": options}:
                node = nodes[name] = cluster.add_node(object_store_memory=_STORE, **options)
                answer(node.all_processes["raylet"][0].process.pid)
            case {"remove": name, "graceful": graceful}:
                cluster.remove_node(nodes.pop(name), allow_graceful=graceful)
                answer(True)
            case {"head": _}:
                answer(cluster.head_node.all_processes["gcs_server"][0].process.pid)
            case _:
                answer(ray.available_resources())
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
