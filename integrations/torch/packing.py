"""Packing: a tree of values to a skeleton in pickle and tensors as plain bytes, and back.

Tensors are not pickled: each is copied, once, to its place among the bytes. A restored tensor has
the dtype, shape and strides it had.
"""

from __future__ import annotations

import ctypes
import io
import pickle
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from .errors import StateLost

if TYPE_CHECKING:
    from collections.abc import Iterator

_ALIGN = 64
_SAMPLE = 1 << 14


class Leaf(NamedTuple):  # pickled ten times as fast as a dataclass
    """A tensor among the bytes.

    Attributes:
        is_shard: Whether it is the local part of a `DTensor`.
        device: The type of device that it was on.
    """

    start: int
    size: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    is_shard: bool
    device: str


@dataclass(frozen=True, slots=True)
class Shard:
    """The local part of a `DTensor`, in a tree that was unpacked."""

    local: torch.Tensor


class Packed:
    """A tree as bytes that have yet to be copied.

    Args:
        before: What of a dict has been packed already and may differ in the values of its tensors
            alone; then *tree* is the rest of that dict.

    Attributes:
        meta: The skeletons and where each tensor is.
        skeletons: That of each dict, and its leaves, pickled.
        tensors: The tensors, local parts of what is sharded, in the order of the tree.
        leaves: Where each of them is.
        size: Bytes of all tensors, aligned.
    """

    def __init__(self, tree: Any, before: Packed | None = None) -> None:
        self.tensors: list[torch.Tensor] = [] if before is None else [*before.tensors]
        self.leaves: list[Leaf] = [] if before is None else [*before.leaves]
        self.size: int = 0 if before is None else before.size
        known = len(self.leaves)
        out = io.BytesIO()
        pickler = _Pickler(out, self._note)
        with torch.no_grad():  # here once, for all of the tensors
            pickler.dump(tree)
        added = out.getvalue(), pickle.dumps(self.leaves[known:])
        self.skeletons: list[tuple[bytes, bytes]] = [] if before is None else [*before.skeletons]
        self.skeletons.append(added)
        self.meta = pickle.dumps((self.skeletons, self.size))

    def _note(self, tensor: torch.Tensor) -> int:
        dense = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        is_shard = dense is not tensor
        if not is_dense(dense):
            dense = dense.resolve_conj().resolve_neg().contiguous()
        size = dense.nbytes
        where = self.size, size, dense.dtype, tuple(dense.shape), dense.stride()
        self.leaves.append(Leaf(*where, is_shard, dense.device.type))
        self.tensors.append(dense)
        self.size += -(-size // _ALIGN) * _ALIGN
        return len(self.tensors) - 1

    def copy_to(self, target: torch.Tensor, low: int = 0, high: int | None = None) -> None:
        """Copy the bytes from *low* up to *high* to the beginning of *target*, of dtype uint8."""
        start = target.data_ptr() if target.is_cpu else None
        for index, begin, end, at in _overlaps(self.leaves, low, high):
            tensor = self.tensors[index]
            if start is not None and tensor.is_cpu:  # views would take as long as many a copy
                ctypes.memmove(start + at, tensor.data_ptr() + begin, end - begin)
            else:
                target[at : at + end - begin].copy_(_bytes_of(tensor)[begin:end])

    def to_bytes(self) -> torch.Tensor:
        """Return all bytes, in the memory of the host."""
        whole = torch.zeros(self.size, dtype=torch.uint8, device="cpu")  # the gaps as well
        self.copy_to(whole)
        return whole


def size_of(meta: bytes) -> int:
    """Return how many bytes the tensors of *meta* take."""
    size: int = pickle.loads(meta)[1]
    return size


def unpack(meta: bytes, data: torch.Tensor, *, to_devices: bool = False) -> Any:
    """Return the tree; its tensors are views of *data*, or on devices like those before."""
    skeletons, size = pickle.loads(meta)
    if data.numel() < size:
        msg = f"the state is torn: {data.numel()} bytes of {size}"
        raise StateLost(msg)
    tensors: list[Any] = []
    for _, leaves in skeletons:
        for leaf in pickle.loads(leaves):
            view = _view(data, leaf)
            if to_devices and not leaf.is_shard:
                view = view.to(leaf.device)
            tensors.append(Shard(view) if leaf.is_shard else view)
    first, *others = (_Unpickler(io.BytesIO(part), tensors).load() for part, _ in skeletons)
    for other in others:
        first.update(other)
    return first


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return *tensor*, detached; of a `DTensor` the part that this rank holds."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    with torch.no_grad():  # without operations on the DTensor, each of which takes long
        return tensor.to_local()


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements fill one piece of memory, as they are, in any order of dimensions."""
    if tensor.is_conj() or tensor.is_neg():
        return False
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def checksum(tensor: torch.Tensor, check: int = 0) -> int:
    """Return a CRC-32, begun at *check*, of *tensor*: of some thousand elements if it is large."""
    local = local_of(tensor)
    is_plain = type(local) is torch.Tensor and local.layout is torch.strided
    if not is_plain or local.is_meta or local.is_quantized or not local.numel():
        return check
    places = zip(local.shape, local.stride(), strict=True)
    extent = 1 + sum((size - 1) * stride for size, stride in places)  # in memory, gaps included
    each = extent // _SAMPLE | 1  # odd, so that they are spread over all columns
    data = local.as_strided((extent,), (1,))[::each].cpu().resolve_conj().resolve_neg().contiguous()
    return zlib.crc32((ctypes.c_char * data.nbytes).from_address(data.data_ptr()), check)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8) if tensor.numel() else flat.new_empty(0, dtype=torch.uint8)


def _view(data: torch.Tensor, leaf: Leaf) -> torch.Tensor:
    raw = data[leaf.start : leaf.start + leaf.size]
    flat = raw.view(leaf.dtype) if leaf.size else data.new_empty(0, dtype=leaf.dtype)
    return flat.as_strided(leaf.shape, leaf.stride)


def _overlaps(
    leaves: list[Leaf], low: int, high: int | None
) -> Iterator[tuple[int, int, int, int]]:
    """Yield (leaf, begin and end within it, place) of what lies between *low* and *high*."""
    for index, leaf in enumerate(leaves):
        begin = max(low - leaf.start, 0)
        end = leaf.size if high is None else min(high - leaf.start, leaf.size)
        if begin < end:
            yield index, begin, end, leaf.start + begin - low


class _Pickler(pickle.Pickler):
    def __init__(self, out: io.BytesIO, note: Any) -> None:
        super().__init__(out, protocol=5)
        self._note_tensor = note

    def persistent_id(self, obj: Any) -> Any:
        return self._note_tensor(obj) if isinstance(obj, torch.Tensor) else None


class _Unpickler(pickle.Unpickler):
    def __init__(self, skeleton: io.BytesIO, tensors: list[Any]) -> None:
        super().__init__(skeleton)
        self._tensors = tensors

    def persistent_load(self, pid: Any) -> Any:
        return self._tensors[pid]
