"""Embed the documentation of Python's standard library on replicas of one model.

Every rank holds the whole model and takes the next batch from a common queue. Ranks are killed with
SIGKILL at work: the batch of a dead rank goes to another one, the dead rank alone is restarted
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
    options = parse(words)
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


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of *words* (None: the command line)."""
    parser = argparse.ArgumentParser(description="Embed on replicas behind a common queue.")
    add = parser.add_argument
    add("--ranks", type=int, default=4, help="worker processes")
    add("--kills", type=int, default=3, help="ranks to kill while they work")
    add("--seed", type=int, default=0, help="of the moments and ranks of the kills")
    add("--passages", type=int, default=2000, help="passages to embed, 32 to a call")
    add("--device", default="cpu", help="cpu, or cuda for one GPU per rank")
    options = parser.parse_args(words)
    calls = len(range(0, options.passages + 1, 32))
    if not (options.ranks > 0 and options.passages > 0 and 0 <= options.kills < calls):
        parser.error(f"take at least 1 rank, at least 1 passage, and less than {calls} kills")
    return options


if __name__ == "__main__":
    sys.exit(main())
