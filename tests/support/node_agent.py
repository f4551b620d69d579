"""An agent: starts a node by the order in its argument, and tells of it, a line of JSON each time.

It ends the node when its standard input ends; when it is killed the node ends with it.
"""

from __future__ import annotations

import json
import os
import sys
import time

from phalanx.cluster.link.messages import NodeOrder, decode
from phalanx.cluster.node_process.starter import NodeStarter
from phalanx.runtime import EventLoop

CLOSE = 5.0


def tell(**what: object) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    order = decode([sys.argv[1].encode()])
    assert isinstance(order, NodeOrder)
    starter: NodeStarter = NodeStarter(
        EventLoop(),
        order,
        on_key=lambda key: tell(key=key, pid=starter.pid),
        on_gone=lambda why, swept: tell(gone=why, swept=swept),
    )
    starter.start()
    sys.stdin.read()
    starter.close(time.monotonic() + CLOSE)
    os._exit(0)
