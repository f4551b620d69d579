"""``-m benchmarks.training.ranks.script FOLDER``: the script that people have, for torchrun.

DDP (or FSDP2, without checkpoints). If asked for, a checkpoint by rank 0 after every block, or the
state in memory after every step. It puts another prefix before the keys of each round, without
which ranks under torchrun may fail to join again with gloo.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from .model import digest, learn, make
from .notes import BLOCK, Asked, Gate, Notes

_dist: Any = import_module("torch.distributed")  # torch's types hide its stores


def train(asked: Asked, rank: int) -> None:
    """Train from the checkpoint, if there is one, in the process group that has been joined."""
    notes = Notes(asked, rank)
    gate = Gate(asked, rank) if asked.gated else None
    model, optimizer = make(asked)
    kept = Path(asked.folder) / "checkpoint"
    step = 0
    if asked.saves and kept.exists():
        state: dict[str, Any] = torch.load(kept)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    net: Any = model if asked.sharded else DistributedDataParallel(model)
    memory: Any = None
    if asked.memory:
        ours: Any = import_module("phalanx.integrations.torch")  # not in a peer's environment
        ours.fix_buckets(net)
        memory = ours.MemoryCheckpoint(ours.State(model=model, optimizer=optimizer))
        step = memory.load()
    notes.put("from", step)
    is_last = False
    while not is_last:
        if gate is not None and step % asked.block == 0:
            gate.wait()
        step += 1
        began = notes.put("begin", step)
        optimizer.zero_grad()
        used, is_last = learn(net, step, rank, asked.ranks, stop=asked.wants_stop())
        optimizer.step()
        notes.put("done", step, began, *used)
        if memory is not None:
            memory.save(step)
        if asked.saves and rank == 0 and step % BLOCK == 0:
            save(kept, {"step": step, "model": model.state_dict()}, optimizer)
        if asked.digests:
            is_last = step == asked.digests[-1]
        if is_last or step in asked.digests:
            notes.put("digest", step, digest(model, optimizer))


def save(path: Path, state: dict[str, Any], optimizer: torch.optim.Optimizer) -> None:
    """Write the state so that *path* always holds a whole one."""
    made = path.with_suffix(".new")
    torch.save({**state, "optimizer": optimizer.state_dict()}, made)
    made.replace(path)


def join(prefix: str, rank: int, ranks: int) -> None:
    """Join the process group of this round."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = _dist.TCPStore(address, port, is_master=False)
    prefixed = _dist.PrefixStore(prefix, store)
    _dist.init_process_group("gloo", store=prefixed, rank=rank, world_size=ranks)


def main(folder: str) -> None:
    """Run one rank."""
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    join(f"round {os.environ['TORCHELASTIC_RESTART_COUNT']}", rank, int(os.environ["WORLD_SIZE"]))
    train(Asked.read(folder), rank)
    _dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
