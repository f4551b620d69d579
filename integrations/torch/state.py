"""State: everything of a rank that a step changes, as one object.

- After `commit` all of it is that of one step, and `load` gives back the same bytes.
- Parameters and optimizer states change in place, once per step; it is known whether they have
  changed since the last commit. The rest is copied at each commit and can be rolled back.
"""

from __future__ import annotations

import ctypes
import hashlib
import pickle
import sys
import zlib
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from .errors import HiddenState, ShapeChanged, TrainingError, WrongDevice
from .packing import Packed, Shard, checksum, is_dense, local_of, unpack
from .untracked_state import check_kept

dist: Any = torch.distributed  # its types are partly unknown
if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator, Mapping

    Tree = dict[str, Any]

_NO_EXTRA = vars(torch.nn.Module)["get_extra_state"]


class State:
    """The objects of a rank that training changes, by name.

    ``State(model=model, optimizer=optimizer, scheduler=scheduler)``. Each is a module (not wrapped
    in DDP), an optimizer, a `torch.Generator`, which each step of a `Trainer` seeds, or has
    ``state_dict`` and ``load_state_dict``.

    Attributes:
        step: The last step that was committed; 0 before the first.
        result: The result that was committed with it.

    Raises:
        HiddenState: an object draws from a state that cannot be kept.
        WrongDevice, TrainingError: a tensor has no memory, or none of its own.
    """

    __slots__ = (  # what a step would set beside them could not be kept
        "_contents",
        "_extra",
        "_large",
        "_large_places",
        "_light",
        "_of_optimizers",
        "_parts",
        "_touched",
        "_unmade",
        "_untrained",
        "_versions",
        "_wanted",
        "_writes_unseen",
        "generators",
        "modules",
        "optimizers",
        "others",
        "result",
        "step",
    )

    def __init__(self, **objects: Any) -> None:
        self.step = 0
        self.result: Any = None
        self.modules: dict[str, torch.nn.Module] = {}
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        self.generators: dict[str, torch.Generator] = {}
        self.others: dict[str, Any] = {}
        for name, value in objects.items():
            self._add(name, value)
        for name, tensor in (*self._parameters(), *self._buffers()):
            _check_plain(name, tensor)
        self._extra: dict[str, Any] = {
            f"{name}.{at}": part
            for name, module in self.modules.items()
            for at, part in enumerate(cast("Iterator[Any]", module.modules()))
            if cast("Any", type(part)).get_extra_state is not _NO_EXTRA
        }
        self._touched = self._writes_unseen = False
        self._contents: list[int] | None = None
        self._large: Packed | None = None
        self._large_places: list[object] = []
        for optimizer in self.optimizers.values():
            optimizer.register_step_pre_hook(self.touch)
        self.refresh()
        self._wanted = [each.requires_grad for each in self._each()]
        self._unmade = dict(self._unmade_buffers())
        self.commit(0)

    def _add(self, name: str, value: Any) -> None:
        check_kept(name, value)
        if isinstance(value, DistributedDataParallel):
            raise HiddenState(name, "DistributedDataParallel", "give the module that it wraps")
        if isinstance(value, torch.nn.Module):
            parts = cast("Iterator[Any]", value.modules())
            if any(isinstance(part, FullyShardedDataParallel) for part in parts):
                raise TrainingError(f"{name} is FullyShardedDataParallel: use fully_shard, FSDP2")
            self.modules[name] = value
        elif isinstance(value, torch.optim.Optimizer):
            kind: Any = type(value)
            if kind.state_dict is not torch.optim.Optimizer.state_dict:
                remedy = "its state_dict() is its own; give an optimizer that has torch's"
                raise HiddenState(name, kind.__qualname__, remedy)
            self.optimizers[name] = value
        elif isinstance(value, torch.Generator):
            self.generators[name] = value
        elif hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
            self.others[name] = value
            try:
                packed = Packed(value.state_dict())
            except Exception as error:
                remedy = f"its state_dict() cannot be pickled: {error}"
                raise HiddenState(name, type(value).__qualname__, remedy) from error
            if any(leaf.is_shard for leaf in packed.leaves):
                raise TrainingError(f"{name}: its state_dict() has a DTensor: keep it in a module")
            if any(each.is_quantized or _has_no_memory(each) for each in packed.tensors):
                msg = f"{name}: its state_dict() has a tensor that cannot be kept: use plain ones"
                raise TrainingError(msg)
        else:
            remedy = "give it state_dict() and load_state_dict(), or make it a function of the step"
            raise HiddenState(name, type(value).__qualname__, remedy)

    # --- steps ----------------------------------------------------------------------------

    def begin(self, *, watch: bool) -> None:
        """Note that a step begins.

        Args:
            watch: Find out whether it writes to parameters through ``.data``, which torch does not
                count. If one does, all later ones count as changed from their beginning.
        """
        self._contents = self._checksums() if watch else None
        self._touched = self._writes_unseen

    def touch(self, *_: object) -> None:
        """Note that parameters or optimizer states are about to change."""
        if not self._touched and self._contents is not None:
            before, now = self._contents, self._checksums()
            counted = zip(self._versions, self._count_changes(), before, now, strict=False)
            self._writes_unseen |= any(v == w and one != other for v, w, one, other in counted)
        self._touched = True

    def commit(self, step: int, result: Any = None) -> None:
        """Note that all of it is now that of *step*; if this raises, none of it is."""
        self._reshard()  # the next forward pass is to gather what has changed
        light = Packed(self._light_tree())
        self._light = light.meta, light.to_bytes()
        self._versions = self._count_changes()
        self.step, self.result, self._contents, self._touched = step, result, None, False

    @property
    def is_committed(self) -> bool:
        """Whether parameters and optimizer states are those of `step`."""
        if self._touched or self._versions != self._count_changes():
            return False
        return self._contents is None or self._contents == self._checksums()

    def roll_back(self) -> None:
        """Set buffers, schedulers and the like to what they were at the commit.

        Raises:
            ShapeChanged: a step that failed has added a buffer, or has put one of another shape in
                place of one.
        """
        meta, data = self._light
        self._load_light(unpack(meta, data.clone(), to_devices=True))

    def clear_gradients(self) -> None:
        """Set the gradients of all parameters to None."""
        for parameter in self._each():
            parameter.grad = None

    def refresh(self) -> dict[str, torch.Tensor]:
        """Look for modules, and parameters that no optimizer has; return all parameters by name."""
        self._parts = [part for module in self.modules.values() for part in module.modules()]
        self._reshard()
        found, trained = dict(self._parameters()), {id(each) for each in self._trained()}
        self._untrained = [each for each in found.values() if id(each) not in trained]
        self._of_optimizers = dict(self._without_module())
        return found

    def _reshard(self) -> None:
        """Have FSDP2 hold shards alone: a pass without gradients leaves whole parameters."""
        for part in self._parts:
            if isinstance(part, FSDPModule):
                part.reshard()

    @contextmanager
    def as_built(self) -> Generator[None]:
        """Have each parameter want a gradient as after `build`, for DDP takes those that do.

        What `join` has done to modes, batch statistics and the like counts before the first step.
        """
        self._require(self._wanted)
        yield
        if self.step:
            self.roll_back()

    @contextmanager
    def unchanged(self, by: str) -> Generator[None]:
        """Have all of it stay as it is; modes of modules are set back.

        Raises:
            TrainingError: *by*, a method, changes an object.
        """

        def look() -> dict[str, object]:
            return {**self.checksums(), "requires_grad": [p.requires_grad for p in self._each()]}

        modes, before = [(part, part.training) for part in self._parts], look()
        yield
        for part, training in modes:
            part.training = training
        if changed := [name for name, each in look().items() if each != before.get(name)]:
            msg = f"{by}() changes {changed[0]}, between two steps: let a step do it, by its number"
            raise TrainingError(msg)

    def _require(self, wanted: Iterable[int]) -> None:
        for parameter, each in zip(self._each(), wanted, strict=False):
            if parameter.requires_grad != each:
                parameter.requires_grad_(bool(each))

    def trained(self) -> dict[str, torch.Tensor]:
        """Return the parameters that optimizers have, by name."""
        trained = {id(each) for each in self._trained()}
        return {name: each for name, each in self._parameters() if id(each) in trained}

    def names(self) -> list[str]:
        """Return the names of modules, parameters, and buffers but for those that a step makes."""
        walks = {name: cast("Any", each).named_modules() for name, each in self.modules.items()}
        parts = (f"{name}.{inner}" for name, walk in walks.items() for inner, _ in walk)
        buffers = (name for name, _ in self._buffers() if name not in self._unmade)
        return [*parts, *dict(self._parameters()), *buffers]

    def values(self) -> dict[str, int]:
        """Return a checksum of each parameter, from a sample of a large one."""
        return {name: checksum(each) for name, each in self._parameters()}

    def buffers(self) -> list[torch.Tensor]:
        """Return the buffers of all modules, such as batch statistics."""
        return [each for _, each in self._buffers()]

    def share_buffers(self) -> None:
        """Have rank 0's batch statistics everywhere, as DDP would before the next step."""
        buffers = [local_of(each) for each in self.buffers()]
        buffers.sort(key=lambda each: -each.itemsize)  # so that each is aligned among the bytes
        if not buffers:
            return
        # As bytes: not every backend knows every type.
        flat = torch.cat([each.reshape(-1).view(torch.uint8) for each in buffers])
        dist.broadcast(flat, src=0)
        parts = torch.split(flat, [each.numel() * each.itemsize for each in buffers])
        for each, part in zip(buffers, parts, strict=True):
            each.copy_(part.view(each.dtype).view_as(each))

    def tensors(self) -> list[torch.Tensor]:
        """Return the parameters and buffers of all modules, and what optimizers have of each."""
        return [*self._each(), *self._of_states(), *self.buffers()]

    # --- what is in it --------------------------------------------------------------------

    def packed(self) -> Packed:
        """Return all of it at the last commit; large tensors are those of the objects.

        How these are arranged is packed once, until that changes: it takes long for many.
        """
        places, large = self._places(), self._large
        if large is None or places != self._large_places:
            large = Packed(self._large_tree())
            self._large_places = places and self._places()  # now that all modules are known
            self._large = large if self._large_places else None
        result = pickle.dumps(self.result)  # whole: each rank may have another
        rest = {"step": self.step, "result": result, "light": self._light}
        return Packed(rest, large)

    def _large_tree(self) -> Tree:
        return {
            "parameters": self.refresh(),
            "optimizers": {name: _states_of(each) for name, each in self.optimizers.items()},
        }

    def _places(self) -> list[object]:
        """Return a list that differs as soon as `_large_tree` has other tensors than before.

        It is empty where more than tensors can change, or one has to be copied to be packed.
        """
        found: list[object] = []
        tensors: list[torch.Tensor] = [*self._of_optimizers.values()]
        for part in self._parts:
            own = vars(part)  # children() and parameters() look for doubles, which takes long
            found += (part, *own["_modules"].items())
            for name, parameter in own["_parameters"].items():
                found += (name, parameter is None)
                if parameter is not None:
                    tensors.append(parameter)
        for optimizer in self.optimizers.values():
            found += [[*map(_same, group["params"])] for group in optimizer.param_groups]
            for key, state in cast("dict[object, object]", optimizer.state).items():
                if type(state) is not dict:
                    return []
                found.append(_same(key))
                for kind, value in cast("dict[object, object]", state).items():
                    if not isinstance(value, torch.Tensor):
                        return []
                    found.append(kind)
                    tensors.append(value)
        with torch.no_grad():
            for tensor in tensors:
                dense = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                if not is_dense(dense):  # it is copied to be packed
                    return []
                # A plain tensor is asked for its address when it is copied.
                place = 0 if dense is tensor else dense.data_ptr()
                found.append((*_same(tensor), place, dense.shape, dense.stride(), dense.dtype))
        return found

    def load(self, tree: Tree) -> None:
        """Take over *tree*, which was unpacked.

        Raises:
            ShapeChanged: it is that of other modules or optimizers; nothing was changed.
        """
        light = unpack(*tree["light"], to_devices=True)
        self._match_buffers(light["buffers"])
        _check_alike("parameters", tree["parameters"], dict(self._parameters()))
        _check_alike("buffers", light["buffers"], dict(self._buffers()))
        for kind, kept, now in (
            ("optimizers", tree["optimizers"], self.optimizers),
            ("generators", light["generators"], self.generators),
            ("objects", light["others"], self.others),
            ("modules with extra state", light["extra"], self._extra),
        ):
            if kept.keys() != now.keys():
                raise ShapeChanged(kind, str(sorted(kept)), str(sorted(now)))
        for kind, had, has in (
            ("modules", len(light["training"]), len(self._parts)),
            ("parameters", len(light["wanted"]), len([*self._each()])),
        ):
            if had != has:
                raise ShapeChanged(f"the number of {kind}", str(had), str(has))
        for name, states in tree["optimizers"].items():
            _check_groups(name, states, self.optimizers[name])
        with torch.no_grad():
            for name, parameter in self._parameters():
                _copy(parameter, tree["parameters"][name])
            for name, states in tree["optimizers"].items():
                _load_states(self.optimizers[name], states)
        self._load_light(light)
        self.commit(tree["step"], pickle.loads(tree["result"]))

    def digest(self) -> str:
        """Return a SHA-256 over parameters, buffers, optimizer states and the rest, in hex."""
        rest = {"step": self.step, "result": None, "light": self._light_tree()}
        tree = {**self._large_tree(), **rest}
        packed = Packed(tree)
        whole = hashlib.sha256(repr(_plain_of(tree)).encode())
        for tensor in packed.tensors:
            whole.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        data = packed.to_bytes()
        whole.update((ctypes.c_char * data.numel()).from_address(data.data_ptr()))
        return whole.hexdigest()

    def checksums(self) -> dict[str, int]:
        """Return a checksum of each object, from a sample of its large tensors."""
        kept = {**self.modules, **self.optimizers, **self.others}
        for optimizer in self.optimizers.values():
            _check_states(optimizer)
        found = {name: _checksum_of(each.state_dict()) for name, each in kept.items()}
        return found | {name: checksum(each) for name, each in self._of_optimizers.items()}

    def check_device(self, device: str) -> None:
        """Check that all is on *device*, and that no module has a state there that no seed sets.

        Raises:
            WrongDevice, HiddenState: the first that is elsewhere, or has.
        """
        expected = torch.device(device)
        for name, module in self.modules.items():
            for path, part in cast("Any", module.named_modules(prefix=name)):
                if isinstance(part, torch.nn.RNNBase) and part.dropout and expected.type == "cuda":
                    remedy = "cuDNN draws its dropout from it: give dropout=0, and add nn.Dropout"
                    raise HiddenState(path, type(part).__qualname__, remedy)
        for name, tensor in (*self._parameters(), *self._buffers()):
            if tensor.device != expected:
                raise WrongDevice(name, str(tensor.device), device)

    def check_replicated(self) -> None:
        """Raise `TrainingError` if a parameter or buffer is divided among the ranks."""
        for name, tensor in (*self._parameters(), *self._buffers()):
            if isinstance(tensor, DTensor) and not all(p.is_replicate() for p in tensor.placements):
                raise TrainingError(f"{name}: sharded state; give sharded=True")

    def _light_tree(self) -> Tree:
        return {
            "training": bytes(part.training for part in self._parts),
            "wanted": bytes(each.requires_grad for each in self._each()),
            "buffers": dict(self._buffers()),
            "groups": {
                name: [
                    {key: value for key, value in group.items() if key != "params"}
                    for group in each.param_groups
                ]
                for name, each in self.optimizers.items()
            },
            "generators": dict.fromkeys(self.generators),  # each step seeds them
            "others": {name: each.state_dict() for name, each in self.others.items()},
            "extra": {name: each.get_extra_state() for name, each in self._extra.items()},
        }

    def _unmade_buffers(self) -> Iterator[tuple[str, tuple[dict[str, Any], str]]]:
        """Yield the names and places of buffers that a step is to make."""
        for name, module in self.modules.items():
            for path, part in cast("Any", module.named_modules(prefix=name)):
                buffers = cast("dict[str, Any]", vars(part)["_buffers"])
                for key, value in buffers.items():
                    if value is None:
                        yield f"{path}.{key}", (buffers, key)

    def _match_buffers(self, kept: Mapping[str, Any]) -> None:
        """Make the buffers that *kept* has and a step makes, and drop those that it has not."""
        for name, (buffers, key) in self._unmade.items():
            value = kept.get(name)
            if (value is None) != (buffers[key] is None) and not isinstance(value, Shard):
                buffers[key] = None if value is None else value.clone()

    def _load_light(self, tree: Tree) -> None:
        # Modules that a step has added, and that failed, are left as they are.
        for part, training in zip(self._parts, tree["training"], strict=False):
            part.training = bool(training)
        self._require(tree["wanted"])
        self._match_buffers(tree["buffers"])
        buffers = dict(self._buffers())
        _check_alike("buffers", tree["buffers"], buffers)
        with torch.no_grad():
            for name, buffer in buffers.items():
                _copy(buffer, tree["buffers"][name])
        for name, groups in tree["groups"].items():
            for group, values in zip(self.optimizers[name].param_groups, groups, strict=True):
                for key in group.keys() - values.keys() - {"params"}:
                    del group[key]
                for key, value in values.items():
                    if isinstance(value, torch.Tensor) and isinstance(group.get(key), torch.Tensor):
                        group[key].copy_(value)
                    else:
                        group[key] = value
        for name, state in tree["others"].items():
            self.others[name].load_state_dict(state)
            # Of a GradScaler: which optimizers it has unscaled for in the step that was not done.
            getattr(self.others[name], "_per_optimizer_states", {}).clear()
        for name, state in tree["extra"].items():
            self._extra[name].set_extra_state(state)

    def _trained(self) -> Iterator[torch.Tensor]:
        for optimizer in self.optimizers.values():
            for group in optimizer.param_groups:
                yield from group["params"]

    def _each(self) -> Iterator[torch.Tensor]:
        """Yield the parameters; without a walk over the modules, which takes long."""
        yield from self._trained()
        yield from self._untrained

    def _of_states(self) -> Iterator[torch.Tensor]:
        """Yield what optimizers have of each parameter."""
        for optimizer in self.optimizers.values():
            for state in optimizer.state.values():
                of_one = cast("dict[Any, object]", state) if isinstance(state, dict) else {}
                for each in of_one.values():
                    if isinstance(each, torch.Tensor):
                        yield each

    def _count_changes(self) -> list[int]:
        """Return how often each parameter, then each optimizer state, was changed in place."""
        return [each._version for each in (*self._each(), *self._of_states())]  # noqa: SLF001

    def _checksums(self) -> list[int]:
        return [checksum(each) for each in self._each()]

    def _parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, module in self.modules.items():
            for inner, parameter in module.named_parameters():
                yield f"{name}.{inner}", parameter

        yield from self._without_module()

    def _without_module(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the parameters that an optimizer has and no module."""
        known = {id(each) for module in self.modules.values() for each in module.parameters()}
        for name, optimizer in self.optimizers.items():
            for number, group in enumerate(optimizer.param_groups):
                for at, parameter in enumerate(group["params"]):
                    if id(parameter) not in known:
                        known.add(id(parameter))
                        yield f"{name}.{number}.{at}", parameter

    def _buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, module in self.modules.items():
            for inner, buffer in module.named_buffers():
                yield f"{name}.{inner}", buffer


def _same(value: object) -> tuple[int, object]:
    """Return a value that equals that of the same object alone, and keeps it alive."""
    return id(value), value


def _copy(target: torch.Tensor, kept: Any) -> None:
    local_of(target).copy_(kept.local if isinstance(kept, Shard) else kept)


def _check_plain(name: str, tensor: torch.Tensor) -> None:
    """Raise an error unless *tensor* has memory of its own, an element in each place."""
    if isinstance(tensor, (torch.nn.UninitializedParameter, torch.nn.UninitializedBuffer)):
        raise TrainingError(f"{name} has no shape yet: run its module once in build()")
    if tensor.is_meta:
        raise WrongDevice(name, "meta", "one with memory")
    if tensor.layout is not torch.strided:
        raise TrainingError(f"{name} is {tensor.layout}, which cannot be kept: make it dense")
    if _has_no_memory(tensor):
        kind = type(local_of(tensor)).__qualname__
        raise TrainingError(f"{name} is a {kind}, which cannot be kept: use plain tensors")
    if tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        msg = f"{name} is quantized, or a conjugate or negative view, which cannot be kept"
        raise TrainingError(msg)
    if not isinstance(tensor, DTensor) and any(
        size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    ):
        msg = f"{name} is expanded, so that elements share memory: give its clone() to the module"
        raise TrainingError(msg)


def _has_no_memory(tensor: torch.Tensor) -> bool:
    """Whether it is of a class whose elements may be in other tensors, or nowhere."""
    kind: Any = type(local_of(tensor))
    return kind.__torch_dispatch__ is not cast("Any", torch.Tensor).__torch_dispatch__


def _plain_of(value: Any) -> Any:
    """Return what of *value* is no tensor and has a text that is the same in every process."""
    numpy = sys.modules.get("numpy")
    if isinstance(value, dict):
        named = cast("Mapping[Any, object]", value)
        return [(_plain_of(key), _plain_of(named[key])) for key in sorted(named, key=str)]
    if isinstance(value, (list, tuple, deque)):
        return [_plain_of(each) for each in cast("list[object]", value)]
    if isinstance(value, (set, frozenset)):
        return sorted(repr(_plain_of(each)) for each in cast("set[object]", value))
    if numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)):
        if value.dtype.hasobject:
            return _plain_of(value.tolist())
        return str(value.dtype), value.shape, hashlib.sha256(value.tobytes()).hexdigest()
    return value if isinstance(value, (int, float, str, bytes, complex)) else None


def _checksum_of(value: Any) -> int:
    check = zlib.crc32(repr(_plain_of(value)).encode())
    for tensor in Packed(value).tensors:
        check = checksum(tensor, check)
    return check


def _described(value: Any) -> str:
    if value is None:
        return "nothing"
    tensor = value.local if isinstance(value, Shard) else local_of(value)
    return f"{tuple(tensor.shape)} {tensor.dtype}".replace("torch.", "")


def _check_alike(kind: str, kept: Mapping[str, Any], now: Mapping[str, torch.Tensor]) -> None:
    for name in (*now, *kept):
        one, other = _described(kept.get(name)), _described(now.get(name))
        if one != other:
            raise ShapeChanged(f"{name} ({kind})", one, other)


def _check_states(optimizer: torch.optim.Optimizer) -> None:
    """Raise `TrainingError` if it has something of a parameter that cannot be kept."""
    for each in (each for group in optimizer.param_groups for each in group["params"]):
        for key, value in optimizer.state.get(each, {}).items():
            odd = ""
            if isinstance(value, DTensor) and value.shape != each.shape:
                odd = "a DTensor of another shape than its parameter"
            elif isinstance(value, torch.Tensor) and value.layout is not torch.strided:
                odd = f"which is {value.layout}"
            elif isinstance(value, torch.Tensor) and _has_no_memory(value):
                odd = f"a {type(local_of(value)).__qualname__}"
            if odd:
                msg = f"{type(optimizer).__qualname__} has {key!r}, {odd}, which cannot be kept"
                raise TrainingError(f"{msg}: use another optimizer")


def _states_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    _check_states(optimizer)
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    known = set(parameters)
    return {
        "kind": type(optimizer).__qualname__,
        "sizes": [len(group["params"]) for group in optimizer.param_groups],
        "of": [dict(optimizer.state[p]) if p in optimizer.state else None for p in parameters],
        "beside": {key: value for key, value in optimizer.state.items() if key not in known},
    }


def _check_groups(name: str, kept: dict[str, Any], optimizer: torch.optim.Optimizer) -> None:
    kind = type(optimizer).__qualname__
    if kept["kind"] != kind:
        raise ShapeChanged(f"the type of {name}", kept["kind"], kind)
    now = [len(group["params"]) for group in optimizer.param_groups]
    if kept["sizes"] != now:
        raise ShapeChanged(f"parameters per group of {name}", str(kept["sizes"]), str(now))


def _load_states(optimizer: torch.optim.Optimizer, kept: dict[str, Any]) -> None:
    states, before = iter(kept["of"]), {**optimizer.state}
    optimizer.state.clear()
    for group in optimizer.param_groups:
        on_device = bool(group.get("capturable") or group.get("fused"))
        for parameter in group["params"]:
            state = next(states)
            old = before.get(parameter, {})
            if state is not None:
                optimizer.state[parameter] = {
                    key: _placed(
                        value, old.get(key), parameter, on_host=key == "step" and not on_device
                    )
                    for key, value in state.items()
                }
    optimizer.state.update(kept["beside"])


def _placed(kept: Any, old: Any, parameter: torch.Tensor, *, on_host: bool) -> Any:
    """Return what *kept* is, on its device: in the memory of *old* if it is alike."""
    if isinstance(kept, (Shard, torch.Tensor)):
        value = kept.local if isinstance(kept, Shard) else kept
        if isinstance(kept, Shard) and not isinstance(old, DTensor):
            old = torch.zeros_like(parameter, dtype=value.dtype)
        if isinstance(old, torch.Tensor) and _described(old) == _described(kept):
            _copy(old, kept)
            return old
        return value.to(value.device if on_host else local_of(parameter).device, copy=True)
    if isinstance(kept, dict):
        named = cast("Mapping[Any, object]", kept)
        return {key: _placed(named[key], None, parameter, on_host=False) for key in named}
    if isinstance(kept, (list, tuple)):
        values = cast("list[Any]", kept)
        return type(values)(_placed(value, None, parameter, on_host=False) for value in values)
    return kept
