"""Embed the documentation of the Python standard library on replicas of one model.

Every rank holds the whole model and takes the next batch from a common queue. Ranks know nothing
of each other, so that a death concerns one rank only: its batch goes to another one, it alone is
restarted (one_for_one), and the others never stop.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from minilm.chaos import target
from minilm.model import Stage
from minilm.run import Pipeline, main
from minilm.weights import Weights
from phalanx import Executor, Intensity, Strategy, WorkerActor, WorkerContext, idempotent

if TYPE_CHECKING:
    import torch

    from minilm.arguments import Options
    from minilm.chaos import ChaosTarget


class Replica(WorkerActor):
    """The whole model."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def on_start(self, ctx: WorkerContext) -> None:
        """Load it."""
        self._device = ctx.device
        self._model = Stage(Weights(self._folder, ctx.device))

    @idempotent
    def embed(self, ticket: int, ids: torch.Tensor) -> tuple[int, torch.Tensor]:
        """Return *ticket* and one unit vector for each row of *ids*."""
        return ticket, self._model(ids.to(self._device))


def start(folder: str, options: Options) -> Executor[Replica]:
    """Start the replicas."""
    return Executor(
        Replica,
        world_size=options.ranks,
        args=(folder,),
        strategy=Strategy.ONE_FOR_ONE,
        intensity=Intensity(options.kills + 3, 60.0),
        devices=options.device,
        preload=("torch",),
        name="replicas",
    )


PIPELINE = Pipeline(
    name="embed_data_parallel",
    about=__doc__ or "",
    most_ranks=64,
    depth=lambda ranks: 2 * ranks,  # one for each to work on, one for each to take next
    start=start,
    embed=lambda group, batch, retries: group.submit(
        "embed", args=(batch.ticket, batch.ids), timeout=120.0, on_death="retry", retries=retries
    ),
)


def chaos() -> ChaosTarget:
    """Return what `phalanx chaos` does its faults to."""
    return target(PIPELINE)


if __name__ == "__main__":
    sys.exit(main(PIPELINE))
