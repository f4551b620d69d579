"""Embed the documentation of the Python standard library with every layer split over all ranks.

Each rank holds some of the attention heads and a part of the MLP of every layer; after each of
the two, the ranks add up what they have with an all-reduce of torch.distributed. Ranks in a
process group stand or fall together (one_for_all): when one is killed the group is formed anew,
under a new epoch, and the calls that were in flight are made again. There are two ways to do that:
``--recover all`` restarts every rank; ``--recover survivors`` replaces the dead one only, and the
others leave the old process group, join the new one and keep their weights. By default each does
half of the work, so that the table shows what both cost.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from minilm.chaos import target
from minilm.model import Stage
from minilm.run import LOADED, Pipeline, main
from minilm.weights import Weights
from phalanx import Executor, Intensity, Strategy, WorkerActor, WorkerContext, idempotent

if TYPE_CHECKING:
    import torch

    from minilm.arguments import Options
    from minilm.chaos import ChaosTarget


class Shard(WorkerActor):
    """A share of every layer."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def on_start(self, ctx: WorkerContext) -> None:
        """Meet the other ranks, then load what is this rank's."""
        ctx.init_process_group()  # nccl on a GPU, gloo on a CPU
        weights = Weights(self._folder, ctx.device)
        self._device = ctx.device
        self._model = Stage(weights, rank=ctx.rank, count=ctx.world_size)
        ctx.emit(LOADED)

    def on_reform(self, ctx: WorkerContext) -> None:
        """Meet the other ranks again; the weights are here already."""
        ctx.init_process_group()

    @idempotent
    def embed(self, ticket: int, ids: torch.Tensor) -> tuple[int, torch.Tensor]:
        """Return *ticket* and one unit vector for each row of *ids*; the same on every rank."""
        return ticket, self._model(ids.to(self._device), reduce=_add_up)


def _add_up(partial: torch.Tensor) -> torch.Tensor:
    from torch import distributed  # noqa: PLC0415  # needed in the ranks only

    distributed.all_reduce(partial)  # pyright: ignore[reportUnknownMemberType]  # torch's gap
    return partial


def start(folder: str, options: Options) -> Executor[Shard]:
    """Start the shards."""
    return Executor(
        Shard,
        world_size=options.ranks,
        args=(folder,),
        strategy=Strategy.ONE_FOR_ALL,
        survivors="keep" if options.recover == "survivors" else "restart",
        intensity=Intensity(options.kills + 3, 60.0),
        devices=options.device,
        preload=("torch",),
        name="shards",
    )


PIPELINE = Pipeline(
    name="embed_tensor_parallel",
    about=__doc__ or "",
    most_ranks=12,  # attention heads
    depth=lambda _: 2,  # one to work on, one that is there when it is done
    start=start,
    ways={"all": "all restarted", "survivors": "survivors kept"},
    embed=lambda group, batch, retries: group.collective_rpc(
        "embed",
        args=(batch.ticket, batch.ids),
        unique_reply_rank=0,
        non_block=True,
        timeout=120.0,
        on_death="retry",
        retries=retries,
    ),
)


def chaos() -> ChaosTarget:
    """Return what `phalanx chaos` does its faults to."""
    return target(PIPELINE)


if __name__ == "__main__":
    sys.exit(main(PIPELINE))
