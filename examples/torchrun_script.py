"""A plain script for torchrun: DDP, its own checkpoint; it does not use phalanx.

    torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/torchrun_script.py
    phalanx torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/torchrun_script.py

Both run it unchanged. ``--die-at 50`` has rank 1 kill itself in the first round: all ranks are
restarted, and continue from the checkpoint.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import pydoc_data.topics
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

LENGTH = 64  # bytes that the model sees at once


class Text(Dataset[torch.Tensor]):
    """The documentation of the Python language, in pieces of LENGTH + 1 bytes."""

    def __init__(self) -> None:
        topics = pydoc_data.topics.topics
        text = "\n".join(topics[name] for name in sorted(topics)).encode()
        self.data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()

    def __len__(self) -> int:
        return (len(self.data) - 1) // LENGTH

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.data[index * LENGTH : (index + 1) * LENGTH + 1]


class Model(nn.Module):
    """A small causal transformer over bytes."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.places = nn.Embedding(LENGTH, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Return the logits of the next byte: float32, (batch, LENGTH, 256)."""
        hidden = self.bytes(text) + self.places(torch.arange(LENGTH, device=text.device))
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, device=text.device)
        logits: torch.Tensor = self.head(self.layers(hidden, mask=mask, is_causal=True))
        return logits


def save(path: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write the state so that *path* always holds a whole one."""
    state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, path.with_suffix(".new"))
    os.replace(path.with_suffix(".new"), path)  # noqa: PTH105  # atomic, in one call


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Return the step after the one that was saved last, with its state restored."""
    if not path.exists():
        return 0
    state: dict[str, Any] = torch.load(path, map_location="cpu")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"]) + 1


def digest(model: nn.Module) -> str:
    """Return a hash of all weights."""
    found = hashlib.sha256()
    for value in model.state_dict().values():
        found.update(value.detach().cpu().numpy().tobytes())
    return found.hexdigest()[:16]


def arguments() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description="Train a small language model.")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=16, help="pieces of text on each rank")
    parser.add_argument("--checkpoint", type=Path, default=Path("torchrun_script.pt"))
    parser.add_argument("--every", type=int, default=20, help="steps between two checkpoints")
    parser.add_argument("--die-at", type=int, default=-1, help="step before which rank 1 dies")
    options = parser.parse_args()
    for name, least in (("steps", 1), ("batch", 1), ("every", 1)):
        if (value := getattr(options, name)) < least:
            parser.error(f"--{name} {value}: give at least {least}")
    if "RANK" not in os.environ:
        parser.error("start it with: phalanx torchrun --nproc-per-node 2 torchrun_script.py")
    return options


@record
def main() -> None:
    """Train one rank."""
    options = arguments()
    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, local = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    torch.default_generator.manual_seed(0)
    model = Model().to(device)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=3e-3)
    first = load(options.checkpoint, model, optimizer)
    trained = DistributedDataParallel(model, device_ids=[local] if on_gpu else None)
    sampler: DistributedSampler[torch.Tensor] = DistributedSampler(Text(), drop_last=True)
    loader = DataLoader(Text(), options.batch, sampler=sampler, drop_last=True)
    restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if rank == 0:
        print(f"round {restarts}: from step {first}", flush=True)
    step, loss = 0, torch.zeros(())
    while step < options.steps:
        sampler.set_epoch(step // len(loader))
        for text in loader:
            if first <= step < options.steps:
                if step == options.die_at and rank == 1 and restarts == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                piece = text.to(device)
                logits = trained(piece[:, :-1])
                loss = nn.functional.cross_entropy(logits.flatten(0, 1), piece[:, 1:].flatten())
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                if rank == 0 and (step + 1) % options.every == 0:
                    print(f"step {step}: loss {loss.item():.4f}", flush=True)
                    save(options.checkpoint, step, model, optimizer)
            step += 1
    if rank == 0:
        print(f"{options.steps} steps, weights {digest(model)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
