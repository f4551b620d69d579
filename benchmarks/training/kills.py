"""What training through kills costs, and whether it stays exact.

For each form: the cost of protection, a step with it and a step without in turns; then a run in
which a random rank is killed again and again; then as many steps undisturbed, whose hash is
compared. ETTR is the steps that were done, times the undisturbed median step, over the wall time.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard

from benchmarks.harness.stats import of
from benchmarks.harness.tables import seconds, table, with_interval
from phalanx import Executor, Launch, Runtime, WorkerActor
from phalanx.integrations.torch import (
    State,
    Trainer,
    Training,
    replicate,
    sample_indices,
    seed_step,
)

if TYPE_CHECKING:
    import argparse

    from benchmarks.harness.stats import Samples
    from phalanx import WorkerContext
    from phalanx.integrations.torch import Plan

_SAMPLES, _LENGTH = 100_000, 64
_PRELOAD = ("torch", "torch._dynamo", "phalanx.integrations.torch")
_FORMS: dict[str, dict[str, Any]] = {  # the names are those of `command`
    "DDP, survivors kept": {"survivors": "keep"},
    "DDP, all anew": {"survivors": "restart"},
    "FSDP2, survivors kept": {"survivors": "keep", "sharded": True},
}


class GPT(nn.Module):
    """A small one, over bytes."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(256, width), nn.Embedding(_LENGTH, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)

    def forward(self, text: torch.Tensor) -> Any:
        """Return the logits."""
        mask = nn.Transformer.generate_square_subsequent_mask(_LENGTH)
        return self.head(self.layers(self.token(text) + self.place.weight, mask, is_causal=True))


