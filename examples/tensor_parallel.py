"""Embed the documentation of Python's standard library with every layer split over all ranks.

Each rank holds some of the attention heads and a part of the MLP of every layer; after each of the
two, an all-reduce adds up the parts. Ranks are killed with SIGKILL during calls: the group is
re-formed with a new process group, and the calls in flight are sent again. ``--survivors keep``
replaces the dead rank only, ``--survivors restart`` restarts every rank.

    python examples/tensor_parallel.py --ranks 4 --kills 3
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from embedding_options import parse
from minilm import HEADS, QUESTION, WIDTH, MiniLM, batches, is_right, passages
from phalanx import (
    Executor,
    Intensity,
    Launch,
    RestartPolicy,
    WorkerActor,
    WorkerContext,
    method,
)
from phalanx.events import GroupUp

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future

IN_FLIGHT = 2  # calls: one that the ranks work on, one that waits for them


class Shard(WorkerActor):
    """A share of every layer."""

    def on_start(self, ctx: WorkerContext) -> None:
        """Join the process group, then load this rank's share."""
        ctx.init_process_group()  # nccl on a GPU, gloo on a CPU
        self._device = ctx.device
        self._model = MiniLM(rank=ctx.rank, count=ctx.world_size, device=ctx.device)

    def on_reform(self, ctx: WorkerContext) -> None:
        """Join the process group of the next epoch; the weights stay."""
        ctx.init_process_group()

    @method(idempotent=True)  # a death sends the call again
    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Return one unit vector for each row of *ids*, the same on every rank."""
        return self._model(ids.to(self._device), reduce=all_reduce)


def all_reduce(partial: torch.Tensor) -> torch.Tensor:
    """Return the sum of *partial* over the ranks."""
    distributed.all_reduce(partial)  # pyright: ignore[reportUnknownMemberType]  # torch's gap
    return partial


def main(words: Sequence[str] | None = None) -> int:
    """Embed the dataset; return 0 if every embedding equals that of one process."""
    parser = argparse.ArgumentParser(description="Embed with every layer split over all ranks.")
    parser.add_argument(
        "--survivors", choices=["keep", "restart"], default="keep", help="on a death"
    )
    options = parse(parser, words, ranks=4, kills=3, most=HEADS)
    texts = [*passages(options.passages), QUESTION]
    work, vectors = batches(texts), torch.zeros(len(texts), WIDTH)
    chance = random.Random(options.seed)
    kill_at = set(chance.sample(range(1, len(work)), options.kills))
    killed, complete = list[float](), list[float]()  # times of kills, and of all ranks being up
    waiting: deque[tuple[list[int], Future[torch.Tensor]]] = deque()

    def take() -> None:
        rows, answer = waiting.popleft()
        vectors[rows] = answer.result()

    def note(event: object) -> None:
        if isinstance(event, GroupUp):
            complete.append(event.at)

    with Executor(
        Shard,
        options.ranks,
        policy=RestartPolicy(survivors=options.survivors),
        intensity=Intensity(options.kills + 3, 60.0),
        devices=options.device,
        launch=Launch(preload=("torch",)),
    ) as group:
        group.subscribe(note)
        began = time.monotonic()
        for number, (rows, ids) in enumerate(work):
            call: Any = group.collective_rpc(
                "embed",
                args=(ids,),
                unique_reply_rank=0,
                non_block=True,
                retries=options.kills + 1,
            )
            waiting.append((rows, call))
            if number in kill_at:
                rank = chance.randrange(options.ranks)
                pid = group.ranks[rank].pid
                assert pid is not None  # up: the calls before these two are answered
                os.kill(pid, signal.SIGKILL)
                killed.append(time.monotonic())
                print(f"killed rank {rank} (pid {pid})")
                while waiting:
                    take()
            elif len(waiting) == IN_FLIGHT:
                take()
        while waiting:
            take()
        seconds = time.monotonic() - began
        restarts = group.status().restarts

    print(f"{len(work)} calls answered in {seconds:.2f} s; restarts: {restarts}")
    for at in killed:
        print(f"recovery: {min(each for each in complete if each > at) - at:.2f} s")
    return 0 if is_right(texts, vectors) else 1


if __name__ == "__main__":
    sys.exit(main())
