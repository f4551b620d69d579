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
_SEEDED = "draw from the numbers of torch, random or numpy.random, which are seeded for each step"


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
    for name, part in attributes_of(owner, {id(each) for each in kept}, allowed):
        check_kept(name, part)
        _check_drawn(name, part)


def attributes_of(
    owner: Any, known: Iterable[int] = (), skipped: Iterable[str] = ()
) -> Iterator[tuple[str, object]]:
    """Yield the attributes of *owner*, and what is in them, by name.

    That is what lists and dicts have, and the attributes of objects whose classes are the user's:
    those of the package, or the script, that the class of *owner* is from.

    Args:
        owner: The trainer.
        known: Objects, by `id`, that are left out with all that is in them.
        skipped: Names that are left out likewise.
    """
    home = _home_of(owner)
    seen, left_out = {id(owner), *known}, set(skipped)
    rest: list[tuple[str, Any]] = [("", owner)]
    while rest:
        before, inner = rest.pop()
        for key, value in cast("dict[str, object]", vars(inner)).items():
            name = f"{before}{key}"
            if name in left_out:
                continue
            for part in _parts_of(value):
                if id(part) in seen:
                    continue
                yield name, part
                if _home_of(part) == home and isinstance(getattr(part, "__dict__", None), dict):
                    seen.add(id(part))
                    rest.append((f"{name}.", part))


def _parts_of(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return cast("Mapping[object, object]", value).values()
    if isinstance(value, (list, tuple)):
        parts = cast("list[object]", value)
        return parts if len(parts) < _LONG else ()
    return (value,)


def _home_of(value: Any) -> str:
    """Return the package or script that the class of *value* is from."""
    return str(type(value).__module__).partition(".")[0]


_LONG = 1000  # a list that long holds data


def _check_drawn(name: str, value: object) -> None:
    numpy = sys.modules.get("numpy")
    drawn: tuple[type, ...] = (random.Random, torch.Generator)
    if numpy is not None:
        drawn += (numpy.random.Generator, numpy.random.RandomState)
    if isinstance(value, drawn):
        remedy = f"{_GIVE}, or {_SEEDED}" if isinstance(value, torch.Generator) else _SEEDED
        raise HiddenState(name, type(cast("Any", value)).__qualname__, remedy)
    if isinstance(value, (torch.optim.Optimizer, LRScheduler)):
        raise HiddenState(name, type(cast("Any", value)).__qualname__, _GIVE)
