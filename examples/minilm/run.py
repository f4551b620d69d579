"""A pipeline as a program: embed the corpus with a group of ranks, compare, search, report.

Guarantees: every embedding is compared with that of the unsharded model in this process; the exit
code is 0 only if nothing was lost, doubled or wrong.

Left to others: how the calls are made (`job`); what a rank computes (the pipelines).
"""

from __future__ import annotations

import math
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from phalanx import Emitted, ExitKind, PhalanxError

from .arguments import BOTH, Options, parse
from .corpus import corpus
from .job import Job
from .model import Stage
from .outcome import Found, Outcome, Way
from .progress import progress
from .tokens import Batch, batches, pad, tokenize
from .weights import ModelMissingError, Weights, model_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
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
        ways: The ways in which its group can recover, by name, and what they mean; empty for one.
    """

    name: str
    about: str
    most_ranks: int
    depth: Callable[[int], int]
    start: Callable[[str, Options], Executor[Any]]
    embed: Callable[[Executor[Any], Batch, int], Future[tuple[int, torch.Tensor]]]
    ways: Mapping[str, str] = field(default_factory=dict[str, str])


LOADED = "weights loaded"
"""What a rank emits when it has loaded its weights, where that is counted."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the work, and the way in which its group recovers."""

    options: Options
    work: list[Batch]


def main(pipeline: Pipeline, argv: Sequence[str] | None = None) -> int:
    """Run *pipeline* as a program; return its exit code."""
    options = parse(pipeline.name, pipeline.about, pipeline.most_ranks, argv, pipeline.ways)
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
    vectors = torch.zeros(len(passages) + 1, weights.config.hidden_size)
    ran = [
        (part, run_part(pipeline, part, str(weights.folder), vectors))
        for part in parts(pipeline, options, work)
    ]
    expected = reference(weights, work)
    return Outcome(
        pipeline=pipeline.name,
        ranks=options.ranks,
        passages=len(passages),
        seconds=sum(result.job.seconds for _, result in ran),
        calls=sum(result.job.ledger.calls for _, result in ran),
        kills_asked=options.kills,
        kills=sum(len(result.job.killer.kills) for _, result in ran),
        hits=sum(result.hits for _, result in ran),
        restarts=sum(result.restarts for _, result in ran),
        recoveries=[seconds for _, result in ran for seconds in result.recoveries],
        lost=sum(result.job.ledger.in_flight for _, result in ran),
        twice=sum(result.job.ledger.twice for _, result in ran),
        difference=float((vectors - expected).abs().max()),
        query=options.query,
        nearest=nearest(vectors[-1], vectors[:-1], passages),
        errors=[error for _, result in ran for error in result.job.errors],
        ways=[
            Way(
                name=part.options.recover,
                meaning=pipeline.ways[part.options.recover],
                kills=len(result.job.killer.kills),
                recoveries=result.recoveries,
                loads=result.loads,
                untold=result.untold,
            )
            for part, result in ran
            if pipeline.ways
        ],
    )


def parts(pipeline: Pipeline, options: Options, work: list[Batch]) -> Iterator[Part]:
    """Divide *work* and the kills among the ways in which the group is to recover."""
    ways = list(pipeline.ways) if options.recover == BOTH else [options.recover]
    size = math.ceil(len(work) / len(ways))
    left = options.kills
    for index, way in enumerate(ways):
        kills = math.ceil(left / (len(ways) - index))
        left -= kills
        mine = work[index * size : (index + 1) * size]
        yield Part(replace(options, recover=way, kills=kills), mine)


@dataclass(frozen=True, slots=True)
class PartResult:
    """What became of one part; see `Outcome` and `Way` for the numbers."""

    job: Job
    hits: int
    restarts: int
    loads: int
    untold: int

    @property
    def recoveries(self) -> list[float]:
        """Seconds from each kill until the group was whole again."""
        return [kill.recovery for kill in self.job.killer.kills if kill.recovery is not None]


def run_part(pipeline: Pipeline, part: Part, folder: str, vectors: torch.Tensor) -> PartResult:
    """Embed one part of the work with a group of its own, into *vectors*."""
    options = part.options
    retries = options.kills + 1  # more deaths than there are kills cannot hit one call
    loaded: list[int] = []

    def hear(event: object) -> None:
        # Word of a first load may come after everybody is ready: it is none of those counted here.
        if isinstance(event, Emitted) and event.value == LOADED and event.incarnation > 1:
            loaded.append(event.rank)

    name = f"{pipeline.name} ({options.recover})" if options.recover else pipeline.name
    with pipeline.start(folder, options) as group:
        group.events(hear)
        with progress(name, sum(len(batch.rows) for batch in part.work)) as bar:
            job = Job(
                group,
                lambda batch: pipeline.embed(group, batch, retries),
                part.work,
                vectors,
                bar,
                depth=pipeline.depth(options.ranks),
                kills=options.kills,
                seed=options.seed,
            )
            job.run()
        status = group.status()
    pids = {kill.pid for kill in job.killer.kills}
    hits = sum(report.pid in pids and report.call is not None for report in status.reports)
    untold = sum(report.reason.kind is ExitKind.UNRESPONSIVE for report in status.reports)
    return PartResult(job, hits, status.restarts, len(loaded), untold)


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
