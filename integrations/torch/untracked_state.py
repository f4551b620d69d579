"""Detection of hidden state in a trainer: objects that change with each use and are in no state.

A run that draws from one of them would continue with other samples or numbers after a death.
Objects that always change are found by their type; values, by what steps do to them.
"""

from __future__ import annotations

import array
import contextlib
import dis
import gc
import io
import itertools
import random
import sys
import sysconfig
import threading
import zlib
from collections import defaultdict, deque
from collections.abc import Iterator
from contextvars import ContextVar
from functools import cache, partial
from types import (
    BuiltinMethodType,
    CodeType,
    FunctionType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    NoneType,
    SimpleNamespace,
)
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Sampler, SequentialSampler

from .errors import HiddenState
from .packing import checksum, local_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

_PURE = "take samples by phalanx.integrations.torch.sample_indices(seed, step, rank, ...)"
_GIVE = "give it to State(...)"
_SEEDED = "draw from the numbers of torch, random or numpy.random, which are seeded for each step"
_PLAIN = (int, float, complex, str, bytes, NoneType)
_CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_LONG = 1000  # a container that large holds data
_SAMPLE = 1 << 20  # elements of an array
_CACHED = type(cache(repr))
_OF_MODULES = frozenset(vars(torch.nn.Module()))
_NO_EXTRA = vars(torch.nn.Module)["get_extra_state"]
_INSTALLED = tuple(sysconfig.get_path(key) for key in ("stdlib", "platstdlib"))


def check_kept(name: str, value: object) -> None:
    """Raise `HiddenState` if *value* draws from a state that no process can be given back."""
    kind = type(cast("Any", value)).__qualname__
    if isinstance(value, DataLoader):
        raise HiddenState(name, "DataLoader", _PURE)
    if isinstance(value, Sampler) and not isinstance(value, SequentialSampler):
        raise HiddenState(name, kind, _PURE)
    is_output = isinstance(value, io.IOBase) and (value.closed or not value.readable())
    if isinstance(value, Iterator) and not is_output:
        raise HiddenState(name, kind, _PURE)


def check_attributes(
    owner: Any,
    kept: Iterable[Any],
    allowed: Collection[str],
    tensors: Iterable[torch.Tensor] = (),
) -> Untouched:
    """Look for hidden state in what *owner* has; return what of it no step may change.

    Args:
        owner: The trainer.
        kept: The objects that are in its `State`.
        allowed: Attributes that the user says have no state that matters.
        tensors: Those in its `State`, of which it may have views.

    Raises:
        HiddenState: there is some.
    """
    found: list[tuple[str, torch.Tensor]] = []
    values: defaultdict[str, list[object]] = defaultdict(list)
    known = {_memory_of(each) for each in tensors}
    for name, part, is_users in _walk(owner, kept, allowed):
        if isinstance(part, _PLAIN):
            if is_users:
                values[name].append(part)
            continue
        check_kept(name, part)
        _check_drawn(name, part)
        held = [
            (inner, each)
            for inner, each in _tensors_of(name, part)
            if not (inner in allowed or each.is_inference() or _memory_of(each) in known)
        ]
        found += held
        if is_users:
            if not isinstance(part, torch.Tensor):
                values[name].append(_digest_of(part))
            for inner, each in held:
                values[inner].append((each.shape, each.dtype, checksum(each)))
    return Untouched(found, values)


class Untouched:
    """Tensors and values that a trainer has and its `State` has not: no step may change one.

    Args:
        tensors: By name.
        values: By name, what tells whether they have changed.
    """

    def __init__(
        self, tensors: Iterable[tuple[str, torch.Tensor]], values: dict[str, list[object]]
    ) -> None:
        self._versions = [(name, each, each._version) for name, each in tensors]  # noqa: SLF001
        self._values = values

    def check(self) -> None:
        """Raise `HiddenState` if a tensor was changed in place."""
        for name, tensor, version in self._versions:
            if tensor._version != version:  # noqa: SLF001
                raise _changed(name, "tensor")

    def forget_values(self) -> None:
        """Have `check_since` compare nothing with this."""
        self._values.clear()

    def check_since(self, before: Untouched) -> None:
        """Raise `HiddenState` if a step has changed a value, or put another in its place.

        It may fill what was empty *before*, as one does that makes a mask.
        """
        for name, now in self._values.items():
            was = before._values.get(name, [])
            if was != now and not all(map(_is_empty, was)):
                raise _changed(name, "value")


