"""What a trainer may not hold: objects that change with each use and are in no state.

A run that drew from one of them would go on with other samples or other numbers after a death.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Sampler, SequentialSampler

from .errors import HiddenState

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_PURE = "take samples by phalanx.integrations.torch.sample_indices(seed, step, rank, ...)"
_GIVE = "give it to State(...)"


def check_kept(name: str, value: object) -> None:
    """Raise `HiddenState` if *value* draws from a state that no process can be given back."""
    kind = type(cast("Any", value)).__qualname__
    if isinstance(value, DataLoader):
        raise HiddenState(name, "DataLoader", _PURE)
    if isinstance(value, Sampler) and not isinstance(value, SequentialSampler):
        raise HiddenState(name, kind, _PURE)
    if isinstance(value, Iterator):
        raise HiddenState(name, kind, _PURE)


def check_attributes(owner: Any, kept: Iterable[Any], allowed: Iterable[str]) -> None:
    """Look for hidden state in the attributes of *owner*, and in lists and dicts of them.

    Args:
        owner: The trainer.
        kept: The objects that are in its `State`.
        allowed: Attributes that the user says have no state that matters.

    Raises:
        HiddenState: there is some.
    """
    known = {id(each) for each in kept}
    skipped = set(allowed)
    for name, part in attributes_of(owner):
        if name not in skipped and id(part) not in known:
            check_kept(name, part)
            _check_drawn(name, part)


def attributes_of(owner: Any) -> Iterator[tuple[str, object]]:
    """Yield the attributes of *owner*, and what is in lists and dicts of them, by its name."""
    attributes = cast("dict[str, object]", vars(owner))
    for name, value in attributes.items():
        parts: Iterable[object] = (value,)
        if isinstance(value, dict):
            parts = cast("Mapping[object, object]", value).values()
        elif isinstance(value, (list, tuple)) and len(cast("list[object]", value)) < _LONG:
            parts = cast("list[object]", value)
        yield from ((name, part) for part in parts)


_LONG = 1000  # a list that long holds data


def _check_drawn(name: str, value: object) -> None:
    numpy = sys.modules.get("numpy")
    drawn: tuple[type, ...] = (random.Random, torch.Generator)
    if numpy is not None:
        drawn += (numpy.random.Generator, numpy.random.RandomState)
    if isinstance(value, drawn):
        raise HiddenState(
            name,
            type(cast("Any", value)).__qualname__,
            f"{_GIVE}, or draw from torch's own numbers, which are seeded for each step",
        )
    if isinstance(value, (torch.optim.Optimizer, LRScheduler)):
        raise HiddenState(name, type(cast("Any", value)).__qualname__, _GIVE)
