"""``-m benchmarks.training.ranks.torchft FOLDER``: the script with torchft, a rank to each group.

A rank that died is started again at once; meanwhile the others go on without it, and it takes the
state from one of them. A checkpoint every `BLOCK` steps is for the case that none is left.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from .model import digest, learn, make
from .notes import BLOCK, Asked, Gate, Notes
from .script import save


def launch(folder: str) -> int:
    """Start the lighthouse and the ranks, those that die again; return 0 once all have ended."""
    os.environ["RUST_LOG"] = "warn"  # else ten lines for each step
    coordination: Any = import_module("torchft.coordination")
    lighthouse = coordination.LighthouseServer(
        bind="127.0.0.1:0", min_replicas=1, quorum_tick_ms=100, join_timeout_ms=10_000
    )  # as in its README
    address = lighthouse.address()
    running = {_start(folder, rank, address): rank for rank in range(Asked.read(folder).ranks)}
    while running:
        pid, status = os.wait()
        ended = next((each for each in running if each.pid == pid), None)
        if ended is not None:
            rank = running.pop(ended)
            ended.returncode = os.waitstatus_to_exitcode(status)
            if ended.returncode:
                running[_start(folder, rank, address)] = rank
    lighthouse.shutdown()
    return 0


def _start(folder: str, rank: int, lighthouse: str) -> subprocess.Popen[bytes]:
    more = {"TORCHFT_LIGHTHOUSE": lighthouse, "REPLICA": str(rank)}
    words = [sys.executable, "-m", __spec__.name, folder]
    return subprocess.Popen(words, env={**os.environ, **more})


def run_rank(folder: str) -> None:
    """Run one rank."""
    torchft: Any = import_module("torchft")
    distributed: Any = import_module("torch.distributed")
    torch.set_num_threads(1)
    asked, rank = Asked.read(folder), int(os.environ["REPLICA"])
    notes = Notes(asked, rank)
    gate = Gate(asked, rank) if asked.gated else None
    model, inner = make(asked)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=1,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        replica_id=f"rank_{rank}",
    )
    kept = Path(folder) / "checkpoint"
    if asked.saves and kept.exists():
        state: dict[str, Any] = torch.load(kept)
        load(state)
        manager.load_state_dict(state["manager"])
    (Path(folder) / f"ready.{rank}").touch()
    while not all((Path(folder) / f"ready.{each}").exists() for each in range(asked.ranks)):
        time.sleep(0.02)  # the first step is everyone's
    optimizer = torchft.Optimizer(manager, inner)
    net = torchft.DistributedDataParallel(manager, model)
    sum_of = distributed.ReduceOp.SUM
    known = is_last = False
    while not is_last:
        before = manager.current_step()
        if gate is not None and before % asked.block == 0:
            gate.wait()
        if known:  # else the state of another rank may come, of another step
            notes.put("begin", before + 1)
        began = time.monotonic()
        optimizer.zero_grad()
        used, stop = learn(
            net,
            before + 1,
            rank,
            asked.ranks,
            add_up=lambda each: manager.allreduce(each, reduce_op=sum_of).wait(),
            stop=asked.wants_stop(),
        )
        optimizer.step()
        step = manager.current_step()
        if step == before:  # not committed
            continue
        if not known:
            notes.put("from", step - 1)
            known = True
        notes.put("done", step, began, *used)
        if asked.saves and step % BLOCK == 0 and manager.participating_rank() == 0:
            save(kept, {"model": model.state_dict(), "manager": manager.state_dict()}, inner)
        is_last = step == asked.digests[-1] if asked.digests else stop
        if is_last or step in asked.digests:
            notes.put("digest", step, digest(model, inner))
    manager.shutdown(wait=False)


if __name__ == "__main__":
    if "REPLICA" in os.environ:
        run_rank(sys.argv[1])
    else:
        sys.exit(launch(sys.argv[1]))
