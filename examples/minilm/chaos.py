"""A pipeline as the target of `phalanx chaos`: a group, and callers who check every embedding.

Guarantees: what a caller gets is compared with what the unsharded model in this process makes of
the same passages, and with the ticket that it was asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .arguments import Options
from .corpus import corpus
from .model import Stage
from .outcome import TOLERANCE
from .tokens import batches, tokenize
from .weights import Weights, model_folder

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    import torch

    from phalanx import Executor

    from .run import Pipeline
    from .tokens import Batch

    ChaosTarget = tuple[Executor[Any], Callable[[Executor[Any], random.Random], None]]

RANKS = 4
_PASSAGES = 48
_BATCH = 8
_RETRIES = 20
"""More deaths than hit one call, unless it is the call that kills."""


def target(pipeline: Pipeline) -> ChaosTarget:
    """Return a group of *pipeline*, and the traffic for it."""
    weights = Weights(model_folder())
    tokens = tokenize(weights.folder, [passage.text for passage in corpus(_PASSAGES)])
    whole = Stage(weights)
    work = [(batch, whole(batch.ids)) for batch in batches(tokens, _BATCH)]
    options = Options(
        ranks=RANKS,
        kills=0,
        seed=0,
        passages=_PASSAGES,
        batch=_BATCH,
        device="cpu",
        query="",
        json=False,
    )

    def embed_one(group: Executor[Any], chance: random.Random) -> None:
        batch, expected = chance.choice(work)
        ticket, vectors = pipeline.embed(group, batch, _RETRIES).result()
        _compare(batch, ticket, vectors, expected)

    return pipeline.start(str(weights.folder), options), embed_one


def _compare(batch: Batch, ticket: int, vectors: torch.Tensor, expected: torch.Tensor) -> None:
    if ticket != batch.ticket:
        msg = f"the answer to batch {batch.ticket} is that of batch {ticket}"
        raise AssertionError(msg)
    difference = float((vectors - expected).abs().max())
    if difference > TOLERANCE:
        msg = f"the embeddings of batch {ticket} differ by {difference:g} from one process's"
        raise AssertionError(msg)
