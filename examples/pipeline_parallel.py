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
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minilm.dataset import Batch, Dataset
from minilm.model import Stage, share
from minilm.weights import Weights
from phalanx import Executor, Intensity, Launch, WorkerActor, WorkerContext, method

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future

    import torch
    from torch.distributed import Work


class Segment(WorkerActor):
    """Some of the layers."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._sending: tuple[Work, torch.Tensor] | None = None

    def on_start(self, ctx: WorkerContext) -> None:
        """Join the process group, then load this stage's layers."""
        ctx.init_process_group()  # nccl on a GPU, gloo on a CPU
        weights = Weights(self._folder, ctx.device)
        self._device = ctx.device
        self._width = weights.config.hidden_size
        layers = share(weights.config.num_hidden_layers, ctx.rank, ctx.world_size)
        self._model = Stage(weights, layers)

    @method(idempotent=True)  # a death sends the call again
    def embed(self, ids: torch.Tensor) -> torch.Tensor | None:
        """Return one unit vector per row of *ids* from the last stage, else None."""
        import torch  # noqa: PLC0415  # needed in the ranks only
        from torch import distributed  # noqa: PLC0415

        hidden = None
        if not self._model.is_first:
            hidden = torch.empty(*ids.shape, self._width, device=self._device)
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
    options = parse(words)
    dataset = Dataset(options.passages)
    chance = random.Random(options.seed)
    kill_at = set(chance.sample(range(1, len(dataset.batches)), options.kills))
    waiting: deque[tuple[Batch, Future[torch.Tensor]]] = deque()

    def take() -> None:
        batch, answer = waiting.popleft()
        dataset.vectors[batch.rows] = answer.result()

    with Executor(
        Segment,
        options.ranks,
        args=(str(dataset.folder),),
        intensity=Intensity(options.kills + 3, 60.0),
        devices=options.device,
        launch=Launch(preload=("torch",)),
    ) as group:
        began = time.monotonic()
        for batch in dataset.batches:
            call: Any = group.collective_rpc(
                "embed",
                args=(batch.ids,),
                unique_reply_rank=options.ranks - 1,
                non_block=True,
                retries=options.kills + 1,
            )
            waiting.append((batch, call))
            if batch.number in kill_at:
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

    print(f"{len(dataset.batches)} calls answered in {seconds:.2f} s; restarts: {restarts}")
    return dataset.verdict()


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of *words* (None: the command line)."""
    parser = argparse.ArgumentParser(description="Embed with the layers split over the ranks.")
    add = parser.add_argument
    add("--ranks", type=int, default=3, help="worker processes; at most 6 (layers)")
    add("--kills", type=int, default=2, help="ranks to kill while they work")
    add("--seed", type=int, default=0, help="of the moments and ranks of the kills")
    add("--passages", type=int, default=2000, help="passages to embed, 32 to a call")
    add("--device", default="cpu", help="cpu, or cuda for one GPU per rank")
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(main())
