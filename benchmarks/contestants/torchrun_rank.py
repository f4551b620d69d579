"""A rank under torchrun: joins a gloo group and adds up ones for ever, noting each step.

Started by torchrun, as a program.
"""

from __future__ import annotations

import os
import sys
import time
from importlib import import_module
from typing import Any


def main(notes: str, variant: str) -> None:
    """Take steps until killed."""
    torch: Any = import_module("torch")
    dist: Any = import_module("torch.distributed")
    protocol = import_module("phalanx_peers.protocol")
    protocol.Echo()  # dies here where ranks are to die in their start
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if variant == "a store per restart":
        store = dist.TCPStore(
            os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), size, is_master=False
        )
        prefix = f"restart {os.environ['TORCHELASTIC_RESTART_COUNT']}"
        store = dist.PrefixStore(prefix, store)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    else:
        dist.init_process_group("gloo")
    while True:
        dist.all_reduce(torch.ones(1))
        protocol.note(notes, f"step {rank}")
        time.sleep(0.01)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