def _changed(name: str, what: str) -> HiddenState:
    remedy = (
        f"compute it from the step, {_GIVE}, or set without_state = ({name!r},) in the trainer "
        "if no later step depends on it"
    )
    return HiddenState(name, f"{what} that a step changed", remedy)


def _is_empty(value: object) -> bool:
    return value is None or (isinstance(value, tuple) and not value[-1])


def _digest_of(value: object) -> object:
    """Return what tells whether *value* has changed, but for what is in it."""
    kind, row, numpy = type(value), cast("Any", value), sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic):
        return value
    if numpy is not None and isinstance(value, numpy.memmap):  # it would all be read
        return row.shape, row.dtype, row.filename
    if numpy is not None and isinstance(value, numpy.ndarray) and not row.dtype.hasobject:
        sample = numpy.asarray(row).flat[:: row.size // _SAMPLE | 1]
        return row.shape, row.dtype, zlib.crc32(sample.tobytes())
    if isinstance(value, (bytearray, array.array)):
        return kind, len(row), zlib.crc32(memoryview(row)[:: len(row) // _SAMPLE | 1].tobytes())
    if isinstance(value, (list, tuple, deque)) and len(row) >= _LONG:
        sample = itertools.islice(row, 0, None, len(row) // _LONG | 1)
        return kind, [*map(id, sample)], len(row)
    return (kind, len(row)) if isinstance(value, _CONTAINERS) else kind


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
    their tensors, the attributes of objects whose classes are the user's, and the global variables
    that the functions and methods of the user name. The user's is what is not installed, and the
    package or script that *owner* is from.

    Args:
        owner: The trainer.
        kept: Left out; of a module what is in it is yielded.
        allowed: Names that are left out, with all that is in them.
    """
    return ((name, value) for name, value, _ in _walk(owner, kept, allowed))


def _walk(
    owner: Any, kept: Iterable[Any], allowed: Iterable[str]
) -> Iterator[tuple[str, Any, bool]]:
    """Yield name, value, and whether it is the user's own variable, also of plain values."""
    home, left_out, kept = _home_of(owner.__class__), set(allowed), [*kept]
    known = {id(each) for each in kept}
    seen: dict[int, object] = {}  # and kept, or another object would get the id of one
    have_instances: set[type] = set()  # what such a class has is found with them
    classes: list[tuple[str, Any, bool]] = []  # looked at last
    looked_into = (torch.nn.Module, Optimizer, LRScheduler)  # though it is kept
    roots = (each for each in kept if isinstance(each, looked_into))
    rest: list[tuple[str, Any, bool]] = [(type(each).__qualname__, each, True) for each in roots]
    rest.append(("", owner, True))
    while rest or classes:
        before, value, is_users = rest.pop() if rest else classes.pop()
        is_plain = isinstance(value, _PLAIN)
        if isinstance(value, type):
            if rest:
                classes.append((before, value, is_users))
                continue
            if value in have_instances:
                continue
        elif not is_plain:
            have_instances.update(type(value).__mro__)
        if before in left_out or (id(value) in seen and not is_plain):
            if id(value) in known:  # it is left out by its other name too
                seen[id(value)] = value
            continue
        seen[id(value)] = value
        if before and (is_plain or id(value) not in known):
            yield before, value, is_users
        elif before and not isinstance(value, looked_into):
            continue
        if not is_plain:
            parts = _parts_of(before, value, home, is_users=is_users)
            if isinstance(value, Optimizer) and id(value) in known:
                # One with the state of this is kept with it: whether it has is seen at its step.
                parts = (part for part in parts if not _are_optimizers(part[1]))
            rest.extend(parts)


def _parts_of(
    name: str, value: Any, home: str, *, is_users: bool
) -> Iterator[tuple[str, object, bool]]:
    if isinstance(value, _CONTAINERS):
        container = cast("Any", value)
        values: Iterable[object] = container.values() if isinstance(value, dict) else container
        if len(container) < _LONG:
            yield from ((name, each, is_users) for each in values)
    elif isinstance(value, FunctionType):
        is_users = _is_users(str(value.__globals__.get("__name__")), home)
        for cell in value.__closure__ or ():
            with contextlib.suppress(ValueError):  # it is empty as yet
                yield name, cell.cell_contents, is_users
        if is_users:
            given = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
            yield from ((name, each, True) for each in (*given, *vars(value).values()))
            yield from _globals_of(value, home)
    elif isinstance(value, _CACHED):  # that it keeps more is no change
        if _is_users(str(value.__module__), home):
            yield from ((name, each, False) for each in gc.get_referents(value))
    elif isinstance(value, threading.local):
        yield from ((name, each, is_users) for each in vars(value).values())
    elif isinstance(value, ContextVar):
        yield name, cast("Any", value).get(None), is_users
    elif isinstance(value, type):
        if _is_users(str(value.__module__), home):
            members = vars(value).items()
            yield from ((f"{name}.{key}", each, True) for key, each in members if key[:2] != "__")
    elif isinstance(value, (MethodType, BuiltinMethodType, MethodWrapperType)):
        yield name, value.__self__, is_users
    elif isinstance(value, (staticmethod, classmethod)):
        yield name, cast("Any", value).__func__, is_users
    elif isinstance(value, partial):
        parts = (value.func, *value.args, *value.keywords.values())
        yield from ((name, each, is_users) for each in parts)
    elif isinstance(value, (Optimizer, LRScheduler)):
        yield from _parts_of_optimizer(name, value, home)
    elif isinstance(value, (torch.nn.Module, SimpleNamespace)) or (
        any(_is_users(str(base.__module__), home) for base in type(value).__mro__)
    ):
        bases = {_home_of(base) for base in type(value).__mro__}
        keeps = getattr(cast("Any", type(value)), "get_extra_state", _NO_EXTRA) is not _NO_EXTRA
        is_users = not keeps and bool(bases - {"torch", "builtins", "abc", "typing"})
        dot = f"{name}." if name else ""
        for key, each in _attributes(value, home).items():
            yield f"{dot}{key}", each, is_users and key not in _OF_MODULES


def _parts_of_optimizer(name: str, value: Any, home: str) -> Iterator[tuple[str, object, bool]]:
    """Yield what an optimizer or a scheduler has and its ``state_dict`` has not."""
    if isinstance(value, Optimizer):
        for key in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
            hooks = cast("dict[int, object]", vars(value).get(key, {}))
            yield from ((name, each, False) for each in hooks.values())
        if any(_is_users(str(base.__module__), home) for base in type(value).__mro__):
            for key, each in _attributes(value, home).items():
                if key not in _of_optimizers():
                    yield f"{name}.{key}", each, True
    for each in getattr(value, "lr_lambdas", ()):
        if isinstance(each, (FunctionType, MethodType, partial)):  # of an object it has the rest
            yield name, each, False


@cache
def _of_optimizers() -> frozenset[str]:
    """Return the names that torch gives attributes of optimizers."""
    known = vars(torch.optim.SGD([torch.zeros(1, device="cpu")], fused=True))
    more = ("step", "_opt_called", "_step_count", "_params", "_numel_cache")
    return frozenset({*known, *more, "grad_scale", "found_inf"})


def _are_optimizers(value: object) -> bool:
    """Whether it is an optimizer, or a container of nothing else."""
    if not isinstance(value, _CONTAINERS):
        return isinstance(value, Optimizer)
    container = cast("Any", value)
    values: Iterable[object] = container.values() if isinstance(value, dict) else container
    return len(container) > 0 and all(isinstance(each, Optimizer) for each in values)


def _attributes(value: Any, home: str) -> dict[str, object]:
    """Return the attributes of *value* and of its class, but for the tensors of a module."""
    found: dict[str, object] = {}
    for base in reversed(type(value).__mro__):
        members = vars(base)
        is_users = _is_users(str(base.__module__), home)
        found |= {
            key: each
            for key, each in members.items()
            if isinstance(each, Iterator)
            or (is_users and (isinstance(each, FunctionType) or not key.startswith("__")))
        }
        slots = members.get("__slots__", ())
        for key in (slots,) if isinstance(slots, str) else slots:
            found[key] = getattr(value, key, None)
    found.pop("__init__", None)  # what it draws from makes the same in every process
    found |= getattr(value, "__dict__", {})
    if isinstance(value, torch.nn.Module):
        found |= cast("dict[str, object]", found.pop("_modules", {}))
        for tensors in ("_parameters", "_buffers"):
            for key, tensor in cast("dict[str, Any]", found.pop(tensors, {})).items():
                kinds = ("_backward_hooks", "_post_accumulate_grad_hooks")
                hooks: list[Any] = [getattr(tensor, kind, None) or {} for kind in kinds]
                found |= {key: hooks} if any(hooks) else {}
    return found


def _globals_of(function: FunctionType, home: str) -> Iterator[tuple[str, object, bool]]:
    """Yield the global variables that *function*, and what is nested in it, reads."""
    codes = [function.__code__]
    for code in codes:
        codes += [each for each in code.co_consts if isinstance(each, CodeType)]
        named = {key: function.__globals__.get(key) for key in code.co_names}
        modules = {key: each for key, each in named.items() if isinstance(each, ModuleType)}
        yield from _variables_of(modules, code.co_names, home)
        held = {key: each for key, each in named.items() if not _is_imported(each, home)}
        for key, each in held.items():
            # An attribute may have the name of one; of values alone that matters.
            if isinstance(each, (FunctionType, *_PLAIN)) or key in _read_by(code):
                yield key, each, True


def _variables_of(
    modules: dict[str, ModuleType], names: Collection[str], home: str
) -> Iterator[tuple[str, object, bool]]:
    """Yield the global variables of *modules* of the user, and of modules in them, by *names*."""
    seen: set[int] = set()
    while modules:
        prefix, module = modules.popitem()
        if id(module) in seen or not _is_users(module.__name__, home):
            continue
        seen.add(id(module))
        for name in names:
            value = vars(module).get(name)
            if isinstance(value, ModuleType):
                modules[f"{prefix}.{name}"] = value
            elif not _is_imported(value, home):
                yield f"{prefix}.{name}", value, True


def _is_imported(value: object, home: str) -> bool:
    if isinstance(value, FunctionType):
        return not _is_users(str(value.__globals__.get("__name__")), home)
    if isinstance(value, type):
        return not _is_users(str(value.__module__), home)
    return value is None or isinstance(value, (ModuleType, BuiltinMethodType))


@cache
def _read_by(code: CodeType) -> set[str]:
    return {each.argval for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL"}


@cache
def _is_users(module: str, home: str) -> bool:
    """Whether *module* is of the package or script *home*, or not installed."""
    package = module.partition(".")[0]
    file = getattr(sys.modules.get(module), "__file__", None)
    return package == home or not (
        file is None
        or package == "phalanx"
        or "-packages" in file
        or str(file).startswith(_INSTALLED)
    )


def _home_of(kind: type) -> str:
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
    if is_scaler or isinstance(value, (Optimizer, LRScheduler)):
        raise HiddenState(name, type(cast("Any", value)).__qualname__, _GIVE)
