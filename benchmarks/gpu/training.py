"""E7: training through kills on two NCCL ranks that share a GPU, in bfloat16, bit for bit.

A random rank is killed every few seconds; then as many steps undisturbed must give the same hash
and the same results. Ranks on one GPU take turns: the seconds of a step say nothing of NCCL.
"""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from benchmarks.training.ranks.model import GPT
from phalanx import Launch, Runtime
from phalanx.actors import Devices
from phalanx.integrations.torch import State, Trainer, Training, replicate, sample_indices

from .device import NCCL_ON_ONE_GPU, rank_environment

if TYPE_CHECKING:
    from phalanx import WorkerContext
    from phalanx.integrations.torch import Plan

    from .record import Record

_RANKS = 2
_LENGTH = 64


class CausalGPT(GPT):
    """The model of `benchmarks.training`, with its mask on the device and in the model's type."""

    def forward(self, text: torch.Tensor) -> Any:
        """Return the logits."""
        mask = nn.Transformer.generate_square_subsequent_mask(
            text.shape[1], device=text.device, dtype=self.place.weight.dtype
        )
        return self.head(self.layers(self.token(text) + self.place.weight, mask, is_causal=True))


class Learner(Trainer):
    """A rank that learns in bfloat16."""

    def __init__(self, plan: Plan, width: int, layers: int) -> None:
        super().__init__(plan)
        self._size = width, layers

    def build(self, ctx: WorkerContext) -> State:
        """Make the model."""
        self.model = CausalGPT(*self._size).to(ctx.device, torch.bfloat16)
        return State(model=self.model, optimizer=torch.optim.AdamW(self.model.parameters(), 1e-3))

    def join(self, ctx: WorkerContext) -> None:  # noqa: ARG002
        """Wrap it."""
        self.net = replicate(self.model)

    def train_step(self, step: int) -> float:
        """Compute the gradients; return the sum of the ranks' losses."""
        ctx = self.ctx
        chosen = sample_indices(
            self.plan.seed, step, ctx.rank, world_size=ctx.world_size, batch=8, samples=100_000
        )
        text = (torch.tensor(chosen)[:, None] * 31 + torch.arange(_LENGTH + 1) * 7) % 256
        text = text.to(ctx.device)
        logits = self.net(text[:, :-1]).flatten(0, 1).float()
        loss = nn.functional.cross_entropy(logits, text[:, 1:].flatten())
        torch.autograd.backward(loss)
        total = loss.detach().clone()
        collective: Any = torch.distributed  # its types are partly unknown
        collective.all_reduce(total)
        return float(total)


def run(record: Record) -> None:
    """Train with kills, and then without."""
    kills = record.choose(50, 2)
    chance = random.Random(7)
    with Runtime(console=None, stream=False) as runtime:
        with _training(record, runtime) as run:
            losses = [next(run.steps(1)).result]
            while len(record.rows("kills")) < kills and record.has_time(120.0):
                losses += _kill_once(record, run, chance)
            steps, digest = len(losses), run.digest()
            redone = sum(each.redone for each in run.resumed)
            sources = [each.source for each in run.resumed]
            record.set(steps=steps, digest=digest, redone=redone, sources=sources)
        record.summarize("kills", "seconds")
        with _training(record, runtime) as run:
            calm = list[float]()
            began = time.monotonic()
            for step in run.steps(steps):
                calm.append(step.result)
                if not record.has_time():
                    break
            whole = len(calm) == steps
            record.set(
                undisturbed_steps=len(calm),
                step_seconds=(time.monotonic() - began) / len(calm),
                equal=whole and run.digest() == digest,
                equal_losses=calm == losses[: len(calm)],
            )


def _training(record: Record, runtime: Runtime) -> Training[Learner]:
    variables = {**NCCL_ON_ONE_GPU, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    preload = ("torch", "torch._dynamo", "phalanx.integrations.torch")
    return Training(
        Learner,
        _RANKS,
        args=record.choose((512, 6), (32, 1)),
        threads=1,
        timeout=60.0,
        devices="cpu" if record.rehearsal else Devices(names="cuda", per_rank=1 / _RANKS),
        launch=Launch(env=variables, rank_env=rank_environment(_RANKS), preload=preload),
        runtime=runtime,
    )


def _kill_once(record: Record, run: Training[Learner], chance: random.Random) -> list[float]:
    """Kill a rank within a step; return the results of the steps until it is done."""
    losses = list[float]()
    calm = chance.randrange(1, 6)
    for step in run.steps(run.step + calm):
        losses.append(step.result)
    victim = chance.randrange(_RANKS)
    pid = run.executor.ranks[victim].pid
    known = len(run.resumed)
    future = run.executor.collective_rpc(
        "advance", args=(run.step + 1,), unique_reply_rank=0, retries=100, non_block=True
    )
    time.sleep(chance.uniform(0.0, 0.1))  # somewhere in the step
    at = time.monotonic()
    if pid is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    future.result(120.0)
    # Two steps: the death may come after the first.
    losses += [step.result for step in run.steps(run.step + 2)]
    back = [each.at for each in run.resumed[known:]]
    record.add("kills", victim=victim, seconds=min(back) - at if back else None)
    return losses
