"""Tensor serialization: torch's values travel through host memory, from any device.

Guarantees: a dense tensor is reduced to its bytes, which are not copied if they are on the host;
any order of dimensions is kept; attributes set on it travel along; a value from a GPU
needs no GPU at the reader: it lands on the device that `place_on` names (a worker's lease), or on
the host. Parameters, modules, sparse, nested and quantized tensors travel alike. Two tensors that
share a storage arrive with one each, as from a plain pickle.

Prior art: `torch.multiprocessing.reductions`, which shares the device's memory instead; that ties
the reader's life to the writer's.
"""

from __future__ import annotations

import ctypes
import pickle
from copyreg import dispatch_table as registered
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_tables: dict[int, tuple[int, dict[type, Callable[[Any], Any]]]] = {}
_plain: dict[tuple[Any, Any], str] = {}  # dtypes of real numbers, each with the dense layout
_kinds: dict[str, tuple[Any, Any, Any]] = {}  # what makes tensors of a dtype, and it, by its name
# A global: pickle calls the functions below with what was pickled, and no more.
_target_device: list[str] = []


def place_on(device: str | None) -> None:
    """Have tensors from a GPU land on *device* in this process from now on; None: on the host."""
    _target_device[:] = [] if device is None or device == "cpu" else [device]


def reducers(torch: Any) -> dict[type, Callable[[Any], Any]]:
    """Return the registered reducers, with those of the module *torch* among them.

    The table is built anew once more types have been registered.
    """
    count = len(registered)
    known, table = _tables.get(id(torch), (0, None))
    if table is None or known != count:
        if not hasattr(torch, "Tensor") or not hasattr(torch, "TypedStorage"):
            return dict(registered)  # being imported by another thread just now
        table = {
            **registered,
            torch.Tensor: reduce_tensor,
            torch.UntypedStorage: _reduce_storage,
            torch.TypedStorage: _reduce_typed_storage,
        }
        names = ("bool", "uint8", "int8", "int16", "int32", "int64")
        for name in (*names, "bfloat16", "float16", "float32", "float64"):
            _plain[getattr(torch, name), torch.strided] = name
        _tables[id(torch)] = count, table
    return table


def reduce_tensor(tensor: Any) -> Any:
    """Reduce a tensor to its bytes; what is not dense and plain goes torch's own way.

    Each attribute of a tensor takes a quarter of a microsecond, so the usual one is asked for few.
    """
    kind = _plain.get((tensor.dtype, tensor.layout))
    if (
        kind is None
        or not tensor.is_cpu
        or not tensor.is_contiguous()
        or tensor.is_nested
        or tensor.is_neg()
    ):
        return _reduce_unusual(tensor)
    return _reduced(_tensor_from, tensor, tensor, kind, None)


def _reduce_unusual(tensor: Any) -> Any:
    """Reduce a tensor that is elsewhere, or whose numbers do not lie in their order.

    Device numbers are invalid in another process, so only the fact that it was on one is sent.
    """
    import torch  # noqa: PLC0415  # only processes that hold tensors reach this line

    plain = (
        tensor.layout == torch.strided
        and not tensor.is_quantized
        and tensor.device.type != "meta"
        and not tensor.is_nested
    )
    if not plain:
        return tensor.__reduce_ex__(5)
    host = tensor.detach()
    was_on_device = host.device.type != "cpu"
    if was_on_device:
        host = host.cpu()
    host = host.resolve_conj().resolve_neg()
    order: tuple[int, ...] | None = None
    if not host.is_contiguous():
        order = tuple(sorted(range(host.dim()), key=host.stride, reverse=True))
        laid_out = host.permute(order)
        if laid_out.is_contiguous():  # transposed, or channels last: its bytes lie in one piece
            host = laid_out
        else:
            host, order = host.contiguous(), None
    kind = str(host.dtype).removeprefix("torch.")
    return _reduced(_landed if was_on_device else _tensor_from, tensor, host, kind, order)


def _reduced(
    make: Callable[..., Any], tensor: Any, host: Any, kind: str, order: tuple[int, ...] | None
) -> Any:
    """Return how *make* gets *tensor* from the bytes of *host*, which lie in one piece."""
    size = host.nbytes
    if size == 0:
        data: Any = b""
    else:
        array = (ctypes.c_char * size).from_address(host.data_ptr())
        array._phalanx_owner = host  # noqa: SLF001  # ties the storage to the exported buffer
        data = pickle.PickleBuffer(array)
    what = (data, kind, tuple(host.shape), bool(tensor.requires_grad), order)
    attributes = getattr(tensor, "__dict__", None)
    if attributes:
        return make, what, attributes, None, None, _set_attributes
    return make, what


def _set_attributes(tensor: Any, attributes: dict[str, Any]) -> None:
    tensor.__dict__.update(attributes)


def _tensor_from(
    data: Any, kind: str, shape: tuple[int, ...], requires_grad: bool, order: tuple[int, ...] | None
) -> Any:
    known = _kinds.get(kind)
    if known is None:
        import torch  # noqa: PLC0415  # a value that holds a tensor needs torch where it is read

        known = _kinds[kind] = torch.frombuffer, torch.empty, getattr(torch, kind)
    from_buffer, empty, dtype = known
    view = memoryview(data)
    if view.nbytes == 0:
        tensor = empty(shape, dtype=dtype)
    else:
        # Small tensors arrive inside the pickle, as read-only bytes; writing to those in place
        # would change an immutable object, so they are copied.
        tensor = from_buffer(bytearray(view) if view.readonly else view, dtype=dtype)
        if len(shape) != 1:
            tensor = tensor.view(shape)
    if order is not None:
        tensor = tensor.permute([order.index(at) for at in range(len(order))])
    return tensor.requires_grad_() if requires_grad else tensor


def _landed(
    data: Any, kind: str, shape: tuple[int, ...], requires_grad: bool, order: tuple[int, ...] | None
) -> Any:
    tensor = _tensor_from(data, kind, shape, False, order)
    if _target_device:
        tensor = tensor.to(_target_device[0])
    return tensor.requires_grad_() if requires_grad else tensor


def _reduce_storage(storage: Any) -> Any:
    return _storage_of, (_bytes_of(storage),)


def _reduce_typed_storage(storage: Any) -> Any:
    # The public way to its bytes warns of its removal.
    return _typed_storage_of, (_bytes_of(storage._untyped_storage), storage.dtype)  # noqa: SLF001


def _bytes_of(storage: Any) -> Any:
    import torch  # noqa: PLC0415  # as above

    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _storage_of(view: Any) -> Any:
    return view.untyped_storage()


def _typed_storage_of(view: Any, dtype: Any) -> Any:
    import torch  # noqa: PLC0415  # as above

    make: Any = torch.TypedStorage  # untyped
    return make(wrap_storage=view.untyped_storage(), dtype=dtype, _internal=True)
