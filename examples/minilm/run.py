"""A pipeline as a program: embed the corpus with a group of ranks, compare, search, report.

Guarantees: every embedding is compared with that of the unsharded model in this process; the exit
code is 0 only if nothing was lost, doubled or wrong.

Left to others: how the calls are made (`job`); what a rank computes (the pipelines).
"""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from phalanx import PhalanxError

from .arguments import Options, parse
from .corpus import corpus
from .job import Job
from .model import Stage
from .outcome import Found, Outcome
from .progress import progress
from .tokens import Batch, batches, pad, tokenize
from .weights import ModelMissingError, Weights, model_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from phalanx import Executor

    from .corpus import Passage


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """One way of sharding the model.

    Attributes:
        name: What it is called.
        about: What it does, for ``--help``.
        most_ranks: Over how many ranks it can split the model.
        depth: How many calls to keep in flight, given the number of ranks.
        start: Starts the group, given the folder with the model.
        embed: Makes the call for one batch, given how often a death may send it again; its value
            is the batch's ticket and the embeddings.
    """

    name: str
    about: str
    most_ranks: int
    depth: Callable[[int], int]
    start: Callable[[str, Options], Executor[Any]]
    embed: Callable[[Executor[Any], Batch, int], Future[tuple[int, torch.Tensor]]]


def main(pipeline: Pipeline, argv: Sequence[str] | None = None) -> int:
    """Run *pipeline* as a program; return its exit code."""
    options = parse(pipeline.name, pipeline.about, pipeline.most_ranks, argv)
    try:
        outcome = run(pipeline, options)
    except (ModelMissingError, PhalanxError) as error:  # it did not even start
        print(error, file=sys.stderr)
        return 1
    print(outcome.to_json() if options.json else outcome.render())
    return 0 if outcome.ok else 1


def run(pipeline: Pipeline, options: Options) -> Outcome:
    """Embed the corpus with *pipeline* and with one process, and compare."""
    weights = Weights(model_folder())
    passages = corpus(options.passages)
    # The query goes last, through ranks that have been killed and are back.
    *tokens, question = tokenize(
        weights.folder, [*(passage.text for passage in passages), options.query]
    )
    work = list(batches(tokens, options.batch))
    work.append(Batch(len(work), [len(passages)], pad([question])))
    retries = options.kills + 1  # more deaths than there are kills cannot hit one call
    with pipeline.start(str(weights.folder), options) as group:
        with progress(pipeline.name, len(passages) + 1) as bar:
            job = Job(
                group,
                lambda batch: pipeline.embed(group, batch, retries),
                work,
                bar,
                width=weights.config.hidden_size,
                depth=pipeline.depth(options.ranks),
                kills=options.kills,
                seed=options.seed,
            )
            job.run()
        status = group.status()
    expected = reference(weights, work)
    kills = job.killer.kills
    pids = {kill.pid for kill in kills}
    return Outcome(
        pipeline=pipeline.name,
        ranks=options.ranks,
        passages=len(passages),
        seconds=job.seconds,
        calls=job.ledger.calls,
        kills_asked=options.kills,
        kills=len(kills),
        hits=sum(report.pid in pids and report.call is not None for report in status.reports),
        restarts=status.restarts,
        recoveries=[kill.recovery for kill in kills if kill.recovery is not None],
        lost=job.ledger.in_flight,
        twice=job.ledger.twice,
        difference=float((job.vectors - expected).abs().max()),
        query=options.query,
        nearest=nearest(job.vectors[-1], job.vectors[:-1], passages),
        errors=job.errors,
    )


def reference(weights: Weights, work: Sequence[Batch]) -> torch.Tensor:
    """Return the embeddings of all of *work*, by the whole model in this process."""
    total = sum(len(batch.rows) for batch in work)
    vectors = torch.zeros(total, weights.config.hidden_size)
    whole = Stage(weights)
    # A thread per batch, and none inside: torch's own threads spin while they wait for each other,
    # which on a machine with other work to do takes five times as long.
    with (
        progress("one process, to compare", total) as bar,
        ThreadPoolExecutor(
            os.cpu_count(), initializer=torch.set_num_threads, initargs=(1,)
        ) as pool,
    ):
        for batch, embedded in zip(work, pool.map(whole, (each.ids for each in work)), strict=True):
            vectors[batch.rows] = embedded
            bar.advance(len(batch.rows))
    return vectors


def nearest(
    query: torch.Tensor, vectors: torch.Tensor, passages: Sequence[Passage], count: int = 5
) -> list[Found]:
    """Return the passages whose embeddings are nearest to *query*, by cosine, best first."""
    scores = vectors @ query
    best = [int(row) for row in scores.topk(min(count, len(passages))).indices]
    return [Found(float(scores[row]), passages[row].name, passages[row].text) for row in best]
