"""Starts a node by the order in its argument, prints the node's pid, and waits: to be killed."""

from __future__ import annotations

import signal
import sys

from phalanx.cluster.link.messages import NodeOrder, decode
from phalanx.cluster.node_process.starter import NodeStarter
from phalanx.runtime import EventLoop

if __name__ == "__main__":
    order = decode([sys.argv[1].encode()])
    assert isinstance(order, NodeOrder)
    starter: NodeStarter = NodeStarter(
        EventLoop(), order, on_key=lambda _: print(starter.pid, flush=True), on_gone=lambda *_: None
    )
    starter.start()
    signal.pause()
