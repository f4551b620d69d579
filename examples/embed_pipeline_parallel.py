"""Embed the documentation of the Python standard library with the layers split over the ranks.

Each rank is a stage with some of the layers. It gets the hidden states from the stage before it
and sends its own to the stage after it, through torch.distributed; meanwhile the driver has so
many calls in flight that every stage has a batch to work on.

When a stage is killed, all are restarted (one_for_all), not only the stages after it
(rest_for_one). The stages share a process group, and a process group cannot take in a new member:
a stage that stayed would hold connections to a peer that is gone, and hidden states of a batch
that will be sent through again from the start.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from minilm.chaos import target
from minilm.model import Stage, share
from minilm.run import Pipeline, main
from minilm.weights import Weights
from phalanx import Executor, Intensity, Strategy, WorkerActor, WorkerContext, idempotent

if TYPE_CHECKING:
    import torch
    from torch.distributed import Work

    from minilm.arguments import Options
    from minilm.chaos import ChaosTarget


class Link:
    """A stage's ends of the line: hidden states come in from one rank and go out to the next."""

    def __init__(self, rank: int, width: int, device: str) -> None:
        self._rank = rank
        self._width = width
        self._device = device
        self._sending: tuple[Work, torch.Tensor] | None = None

    def receive(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the hidden states of *ids* from the stage before."""
        import torch  # noqa: PLC0415  # needed in the ranks only
        from torch import distributed  # noqa: PLC0415  # the same

        hidden = torch.empty(*ids.shape, self._width, device=self._device)
        distributed.recv(hidden, self._rank - 1)
        return hidden

    def send(self, hidden: torch.Tensor) -> None:
        """Send *hidden* to the stage after, while this one goes on with the next batch."""
        from torch import distributed  # noqa: PLC0415  # needed in the ranks only

        if self._sending is not None:
            self._sending[0].wait()
        work = distributed.isend(hidden, self._rank + 1)
        assert work is not None
        self._sending = work, hidden  # the tensor must live until it is sent


class Segment(WorkerActor):
    """Some of the layers."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def on_start(self, ctx: WorkerContext) -> None:
        """Meet the other stages, then load what is this one's."""
        ctx.init_process_group()  # nccl on a GPU, gloo on a CPU
        weights = Weights(self._folder, ctx.device)
        layers = share(weights.config.num_hidden_layers, ctx.rank, ctx.world_size)
        self._device = ctx.device
        self._model = Stage(weights, layers)
        self._link = Link(ctx.rank, weights.config.hidden_size, ctx.device)

    @idempotent
    def embed(self, ticket: int, ids: torch.Tensor) -> tuple[int, torch.Tensor] | None:
        """Return *ticket* and one unit vector per row of *ids* from the last stage, else None."""
        ids = ids.to(self._device)
        result = self._model(ids, None if self._model.is_first else self._link.receive(ids))
        if self._model.is_last:
            return ticket, result
        self._link.send(result)
        return None


def start(folder: str, options: Options) -> Executor[Segment]:
    """Start the stages."""
    return Executor(
        Segment,
        world_size=options.ranks,
        args=(folder,),
        strategy=Strategy.ONE_FOR_ALL,
        intensity=Intensity(options.kills + 3, 60.0),
        devices=options.device,
        preload=("torch",),
        name="stages",
    )


PIPELINE = Pipeline(
    name="embed_pipeline_parallel",
    about=__doc__ or "",
    most_ranks=6,  # layers
    # One that is worked on and one that is on its way, for each stage; and one that is there when
    # the first stage is done.
    depth=lambda ranks: 2 * ranks + 1,
    start=start,
    embed=lambda group, batch, retries: group.collective_rpc(
        "embed",
        args=(batch.ticket, batch.ids),
        unique_reply_rank=len(group.ranks) - 1,
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