def _make(width: int, layers: int, *, sharded: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = GPT(width, layers)
    if sharded:
        for part in (*model.layers.layers, model):
            fully_shard(part)
    return model, torch.optim.AdamW(model.parameters(), 1e-3)


def _learn(net: Any, seed: int, step: int, rank: int, ranks: int) -> list[Any]:
    """Compute the gradients of *step*; return the samples of all ranks."""
    chosen = sample_indices(seed, step, rank, world_size=ranks, batch=2, samples=_SAMPLES)
    text = (torch.tensor(chosen)[:, None] * 31 + torch.arange(_LENGTH + 1) * 7) % 256
    logits = net(text[:, :-1]).flatten(0, 1)
    torch.autograd.backward(nn.functional.cross_entropy(logits, text[:, 1:].flatten()))
    every: list[Any] = [None] * ranks
    collective: Any = distributed  # its types are partly unknown
    collective.all_gather_object(every, chosen)
    return every


class Protected(Trainer):
    """A rank whose state outlives it."""

    def __init__(self, plan: Plan, width: int, layers: int) -> None:
        super().__init__(plan)
        self._size = width, layers

    def build(self, ctx: WorkerContext) -> State:  # noqa: ARG002
        """Make the model."""
        self.model, optimizer = _make(*self._size, sharded=self.plan.sharded)
        return State(model=self.model, optimizer=optimizer)

    def join(self, ctx: WorkerContext) -> None:  # noqa: ARG002
        """Wrap it."""
        self.net = self.model if self.plan.sharded else replicate(self.model)

    def train_step(self, step: int) -> list[Any]:
        """Learn."""
        return _learn(self.net, self.plan.seed, step, self.ctx.rank, self.ctx.world_size)


class Unprotected(WorkerActor):
    """The same without any of it."""

    def __init__(self, width: int, layers: int, threads: int, *, sharded: bool) -> None:
        self._size, self._threads, self._sharded = (width, layers), threads, sharded

    def on_start(self, ctx: WorkerContext) -> None:
        """Make the model."""
        torch.set_num_threads(self._threads)
        seed_step(0, 0, 0)
        ctx.init_process_group("gloo")
        model, self.optimizer = _make(*self._size, sharded=self._sharded)
        self.net: Any = model if self._sharded else nn.parallel.DistributedDataParallel(model)

    def advance(self, step: int) -> list[Any]:
        """Learn."""
        self.optimizer.zero_grad()
        used = _learn(self.net, 0, step, self.ctx.rank, self.ctx.world_size)
        self.optimizer.step()
        return used


@dataclass(slots=True)
class Found:
    """What a run of one form found; times in seconds.

    Attributes:
        overhead: Shares of a step, one for each round.
        ettr: The share of the wall time that made progress.
    """

    form: str
    ranks: int
    steps: int = 0
    kills: int = 0
    redone: int = 0
    lost: int = 0
    doubled: int = 0
    stalls: list[float] = field(default_factory=list[float])
    overhead: list[float] = field(default_factory=list[float])
    ettr: float = 0.0
    equal: bool = False


def measure(form: str, ranks: int, asked: argparse.Namespace) -> Found:
    """Measure one form."""
    found = Found(form, ranks)
    options = _FORMS[form]
    size = asked.width, asked.layers
    with Runtime(console=None, stream=False) as runtime:
        given: dict[str, Any] = {"args": size, "runtime": runtime, "threads": 1, **options}
        found.overhead = _overhead(ranks, asked.rounds, given)
        with Training(Protected, ranks, **given) as run:
            results, wall = _disturbed(run, found, asked)
            digest = run.digest()
        with Training(Protected, ranks, **given) as run:
            times, calm = [time.monotonic()], list[Any]()
            for step in run.steps(found.steps):
                times.append(time.monotonic())
                calm.append(step.result)
            found.equal = run.digest() == digest
    taken = [after - before for before, after in pairwise(times)]
    found.ettr = found.steps * statistics.median(taken) / wall
    used, right = (
        Counter(sample for rows in each for row in rows for sample in row)
        for each in (results, calm)
    )
    found.lost, found.doubled = (right - used).total(), (used - right).total()
    return found


def _overhead(ranks: int, rounds: int, given: dict[str, Any]) -> list[float]:
    """Do steps with protection and without, in turns; return what it adds, as shares."""
    shares = list[float]()
    sharded = given.get("sharded", False)
    bare = Executor(
        Unprotected,
        ranks,
        args=(*given["args"], 1),
        kwargs={"sharded": sharded},
        launch=Launch(preload=_PRELOAD),
        runtime=given["runtime"],
    )
    with bare, Training(Protected, ranks, **given) as run:
        steps = run.steps(rounds + 3)
        for number in range(1, rounds + 4):
            began = time.monotonic()
            next(steps)
            middle = time.monotonic()
            bare.collective_rpc("advance", args=(number,), unique_reply_rank=0)
            ended = time.monotonic()
            if number > 3:  # the first ones make buffers and optimizer states
                shares.append((middle - began) / (ended - middle) - 1)
    return shares


def _disturbed(
    run: Training[Protected], found: Found, asked: argparse.Namespace
) -> tuple[list[Any], float]:
    """Train for the time asked, while ranks are killed; return the results and the wall time."""
    chance = random.Random(asked.seed)
    ended = threading.Event()
    killed, results = list[float](), list[Any]()

    def kill() -> None:
        while not ended.wait(asked.cadence):
            pid = run.executor.ranks[chance.randrange(found.ranks)].pid
            if pid is not None:
                with suppress(ProcessLookupError):
                    at = time.monotonic()
                    os.kill(pid, signal.SIGKILL)
                    killed.append(at)

    next(run.steps(1))
    killer = threading.Thread(target=kill)
    began = time.monotonic()
    killer.start()
    results.append(run.executor.collective_rpc("advance", args=(1,), unique_reply_rank=0))
    for step in run.steps(1 << 40):
        results.append(step.result)
        if time.monotonic() - began >= asked.seconds:
            break
    wall = time.monotonic() - began
    ended.set()
    killer.join()
    run.executor.collective_rpc("position", retries=100)  # the last death may be under way
    back = [each.at for each in run.resumed]
    found.steps, found.kills = len(results), len(killed)
    found.redone = sum(each.redone for each in run.resumed)
    found.stalls = [min(at for at in back if at > when) - when for when in killed]
    return results, wall


def render(found: list[Found]) -> str:
    """Return the table."""
    heads = [
        *("form", "ranks", "steps", "kills", "ETTR", "stall, median", "p99", "done again"),
        *("lost, doubled", "protection costs", "hash equal"),
    ]
    rows: list[list[str]] = []
    for each in found:
        stalls = sorted(each.stalls)
        costs: Samples | None = of([100 * share for share in each.overhead])
        rows.append(
            [
                *(each.form, str(each.ranks), str(each.steps), str(each.kills)),
                f"{100 * each.ettr:.1f} %",
                seconds(statistics.median(stalls) if stalls else None),
                seconds(stalls[min(len(stalls) - 1, int(0.99 * len(stalls)))] if stalls else None),
                *(str(each.redone), f"{each.lost}, {each.doubled}"),
                f"{with_interval(costs)} %",
                "yes" if each.equal else "NO",
            ]
        )
    return table(heads, rows)
