"""Monarch on the first of two far hosts, each of which runs Monarch's worker loop.

The variant is JSON: ``here`` and the ``addresses`` of two machines, and the ``prefixes`` with which
command lines begin that are to run on these.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from .monarch_mesh import Echo, MonarchMesh, monarch

_PORT = 26_000
_HOST = """
import sys
from monarch.actor import enable_transport, run_worker_loop_forever
enable_transport(sys.argv[1] + ":0")
run_worker_loop_forever(ca="trust_all_connections", address=f"{sys.argv[1]}:{sys.argv[2]}")
"""


class MonarchHosts(MonarchMesh):
    """Calls to the processes of one far host."""

    def open(self, ranks: int, variant: str) -> None:
        where = json.loads(variant)
        monarch.enable_transport(f"tcp://{where['here']}:0")
        endpoints = [f"tcp://{address}" for address in where["addresses"]]
        self._hosts = [
            subprocess.Popen(
                [*prefix, sys.executable, "-c", _HOST, host, str(_PORT)], stdout=sys.stderr
            )
            for host, prefix in zip(endpoints, where["prefixes"], strict=True)
        ]
        workers = [f"{host}:{_PORT}" for host in endpoints]
        hosts = monarch.attach_to_workers(ca="trust_all_connections", workers=workers)
        first = hosts.slice(hosts=0)
        self._mesh: Any = first.spawn_procs(per_host={"gpus": ranks}).spawn("echo", Echo)
        self._one: Any = first.spawn_procs(per_host={"gpus": 1}).spawn("echo", Echo)
        self._pids = list(self.call("pid"))

    def close(self) -> None:
        super().close()
        for each in self._hosts:
            each.kill()
            each.wait(30)

    def call(self, method: str, *args: Any) -> Any:
        """Call all, or, where *method* begins with ``first.``, one process."""
        name = method.removeprefix("first.")
        mesh = self._mesh if name == method else self._one
        return [value for _, value in mesh.do.call(name, args).get()]


def make() -> MonarchHosts:
    """Return the contestant."""
    return MonarchHosts()
