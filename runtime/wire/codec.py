"""Serializer: Python values to a pickle and out-of-band buffers, and back.

Guarantees: buffers from a threshold on (tensors, arrays, anything with protocol-5
buffers) and large ``bytes`` are not copied into the pickle. Classes and functions defined in
``__main__`` or in a notebook travel by value, everything importable by name. torch is used only if
the process has imported it.

Prior art: protocol 5 (PEP 574); cloudpickle for values without an importable name.
"""

from __future__ import annotations

import pickle
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import cloudpickle

from phalanx.supervision import MissingPackage, NotPicklable

from .tensor_reducers import reducers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

BUFFER_THRESHOLD = 72 * 1024
"""Bytes from which a buffer stays out of the pickle, unless its sender says otherwise."""


@dataclass(slots=True)  # frozen, it would take three times as long to make
class Encoded:
    """A pickled value: the pickle in *chunks*, and the buffers it refers to, in order."""

    chunks: Sequence[bytes | bytearray | memoryview]
    buffers: tuple[memoryview, ...] = ()

    def small(self, limit: int) -> bytes | None:
        """Return the pickle in one piece if it has at most *limit* bytes, else None."""
        chunks = self.chunks
        if len(chunks) == 1 and type(chunks[0]) is bytes:
            return chunks[0] if len(chunks[0]) <= limit else None
        return self.body if sum(map(_size, chunks)) <= limit else None

    def fixed_chunks(self) -> tuple[bytes, ...]:
        """Return the pickle in immutable pieces; `bytes` are not copied."""
        return tuple([each if type(each) is bytes else bytes(each) for each in self.chunks])

    @property
    def body(self) -> bytes:
        """The pickle in one piece."""
        return b"".join(self.chunks)

    @property
    def size_bytes(self) -> int:
        """Bytes in all."""
        return sum(map(_size, self.chunks)) + sum(view.nbytes for view in self.buffers)


class _Chunks(list[Any]):
    """A pickler's file. Large ``bytes`` and texts arrive uncopied."""

    write = list[Any].append


class _Pickler(pickle.Pickler):
    """Pickles by name what can be imported by it, and refuses what belongs to ``__main__``."""

    def reducer_override(self, obj: object) -> Any:
        if getattr(obj, "__module__", None) == "__main__":
            raise pickle.PicklingError("__main__ is another module in another process")
        return NotImplemented


def encode(value: object, what: str, threshold: int = BUFFER_THRESHOLD) -> Encoded:
    """Return *value* as bytes, and buffers of at least *threshold* bytes.

    Raises:
        NotPicklable: it cannot travel; *what* names it in the message.
    """
    buffers: list[memoryview] = []

    def keep_in_band(buffer: pickle.PickleBuffer) -> bool:
        view = buffer.raw()
        if view.nbytes < threshold:
            return True
        buffers.append(view)
        return False

    try:
        return Encoded(_dumps(_Pickler, value, keep_in_band), tuple(buffers))
    except Exception:  # noqa: BLE001, S110  # whatever the fast way cannot do, cloudpickle may
        pass
    buffers.clear()
    try:
        return Encoded(_dumps(cloudpickle.Pickler, value, keep_in_band), tuple(buffers))
    except Exception as error:
        raise NotPicklable(f"{what} cannot be pickled: {type(error).__name__}: {error}") from error


def decode(body: bytes | memoryview, buffers: Sequence[memoryview] = ()) -> Any:
    """Return the value that `encode` was given.

    Raises:
        MissingPackage: it holds a tensor, and torch is not installed here.
    """
    try:
        return pickle.loads(body, buffers=buffers)
    except ModuleNotFoundError as error:
        check_torch(error)
        raise


def check_torch(error: ModuleNotFoundError) -> None:
    """Raise `MissingPackage` if what could not be imported in decoding is torch."""
    if error.name == "torch":
        raise MissingPackage("torch", "torch") from error


def _size(chunk: bytes | bytearray | memoryview | pickle.PickleBuffer) -> int:
    return len(chunk) if isinstance(chunk, bytes) else memoryview(chunk).nbytes


def _dumps(
    make: Callable[..., Any],
    value: object,
    keep_in_band: Callable[[pickle.PickleBuffer], Any] | None,
) -> Sequence[bytes]:
    target = _Chunks()
    pickler = make(target, 5, buffer_callback=keep_in_band)
    torch = sys.modules.get("torch")
    if torch is not None:
        table = reducers(torch)
        pickler.dispatch_table = table if make is _Pickler else {**pickler.dispatch_table, **table}
    pickler.dump(value)
    return target


def encode_by_value(
    value: object, what: str, make: Callable[..., Any] = cloudpickle.Pickler
) -> bytes:
    """Return *value* pickled by cloudpickle, or its subclass *make*, without buffers.

    Raises:
        NotPicklable: it cannot travel; *what* names it in the message.
    """
    try:
        return b"".join(_dumps(make, value, None))
    except Exception as error:
        raise NotPicklable(f"{what} cannot be pickled: {type(error).__name__}: {error}") from error
