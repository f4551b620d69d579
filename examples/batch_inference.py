"""Embed the documentation of Python's standard library on replicas of one model.

Every rank holds the whole model and takes the next batch from a common queue. Ranks are killed with
SIGKILL during calls: the batch of a dead rank goes to another one, the dead rank alone is restarted
(one_for_one), and the others never stop.

    python examples/batch_inference.py --ranks 4 --kills 3
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import time
from concurrent.futures import FIRST_COMPLETED, wait
from typing import TYPE_CHECKING

import torch

from embedding_options import parse
from minilm import QUESTION, WIDTH, MiniLM, batches, is_right, passages
from phalanx import Executor, Intensity, Launch, Strategy, WorkerActor, WorkerContext, method

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future


class Replica(WorkerActor):
    """The whole model."""

    def on_start(self, ctx: WorkerContext) -> None:
        """Load it."""
        self._device = ctx.device
        self._model = MiniLM(device=ctx.device)

    @method(idempotent=True)  # a death sends the call to another rank
    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Return one unit vector for each row of *ids*."""
        return self._model(ids.to(self._device))


def main(words: Sequence[str] | None = None) -> int:
    """Embed the dataset; return 0 if every embedding equals that of one process."""
    parser = argparse.ArgumentParser(description="Embed on replicas behind a common queue.")
    options = parse(parser, words, ranks=4, kills=3, most=64)
    texts = [*passages(options.passages), QUESTION]
    work, vectors = batches(texts), torch.zeros(len(texts), WIDTH)
    chance = random.Random(options.seed)
    kill_at = set(chance.sample(range(1, len(work)), options.kills))
    killed: set[int | None] = set()
    waiting: dict[Future[torch.Tensor], list[int]] = {}

    def take() -> None:
        done, _ = wait(waiting, return_when=FIRST_COMPLETED)
        for answer in done:
            vectors[waiting.pop(answer)] = answer.result()

    with Executor(
        Replica,
        options.ranks,
        strategy=Strategy.ONE_FOR_ONE,
        intensity=Intensity(options.kills + 3, 60.0),
        devices=options.device,
        launch=Launch(preload=("torch",)),
    ) as group:
        began = time.monotonic()
        for number, (rows, ids) in enumerate(work):
            call = group.submit("embed", args=(ids,), retries=options.kills + 1)
            waiting[call] = rows
            up = [one for one in group.ranks if one.state == "up" and one.pid not in killed]
            if number in kill_at and up:
                rank = chance.choice(up)
                assert rank.pid is not None  # up
                os.kill(rank.pid, signal.SIGKILL)
                killed.add(rank.pid)
                print(f"killed rank {rank.rank} (pid {rank.pid})")
            if len(waiting) == 2 * options.ranks:  # one to work on and one to take next, for each
                take()
        while waiting:
            take()
        seconds = time.monotonic() - began
        restarts = group.status().restarts

    print(f"{len(work)} calls answered in {seconds:.2f} s; restarts: {restarts}")
    return 0 if is_right(texts, vectors) else 1


if __name__ == "__main__":
    sys.exit(main())
