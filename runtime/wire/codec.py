"""Serializer: Python values to a pickle and out-of-band buffers, and back.

Guarantees: buffers of at least `BUFFER_THRESHOLD` bytes (tensors, arrays, anything with protocol-5
buffers) and large ``bytes`` are not copied into the pickle. Classes and functions defined in
``__main__`` or in a notebook travel by value, everything importable by name. torch is used only if
the process has imported it.

Prior art: protocol 5 (PEP 574); cloudpickle for what has no importable name.
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

BUFFER_THRESHOLD = 16 * 1024
"""Bytes from which a buffer stays out of the pickle."""


_LARGE = 64 * 1024
"""Bytes from which the pickler passes a ``bytes`` object to `write` without copying it."""


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

    @property
    def body(self) -> bytes:
        """The pickle in one piece."""
        return b"".join(self.chunks)

    @property
    def size_bytes(self) -> int:
        """Bytes in all."""
        return sum(map(_size, self.chunks)) + sum(view.nbytes for view in self.buffers)


class _Chunks(list[Any]):
    """A pickler's file. Large objects arrive uncopied."""

    write = list[Any].append


def encode(value: object, what: str) -> Encoded:
    """Return *value* as bytes and buffers.

    Raises:
        NotPicklable: it cannot travel; *what* names it in the message.
    """
    buffers: list[memoryview] = []

    def keep_in_band(buffer: pickle.PickleBuffer) -> bool:
        view = buffer.raw()
        if view.nbytes < BUFFER_THRESHOLD:
            return True
        buffers.append(view)
        return False

    try:
        chunks = _dumps(value, keep_in_band)
        before = b""
        for chunk in chunks:
            if _size(chunk) >= _LARGE and _announces(before, chunk):
                before = b""  # to search it takes longer than to copy it
            elif b"__main__" in chunk:
                break
            else:
                before = chunk
        else:
            return Encoded(chunks, tuple(buffers))
    except Exception:  # noqa: BLE001, S110  # whatever the fast way cannot do, cloudpickle may
        pass
    buffers.clear()
    try:
        return Encoded(_dumps_by_value(value, keep_in_band), tuple(buffers))
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


def _size(chunk: bytes | bytearray | memoryview) -> int:
    return chunk.nbytes if isinstance(chunk, memoryview) else len(chunk)


def _announces(before: bytes, chunk: bytes) -> bool:
    """Whether *before* ends with the opcode and the size of *chunk*, which then is data.

    Opcodes may come in chunks of any size too: two texts just below `_LARGE` share one.
    """
    size = _size(chunk).to_bytes(8, "little")
    return (before[-5:-4] in _SHORT and before[-4:] == size[:4]) or (
        before[-9:-8] in _LONG and before[-8:] == size
    )


def _dumps(value: object, keep_in_band: Callable[[pickle.PickleBuffer], Any]) -> Sequence[bytes]:
    torch = sys.modules.get("torch")
    if torch is None and not _holds_large(value):
        return (pickle.dumps(value, 5, buffer_callback=keep_in_band),)  # the quicker way
    target = _Chunks()
    pickler = pickle.Pickler(target, 5, buffer_callback=keep_in_band)
    if torch is not None:
        pickler.dispatch_table = reducers(torch)
    pickler.dump(value)
    return target


def _holds_large(value: Any) -> bool:
    """Whether there are large bytes at the surface of *value*; deeper ones are copied once more."""
    whole = value  # stays Any; isinstance would narrow it
    if isinstance(value, tuple):
        for each in whole:  # noqa: SIM110  # any() takes three times as long
            if each.__class__ not in _PLAIN and _holds_large(each):
                return True
        return False
    if isinstance(value, dict):
        if not whole:
            return False
        return any(isinstance(each, _BYTES) and len(each) >= _LARGE for each in whole.values())
    return isinstance(value, _BYTES) and len(value) >= _LARGE


_SHORT = (pickle.BINBYTES, pickle.BINUNICODE)  # followed by a size of four bytes
_LONG = (pickle.BINBYTES8, pickle.BINUNICODE8, pickle.BYTEARRAY8)  # of eight
_BYTES = (bytes, bytearray)
_PLAIN = frozenset((str, int, float, bool, type(None)))


def _dumps_by_value(
    value: object,
    keep_in_band: Callable[[pickle.PickleBuffer], Any] | None,
    make: Callable[..., Any] = cloudpickle.Pickler,
) -> Sequence[bytes]:
    target = _Chunks()
    # cloudpickle has no types of its own.
    pickler: Any = make(target, 5, buffer_callback=keep_in_band)
    torch = sys.modules.get("torch")
    if torch is not None:
        for kind, reduce in reducers(torch).items():
            pickler.dispatch_table[kind] = reduce
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
        return b"".join(_dumps_by_value(value, None, make))
    except Exception as error:
        raise NotPicklable(f"{what} cannot be pickled: {type(error).__name__}: {error}") from error
