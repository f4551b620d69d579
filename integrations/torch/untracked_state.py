"""Detection of hidden state in a trainer: objects that change with each use and are in no state.

A run that draws from one of them would continue with other samples or numbers after a death.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections import deque
from collections.abc import Iterator
from functools import partial
from types import BuiltinMethodType, FunctionType, MethodType, MethodWrapperType, SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Sampler, SequentialSampler

from .errors import HiddenState
from .packing import local_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

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


def check_attributes(
    owner: Any,
    kept: Iterable[Any],
    allowed: Collection[str],
    tensors: Iterable[torch.Tensor] = (),
) -> Untouched:
    """Look for hidden state in what *owner* has; return its tensors that no step may change.

    Args:
        owner: The trainer.
        kept: The objects that are in its `State`.
        allowed: Attributes that the user says have no state that matters.
        tensors: Those in its `State`, of which it may have views.

    Raises:
        HiddenState: there is some.
    """
    found: list[tuple[str, torch.Tensor]] = []
    for name, part in attributes_of(owner, kept, allowed):
        check_kept(name, part)
        _check_drawn(name, part)
        found.extend(_tensors_of(name, part))
    known = {_memory_of(each) for each in tensors}
    return Untouched(
        (name, tensor)
        for name, tensor in found
        if name not in allowed and not tensor.is_inference() and _memory_of(tensor) not in known
    )


class Untouched:
    """Tensors by name that a trainer has and its `State` has not: no step may change one."""

    def __init__(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._versions = [(name, each, each._version) for name, each in tensors]  # noqa: SLF001

    def check(self) -> None:
        """Raise `HiddenState` if one was changed in place."""
        for name, tensor, version in self._versions:
            if tensor._version != version:  # noqa: SLF001
                remedy = f"{_GIVE}, or name it in without_state if no later step depends on it"
                raise HiddenState(name, "tensor that a step changed", remedy)


def _tensors_of(name: str, part: object) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(part, torch.Tensor):
        yield name, part
    elif isinstance(part, torch.nn.Module):
        tensors = (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False))
        yield from ((f"{name}.{inner}", tensor) for inner, tensor in tensors)


def _memory_of(tensor: torch.Tensor) -> int:
    local = local_of(tensor)
    return local.untyped_storage().data_ptr() if local.layout is torch.strided else id(local)


def attributes_of(
    owner: Any, kept: Iterable[Any] = (), allowed: Iterable[str] = ()
) -> Iterator[tuple[str, object]]:
    """Yield the attributes of *owner*, and what is in them, by name.

    That is what containers and closures have, what a method is bound to, what modules have beside
    their tensors, and the attributes of objects whose classes are the user's: those of the package
    or script that *owner* is from.

    Args:
        owner: The trainer.
        kept: Left out; of a module what is in it is yielded.
        allowed: Names that are left out, with all that is in them.
    """
    package, left_out = _package_of(owner.__class__), set(allowed)
    known = {id(each) for each in kept}
    seen: set[int] = set()
    rest: list[tuple[str, Any]] = [("", owner)]
    while rest:
        before, value = rest.pop()
        if before in left_out or id(value) in seen:
            continue
        seen.add(id(value))
        if before and id(value) not in known:
            yield before, value
        elif before and not isinstance(value, torch.nn.Module):
            continue
        rest.extend(_parts_of(before, value, package))


def _parts_of(name: str, value: Any, package: str) -> Iterator[tuple[str, object]]:
    if isinstance(value, (dict, list, tuple, set, frozenset, deque)):
        container = cast("Any", value)
        values: Iterable[object] = container.values() if isinstance(value, dict) else container
        if len(container) < _LONG:
            yield from ((name, each) for each in values)
    elif isinstance(value, FunctionType):
        for cell in value.__closure__ or ():
            with contextlib.suppress(ValueError):  # it is empty as yet
                yield name, cell.cell_contents
    elif isinstance(value, (MethodType, BuiltinMethodType, MethodWrapperType)):
        yield name, value.__self__
    elif isinstance(value, partial):
        yield from ((name, each) for each in (value.func, *value.args, *value.keywords.values()))
    elif isinstance(value, (torch.nn.Module, SimpleNamespace)) or (
        any(_package_of(base) == package for base in type(value).__mro__)
    ):
        dot = f"{name}." if name else ""
        for key, each in _attributes(value).items():
            yield f"{dot}{key}", each


def _attributes(value: Any) -> dict[str, object]:
    """Return the attributes of *value* and of its class, but for the tensors of a module."""
    found: dict[str, object] = {}
    for base in reversed(type(value).__mro__):
        members = vars(base)
        found |= {key: each for key, each in members.items() if isinstance(each, Iterator)}
        slots = members.get("__slots__", ())
        for key in (slots,) if isinstance(slots, str) else slots:
            found[key] = getattr(value, key, None)
    found |= getattr(value, "__dict__", {})
    if isinstance(value, torch.nn.Module):
        found |= cast("dict[str, object]", found.pop("_modules", {}))
        for tensors in ("_parameters", "_buffers"):
            found.pop(tensors, None)
    return found


_LONG = 1000  # a container that large holds data


def _package_of(kind: type) -> str:
    """Return the package or script that *kind* is from."""
    return str(kind.__module__).partition(".")[0]


def _check_drawn(name: str, value: object) -> None:
    numpy = sys.modules.get("numpy")
    drawn: tuple[type, ...] = (random.Random, torch.Generator)
    if numpy is not None:
        drawn += (numpy.random.Generator, numpy.random.RandomState)
    if isinstance(value, drawn):
        remedy = f"{_GIVE}, or {_SEEDED}" if isinstance(value, torch.Generator) else _SEEDED
        raise HiddenState(name, type(cast("Any", value)).__qualname__, remedy)
    is_scaler = isinstance(value, torch.amp.GradScaler) and value.is_enabled()
    if is_scaler or isinstance(value, (torch.optim.Optimizer, LRScheduler)):
        raise HiddenState(name, type(cast("Any", value)).__qualname__, _GIVE)
