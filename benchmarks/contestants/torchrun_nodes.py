"""torchrun on two machines: an agent on each, half of the ranks under each of them.

The variant is JSON: the ``addresses`` of two machines, and the ``prefixes`` with which command
lines begin that are to run on these. Each round has another store
(``TORCH_DISABLE_SHARE_RDZV_TCP_STORE``): with the one that agents share, ranks that were started
anew find the keys of the round before.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

from .torchrun_group import TorchrunGroup

_PORT = 29411


class TorchrunNodes(TorchrunGroup):
    """Two agents, and the notes of their ranks."""

    def open(self, ranks: int, variant: str) -> None:
        where = json.loads(variant)
        addresses = where["addresses"]
        self._begin_notes(ranks)
        more = {
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "GLOO_SOCKET_IFNAME": "eth0" if where["prefixes"][0] else "lo",
        }
        self._agents = [
            subprocess.Popen(
                [
                    *prefix,
                    *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2"),
                    *(f"--nproc-per-node={ranks // 2}", "--max-restarts=1000"),
                    *("--monitor-interval=0.1", "--rdzv-id=phalanx", "--rdzv-backend=c10d"),
                    *(f"--rdzv-endpoint={addresses[0]}:{_PORT}", f"--local-addr={address}"),
                    f"--rdzv-conf=is_host={int(address == addresses[0])}",
                    *("-m", "phalanx_peers.torchrun_rank", self._notes, "plain"),
                ],
                stdout=sys.stderr,
                env={**os.environ, **more},
            )
            for address, prefix in zip(addresses, where["prefixes"], strict=True)
        ]
        self._agent = self._agents[0]

    def close(self) -> None:
        for each in self._agents:
            each.terminate()
        for each in self._agents[1:]:
            each.wait(30)
        super().close()


def make() -> TorchrunNodes:
    """Return the contestant."""
    return TorchrunNodes()
