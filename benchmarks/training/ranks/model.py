"""What every system trains: a small GPT; its samples are a function of step and rank."""

from __future__ import annotations

import hashlib
import sysconfig
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .notes import Asked

_SAMPLES, _STRIDE = 100_003, 48_271  # a prime, so that no sample comes twice before all have come
LENGTH, BATCH = 64, 4  # bytes of a sample, samples of a rank and step: as in examples/train_ddp.py
_dist: Any = distributed  # its types are partly unknown


class GPT(nn.Module):
    """A small one, over bytes; without dropout, so that it draws no random numbers."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(256, width), nn.Embedding(LENGTH, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)

    def forward(self, text: torch.Tensor) -> Any:
        """Return the logits."""
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        return self.head(self.layers(self.token(text) + self.place.weight, mask, is_causal=True))


def make(asked: Asked) -> tuple[Any, torch.optim.Optimizer]:
    """Return model and optimizer, alike on all ranks."""
    torch.default_generator.manual_seed(0)
    model = GPT(asked.width, asked.layers)
    if asked.sharded:
        for part in (*model.layers.layers, model):
            fully_shard(part)
    return model, torch.optim.AdamW(model.parameters(), 1e-3)


def samples_of(step: int, rank: int, ranks: int) -> list[int]:
    """Return the samples of *rank* in *step*; from 1, as 0 stands for a rank that took no part."""
    first = ((step - 1) * ranks + rank) * BATCH
    return [(first + i) * _STRIDE % _SAMPLES + 1 for i in range(BATCH)]


@cache
def _text() -> torch.Tensor:
    """Return the reference of the language, as Python has it for ``help``."""
    path = Path(sysconfig.get_path("stdlib"), "pydoc_data", "topics.py")
    return torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)


def all_reduce(tensor: torch.Tensor) -> None:
    """Add it up over the ranks."""
    _dist.all_reduce(tensor)


def learn(
    net: Any,
    step: int,
    rank: int,
    ranks: int,
    *,
    add_up: Callable[[torch.Tensor], object] = all_reduce,
    stop: bool = False,
) -> tuple[list[int], bool]:
    """Compute the gradients; return the samples of all ranks, and whether any has *stop*."""
    chosen = samples_of(step, rank, ranks)
    text = _text()[torch.tensor(chosen)[:, None] + torch.arange(LENGTH + 1)].long()
    logits = net(text[:, :-1]).flatten(0, 1)
    torch.autograd.backward(nn.functional.cross_entropy(logits, text[:, 1:].flatten()))
    used = torch.zeros(ranks * BATCH + 1, dtype=torch.int64)
    used[rank * BATCH : (rank + 1) * BATCH] = torch.tensor(chosen)
    used[-1] = stop
    add_up(used)
    added: Any = used  # the type of tolist is unknown
    every: list[int] = added.tolist()
    return every[:-1], every[-1] > 0


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Return a hash of parameters and optimizer states, of what this rank holds of them."""
    whole = hashlib.sha256()
    for parameter in model.parameters():
        state: dict[str, torch.Tensor] = optimizer.state[parameter]
        tensors: Sequence[torch.Tensor] = (parameter, *(state[key] for key in sorted(state)))
        for tensor in tensors:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            whole.update(local.detach().contiguous().numpy().tobytes())
    return whole.hexdigest()
