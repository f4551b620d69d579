"""Train a sharded GPT while its ranks are killed; it ends with the weights of the undisturbed run.

Each rank holds a shard of every parameter (FSDP2). The text is the documentation of Python's
standard library. After each step the shards go into buffers that outlive the ranks; after a death
every rank gets its own shard back. Every step can be done again.

    python examples/train_fsdp.py --ranks 4 --kills 10
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import os
import random
import signal
import sysconfig
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

from phalanx import Intensity, RestartPolicy, Runtime, WorkerContext
from phalanx.integrations.torch import Plan, State, Trainer, Training, sample_indices

WIDTH, HEADS, LAYERS, LENGTH, BATCH = 128, 4, 3, 64, 4


class GPT(nn.Module):
    """Predicts the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, text: torch.Tensor) -> Any:
        """Return the logits of what follows each byte of *text*."""
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, device=text.device)
        return self.head(self.layers(self.token(text) + self.place.weight, mask, is_causal=True))


class GPTTrainer(Trainer):
    """One rank."""

    def __init__(self, plan: Plan, text: bytes) -> None:
        super().__init__(plan)
        letters = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self.samples = letters.unfold(0, LENGTH + 1, LENGTH)

    def build(self, ctx: WorkerContext) -> State:
        """Make everything that a step changes."""
        self.model = GPT().to(ctx.device)
        for part in (*self.model.layers.layers, self.model):
            fully_shard(part)
        optimizer = torch.optim.AdamW(self.model.parameters(), 1e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
        return State(model=self.model, optimizer=optimizer, schedule=schedule)

    def train_step(self, step: int) -> list[Any]:
        """Compute the gradients of *step*; return each rank's loss and samples."""
        split = {"world_size": self.ctx.world_size, "batch": BATCH, "samples": len(self.samples)}
        chosen = sample_indices(self.plan.seed, step, self.ctx.rank, **split)
        rows = self.samples[chosen].to(self.ctx.device)
        loss = cross_entropy(self.model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        every: list[Any] = [None] * self.ctx.world_size
        distributed.all_gather_object(every, (loss.item(), chosen))  # pyright: ignore[reportUnknownMemberType]  # torch's gap
        return every


def train(options: argparse.Namespace, text: bytes, kills: int) -> dict[str, Any]:
    """Train with so many *kills*; return what there is to tell."""
    chance = random.Random(options.seed)
    kill_in = set(chance.sample(range(2, options.steps), kills))
    losses, killed, used = list[float](), list[tuple[int, float]](), Counter[int]()

    def kill(step: int) -> None:
        while not (run.executor.exit_reason or step in dict(killed)):  # some may have no process
            pid = run.executor.ranks[chance.randrange(options.ranks)].pid
            with contextlib.suppress(ProcessLookupError):
                if pid is not None:
                    os.kill(pid, signal.SIGKILL)
                    killed.append((step, time.monotonic()))

    policy = RestartPolicy(survivors="keep", intensity=Intensity(1 + kills * options.ranks, 60.0))
    timers = list[threading.Timer]()
    runtime = Runtime(console=None)  # the reports of deaths are left out
    given: dict[str, Any] = {"args": (text,), "seed": options.seed, "runtime": runtime}
    with runtime, Training(GPTTrainer, options.ranks, sharded=True, policy=policy, **given) as run:
        for step in run.steps(options.steps):
            losses.append(sum(row[0] for row in step.result) / options.ranks)
            used.update(sample for row in step.result for sample in row[1])
            bar = "#" * (30 * step.number // options.steps)
            print(f"\r[{bar:30}] step {step.number} loss {losses[-1]:.3f} ", end="", flush=True)
            if step.number + 1 in kill_in:
                timers.append(threading.Timer(chance.uniform(0, 0.1), kill, [step.number + 1]))
                timers[-1].start()
        for timer in timers:
            timer.join()
        digest = run.digest()
    back, ends = [each.at for each in run.resumed], [at for _, at in killed]
    stalls = [min((at for at in back if at > end), default=end) - end for end in ends]
    told = {"hash": digest, "used": used, "losses": losses, "killed": killed, "stalls": stalls}
    return {**told, "redone": sum(each.redone for each in run.resumed)}


def main() -> int:
    """Train undisturbed, then with kills; return 0 if both end with the same bytes."""
    parser = argparse.ArgumentParser(description="Train a small GPT while its ranks are killed.")
    for name, default in (("--ranks", 2), ("--steps", 60), ("--kills", 3), ("--seed", 0)):
        parser.add_argument(name, type=int, default=default, help=f"default {default}")
    parser.add_argument("--plot", type=Path, default=Path("train.png"), help="of the loss")
    options = parser.parse_args()
    for name, low, high in (("ranks", 1, 64), ("steps", 2, 999), ("kills", 0, options.steps - 2)):
        if not low <= (value := getattr(options, name)) <= high:
            parser.error(f"--{name} {value}: give {low} to {high}")
    if not (options.plot.absolute().parent.is_dir() and options.plot.suffix == ".png"):
        parser.error(f"--plot {options.plot}: name a .png in a folder that is there")
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:80]
    text = "".join(ast.get_docstring(ast.parse(each.read_bytes())) or "" for each in sources)
    pyplot: Any = importlib.import_module("matplotlib.pyplot")  # or nothing is trained
    calm, got = (train(options, text.encode(), kills) for kills in (0, options.kills))
    lost, doubled = calm["used"] - got["used"], got["used"] - calm["used"]
    equal = got["hash"] == calm["hash"] and not lost and not doubled
    print("\nsteps  kills  done again  samples lost  doubled  stall per kill, s")
    row = options.steps, options.kills, got["redone"], lost.total(), doubled.total()
    print("{:5}{:7}{:12}{:14}{:9} ".format(*row), *(f"{each:.2f}" for each in got["stalls"]))
    print("hash", got["hash"][:32], "undisturbed", calm["hash"][:32])
    print("equal:", "yes" if equal else "NO")
    pyplot.plot(range(1, options.steps + 1), got["losses"])
    pyplot.vlines([step for step, _ in got["killed"]], 0, max(got["losses"]), "red", linewidth=0.5)
    pyplot.title("loss by step; red: a rank is killed")
    pyplot.savefig(options.plot)
    return 0 if equal else 1


if __name__ == "__main__":
    raise SystemExit(main())
