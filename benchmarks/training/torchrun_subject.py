"""A rank of `benchmarks.training.torchrun`: joins a gloo group, and notes each step.

Each line: round, rank, when the step ended (monotonic), the process.
"""

from __future__ import annotations

import os
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

dist: Any = import_module("torch.distributed")  # torch's types hide its stores


def main(notes: str) -> None:
    """Take steps until killed."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    number = os.environ["TORCHELASTIC_RESTART_COUNT"]
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, size, is_master=False)
    prefixed = dist.PrefixStore(f"round {number}", store)
    dist.init_process_group("gloo", store=prefixed, rank=rank, world_size=size)
    with Path(notes).open("ab", buffering=0) as file:
        while True:
            dist.all_reduce(torch.ones(1))
            file.write(f"{number} {rank} {time.monotonic()} {os.getpid()}\n".encode())
            time.sleep(0.02)


if __name__ == "__main__":
    main(sys.argv[1])
