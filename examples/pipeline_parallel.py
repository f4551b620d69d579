"""Embed the documentation of Python's standard library with the layers split over the ranks.

Each rank is a stage that holds some of the layers. It receives hidden states from the stage before
it and sends its own to the stage after it, through torch.distributed, while the driver keeps so
many calls in flight that every stage has a batch to work on.

When a stage is killed all are restarted (one_for_all), not only the stages after it
(rest_for_one): the stages share a process group, a process group cannot take in a new member, and
the hidden states of a batch that is sent again start at the first stage.

    python examples/pipeline_parallel.py --ranks 3 --kills 2
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
from minilm import LAYERS, QUESTION, WIDTH, MiniLM, batches, is_right, passages, share
from phalanx import Executor, Intensity, Launch, WorkerActor, WorkerContext, method

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future

    from torch.distributed import Work


class Segment(WorkerActor):
    """Some of the layers."""

    def __init__(self) -> None:
        self._sending: tuple[Work, torch.Tensor] | None = None

    def on_start(self, ctx: WorkerContext) -> None:
        """Join the process group, then load this stage's layers."""
        ctx.init_process_group()  # nccl on a GPU, gloo on a CPU
        self._device = ctx.device
        self._model = MiniLM(share(LAYERS, ctx.rank, ctx.world_size), device=ctx.device)

    @method(idempotent=True)  # a death sends the call again
    def embed(self, ids: torch.Tensor) -> torch.Tensor | None:
        """Return one unit vector per row of *ids* from the last stage, else None."""
        hidden = None
        if not self._model.is_first:
            hidden = torch.empty(*ids.shape, WIDTH, device=self._device)
            distributed.recv(hidden, self.ctx.rank - 1)
        hidden = self._model(ids.to(self._device), hidden)
        if self._model.is_last:
            return hidden
        if self._sending is not None:
            self._sending[0].wait()
        work = distributed.isend(hidden, self.ctx.rank + 1)
        assert work is not None
        self._sending = work, hidden  # the tensor must live until it is sent
        return None


def main(words: Sequence[str] | None = None) -> int:
    """Embed the dataset; return 0 if every embedding equals that of one process."""
    parser = argparse.ArgumentParser(description="Embed with the layers split over the ranks.")
    options = parse(parser, words, ranks=3, kills=2, most=LAYERS)
    texts = [*passages(options.passages), QUESTION]
    work, vectors = batches(texts), torch.zeros(len(texts), WIDTH)
    chance = random.Random(options.seed)
    kill_at = set(chance.sample(range(1, len(work)), options.kills))
    waiting: deque[tuple[list[int], Future[torch.Tensor]]] = deque()

    def take() -> None:
        rows, answer = waiting.popleft()
        vectors[rows] = answer.result()

    with Executor(
        Segment,
        options.ranks,
        intensity=Intensity(options.kills + 3, 60.0),
        devices=options.device,
        launch=Launch(preload=("torch",)),
    ) as group:
        began = time.monotonic()
        for number, (rows, ids) in enumerate(work):
            call: Any = group.collective_rpc(
                "embed",
                args=(ids,),
                unique_reply_rank=options.ranks - 1,
                non_block=True,
                retries=options.kills + 1,
            )
            waiting.append((rows, call))
            if number in kill_at:
                rank = chance.randrange(options.ranks)
                pid = group.ranks[rank].pid
                assert pid is not None  # up: after each kill all calls in flight are awaited
                os.kill(pid, signal.SIGKILL)
                print(f"killed rank {rank} (pid {pid})")
                while waiting:
                    take()
            elif len(waiting) > 2 * options.ranks:  # per stage one in work and one under way
                take()
        while waiting:
            take()
        seconds = time.monotonic() - began
        restarts = group.status().restarts

    print(f"{len(work)} calls answered in {seconds:.2f} s; restarts: {restarts}")
    return 0 if is_right(texts, vectors) else 1


if __name__ == "__main__":
    sys.exit(main())
