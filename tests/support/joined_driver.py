"""A driver whose nodes join by themselves; it says what its ranks answer, and is killed."""

from __future__ import annotations

import json
import signal
import sys

from tests.support.node_engine import ONE_ZYGOTE
from tests.support.workers import Echo

from phalanx import Executor, JoinedNodes

if __name__ == "__main__":
    nodes = JoinedNodes(
        bind="127.0.0.1", port=int(sys.argv[1]), key_file=sys.argv[2], ranks_per_node=2
    )
    with Executor(Echo, 2, cluster=nodes, devices="cpu", launch=ONE_ZYGOTE) as group:
        print(json.dumps({"ranks": group.collective_rpc("rank")}), flush=True)
        signal.pause()
