"""all-MiniLM-L6-v2 in plain torch: whole, a share of every layer, or a share of the layers.

Guarantees: the same code is the reference and every shard of it. A `Layer` that holds a share of
the heads and of the MLP returns the same as a whole one if *reduce* adds up the shares; a
`Stage` that holds some of the layers passes on what the next one takes.

Left to others: how shares are added up and hidden states travel (the pipelines).

Prior art: the column and row split of Megatron-LM (https://arxiv.org/abs/1909.08053), with one
sum after the attention and one after the MLP.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable

    from .weights import Weights

    Reduce = Callable[[torch.Tensor], torch.Tensor]

PAD = 0
"""The token that fills a batch up; it is never a word."""


def share(total: int, index: int, count: int) -> range:
    """Return which of *total* things belong to share *index* of *count*, as even as can be.

    The first share is never smaller than another: a pipeline whose first stage is its slowest
    keeps all stages in a call.
    """
    return range(-(-total * index // count), -(-total * (index + 1) // count))


def alone(partial: torch.Tensor) -> torch.Tensor:
    """Return *partial*: the sum over one share, which is the whole."""
    return partial


class Layer:
    """Layer *index*, or share *rank* of *count* of it.

    Args:
        weights: Where to read it from.
        index: Which layer.
        rank: Which share of its heads and of its MLP.
        count: Into how many shares it is split; at most the number of heads.
    """

    def __init__(self, weights: Weights, index: int, rank: int = 0, count: int = 1) -> None:
        config = weights.config
        heads = share(config.num_attention_heads, rank, count)
        self._heads = len(heads)
        self._width = config.hidden_size // config.num_attention_heads
        self._eps = config.layer_norm_eps
        columns = range(heads.start * self._width, heads.stop * self._width)
        inner = share(config.intermediate_size, rank, count)
        at = f"encoder.layer.{index}"
        # Column-parallel: each share makes its own heads and its own part of the MLP.
        self._qkv = [
            (weights.rows(f"{name}.weight", columns), weights.rows(f"{name}.bias", columns))
            for name in (f"{at}.attention.self.{part}" for part in ("query", "key", "value"))
        ]
        self._up = weights.rows(f"{at}.intermediate.dense.weight", inner)
        self._up_bias = weights.rows(f"{at}.intermediate.dense.bias", inner)
        # Row-parallel: each share gives a term of the sum; the bias is added once, to the sum.
        self._join = weights.columns(f"{at}.attention.output.dense.weight", columns)
        self._join_bias = weights.whole(f"{at}.attention.output.dense.bias")
        self._down = weights.columns(f"{at}.output.dense.weight", inner)
        self._down_bias = weights.whole(f"{at}.output.dense.bias")
        self._norms = [
            (weights.whole(f"{name}.weight"), weights.whole(f"{name}.bias"))
            for name in (f"{at}.attention.output.LayerNorm", f"{at}.output.LayerNorm")
        ]

    def __call__(
        self, hidden: torch.Tensor, blocked: torch.Tensor, reduce: Reduce = alone
    ) -> torch.Tensor:
        """Return the hidden states after this layer.

        Args:
            hidden: float32, (rows, tokens, hidden size).
            blocked: bool, (rows, 1, 1, tokens); true where a token is padding.
            reduce: Returns the sum of all shares' terms.
        """
        attended = reduce(self._attention(hidden, blocked)) + self._join_bias
        hidden = self._norm(hidden + attended, 0)
        return self._norm(hidden + reduce(self._mlp(hidden)) + self._down_bias, 1)

    def _attention(self, hidden: torch.Tensor, blocked: torch.Tensor) -> torch.Tensor:
        rows, tokens, _ = hidden.shape
        query, key, value = (
            functional.linear(hidden, weight, bias)
            .view(rows, tokens, self._heads, self._width)
            .transpose(1, 2)
            for weight, bias in self._qkv
        )
        scores = query @ key.transpose(2, 3) / self._width**0.5
        mixed = scores.masked_fill(blocked, float("-inf")).softmax(-1) @ value
        return functional.linear(mixed.transpose(1, 2).flatten(2), self._join)

    def _mlp(self, hidden: torch.Tensor) -> torch.Tensor:
        inner = functional.gelu(functional.linear(hidden, self._up, self._up_bias))
        return functional.linear(inner, self._down)

    def _norm(self, hidden: torch.Tensor, which: int) -> torch.Tensor:
        weight, bias = self._norms[which]
        return functional.layer_norm(hidden, hidden.shape[-1:], weight, bias, self._eps)


class Embeddings:
    """What turns token ids into the first hidden states."""

    def __init__(self, weights: Weights) -> None:
        self._words = weights.whole("embeddings.word_embeddings.weight")
        self._places = weights.whole("embeddings.position_embeddings.weight")
        # One passage is one segment: only the first token type occurs.
        self._segment = weights.whole("embeddings.token_type_embeddings.weight")[0]
        self._norm = weights.whole("embeddings.LayerNorm.weight")
        self._norm_bias = weights.whole("embeddings.LayerNorm.bias")
        self._eps = weights.config.layer_norm_eps

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """Return float32, (rows, tokens, hidden size) for *ids*, int64, (rows, tokens)."""
        hidden = self._words[ids] + self._segment + self._places[: ids.shape[1]]
        return functional.layer_norm(
            hidden, hidden.shape[-1:], self._norm, self._norm_bias, self._eps
        )


def padding(ids: torch.Tensor) -> torch.Tensor:
    """Return which tokens of *ids* nobody may look at, in the shape that a `Layer` takes."""
    return ids.eq(PAD)[:, None, None, :]


def pool(hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return one unit vector per row: the mean over its tokens, without the padding."""
    real = ids.ne(PAD).unsqueeze(-1)
    mean = (hidden * real).sum(1) / real.sum(1)
    return functional.normalize(mean, dim=1)


class Stage:
    """Some of the layers.

    The embeddings belong to the first of them, the pooling to the last.

    Args:
        weights: Where to read it from.
        part: Which layers; None for all of them, which is the whole model.
        rank: Which share of each layer.
        count: Into how many shares each layer is split.
    """

    def __init__(
        self, weights: Weights, part: range | None = None, rank: int = 0, count: int = 1
    ) -> None:
        last = weights.config.num_hidden_layers
        part = range(last) if part is None else part
        self.is_first = part.start == 0
        self.is_last = part.stop == last
        self._embeddings = Embeddings(weights) if self.is_first else None
        self._layers = [Layer(weights, index, rank, count) for index in part]

    @torch.inference_mode()
    def __call__(
        self, ids: torch.Tensor, hidden: torch.Tensor | None = None, reduce: Reduce = alone
    ) -> torch.Tensor:
        """Return one unit vector per row of *ids*, or what the next stage takes as *hidden*."""
        if self._embeddings is not None:
            hidden = self._embeddings(ids)
        assert hidden is not None
        blocked = padding(ids)
        for layer in self._layers:
            hidden = layer(hidden, blocked, reduce)
        return pool(hidden, ids) if self.is_last else hidden
