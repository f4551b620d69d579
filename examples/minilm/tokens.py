"""Text to token ids, and passages to batches.

Guarantees: every passage is in exactly one batch; batches hold passages of like length, longest
first, so that little is padding and the last batches, which some ranks wait for, are the short
ones; the same passages make the same batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from .model import PAD

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

MAX_TOKENS = 48
"""Where a passage is cut off. The model takes 512; this is room for a name, its signature and the
first sentence or two, which say what the passage is about."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Passages that are embedded in one call.

    Attributes:
        ticket: The number of the call, from 0. Workers hand it back with their answer.
        rows: Which passages these are.
        ids: int64, (rows, tokens of the longest).
    """

    ticket: int
    rows: list[int]
    ids: torch.Tensor


def tokenize(folder: Path, texts: Sequence[str]) -> list[list[int]]:
    """Return the token ids of each of *texts*, cut off at `MAX_TOKENS`."""
    from tokenizers import Tokenizer  # noqa: PLC0415  # only who has text needs it

    tokenizer: Any = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(MAX_TOKENS)
    return [list(encoding.ids) for encoding in tokenizer.encode_batch(list(texts))]


def pad(sequences: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return *sequences* as one tensor, filled up to the longest."""
    width = max(map(len, sequences))
    return torch.tensor([[*ids, *[PAD] * (width - len(ids))] for ids in sequences])


def batches(tokens: Sequence[Sequence[int]], size: int) -> Iterator[Batch]:
    """Yield *tokens*, one sequence per passage, in batches of *size*."""
    order = sorted(range(len(tokens)), key=lambda row: (-len(tokens[row]), row))
    for ticket, start in enumerate(range(0, len(order), size)):
        rows = order[start : start + size]
        yield Batch(ticket, rows, pad([tokens[row] for row in rows]))
