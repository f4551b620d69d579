"""The documentation of Python's standard library in batches of token ids, and what to compare with.

Batches hold passages of similar length, longest first, so that little is padding. The same
installation of Python gives the same batches.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from .corpus import corpus
from .model import PAD, Stage
from .weights import Weights, model_folder

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

MAX_TOKENS = 48
"""Tokens after which a passage is cut off: a name, its signature and the first sentence or two."""

TOLERANCE = 1e-4
"""Largest difference between a sharded embedding and that of one process."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Passages that are embedded in one call.

    Attributes:
        number: Its place in the dataset, from 0.
        rows: The indices of its passages.
        ids: int64, (rows, tokens of the longest).
    """

    number: int
    rows: list[int]
    ids: torch.Tensor


class Dataset:
    """The first *count* passages and, as the last row, *query*.

    Attributes:
        folder: The folder of the model.
        passages: The passages.
        batches: All rows, *size* to a batch.
        vectors: float32, (passages + 1, hidden size): zeros, for a program to fill in.
    """

    def __init__(self, count: int, size: int = 32, query: str = "how do I open a file") -> None:
        self.folder = model_folder()
        self.passages = corpus(count)
        tokens = tokenize(self.folder, [*(each.text for each in self.passages), query])
        self.batches = list(batches(tokens, size))
        self._query = query
        self._weights = Weights(self.folder)
        self.vectors = torch.zeros(len(tokens), self._weights.config.hidden_size)

    def verdict(self) -> int:
        """Compare `vectors` with one process, print the answer to *query*; return an exit code."""
        difference = self._difference()
        print(f"largest difference from one process: {difference:.1e}")
        print(f"nearest to {self._query!r}:")
        for score, text in self.nearest():
            print(f"  {score:.2f}  {text[:88]}")
        return 0 if difference < TOLERANCE else 1

    def _difference(self) -> float:
        whole = Stage(self._weights)
        # One thread for each batch and none inside it: the threads of one operation spin.
        with ThreadPoolExecutor(
            os.cpu_count(), initializer=torch.set_num_threads, initargs=(1,)
        ) as pool:
            right = pool.map(whole, (batch.ids for batch in self.batches))
            return max(
                float((self.vectors[batch.rows] - vectors).abs().max())
                for batch, vectors in zip(self.batches, right, strict=True)
            )

    def nearest(self, count: int = 3) -> list[tuple[float, str]]:
        """Return the passages nearest to the query, best first: cosine and text."""
        scores = self.vectors[:-1] @ self.vectors[-1]
        best = [int(row) for row in scores.topk(min(count, len(self.passages))).indices]
        return [(float(scores[row]), self.passages[row].text) for row in best]


def tokenize(folder: Path, texts: Sequence[str]) -> list[list[int]]:
    """Return the token ids of each of *texts*, cut off at `MAX_TOKENS`."""
    from tokenizers import Tokenizer  # noqa: PLC0415  # ranks do not need it

    tokenizer: Any = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(MAX_TOKENS)
    return [list(encoding.ids) for encoding in tokenizer.encode_batch(list(texts))]


def batches(tokens: Sequence[Sequence[int]], size: int) -> Iterator[Batch]:
    """Yield *tokens*, one sequence per passage, in batches of *size*."""
    order = sorted(range(len(tokens)), key=lambda row: (-len(tokens[row]), row))
    for number, start in enumerate(range(0, len(order), size)):
        rows = order[start : start + size]
        yield Batch(number, rows, pad([tokens[row] for row in rows]))


def pad(sequences: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return *sequences* as one tensor, filled up to the longest."""
    width = max(map(len, sequences))
    return torch.tensor([[*ids, *[PAD] * (width - len(ids))] for ids in sequences])
