"""Outgoing message: a body that travels in the packet, in an arena slot or in a memory file.

Guarantees: a body is encoded once, whatever the number of receivers. A large one is copied once,
into the sender's arena or, without room there, into a fresh sealed memory file whose descriptor
rides on the packet; it is refused before its first byte is written if memory is short. Readers get
private views. A malformed body raises on decoding.

Layout: only the buffers are out of band. The pickle that refers to them stays in the packet, behind
a table of (offset, size), so a reader that does not use its arguments touches no page of them. A
pickle too large for the packet goes out of band as the first part; the table then precedes it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from dataclasses import dataclass
from pickle import PickleBuffer, loads
from typing import TYPE_CHECKING, Any

from phalanx.runtime.linux import descriptors
from phalanx.runtime.memory.budget import reserve, writable_bytes
from phalanx.runtime.memory.mapping import copied, mapped
from phalanx.supervision import MessageTooLarge

from .packet_header import EVERY_RANK, HEADER, IN_ARENA, IN_FILE, INLINE_LIMIT, MAGIC, Flag, Kind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from phalanx.runtime.memory.arena import Arena, Borrower, Extent

    from .codec import Encoded


ALIGNMENT = 64

GATHERED = 32 * 1024
"""Bytes from which a body in a packet is not joined with its header."""

_COUNT = struct.Struct("<Q")
_ENTRY = struct.Struct("<QQ")
_NO_MEMORY = (errno.ENOMEM, errno.ENOSPC, errno.EFBIG)


def lay_out(encoded: Encoded, limit: int = 0) -> tuple[bytes, list[memoryview], list[int], int]:
    """Return the part for a packet with room for *limit* bytes, and what goes out of band.

    That is the other parts, the offset of each, and their size in all. Table and pickle are the
    first of them if there are no buffers or the packet has no room: then its part is empty.
    """
    buffers = encoded.buffers
    end = _COUNT.size + len(buffers) * _ENTRY.size
    pickled = encoded.small(limit - end) if buffers else None
    chunks: list[memoryview] = []
    offsets: list[int] = []
    entries = [_COUNT.pack(len(buffers) + (pickled is None))]
    if pickled is None:
        chunks = [PickleBuffer(chunk).raw() for chunk in encoded.chunks]  # plain bytes, all
        offsets.append(0)
        end += _ENTRY.size
        entries.append(_ENTRY.pack(end, sum(chunk.nbytes for chunk in chunks)))
        for chunk in chunks:
            offsets.append(end)
            end += chunk.nbytes
    else:
        end = 0
    for buffer in buffers:
        end = -(-end // ALIGNMENT) * ALIGNMENT
        offsets.append(end)
        entries.append(_ENTRY.pack(end, buffer.nbytes))
        end += buffer.nbytes
    if pickled is not None:
        return b"".join((*entries, pickled)), list(buffers), offsets, end
    return b"", [memoryview(b"".join(entries)), *chunks, *buffers], offsets, end


def write_file(
    parts: Sequence[memoryview], offsets: Sequence[int], size: int, name: str = "phalanx-message"
) -> int:
    """Return a sealed memory file called *name* with the body in it.

    Raises:
        MessageTooLarge: there is not enough memory; it says for how much there is.
    """
    file = new_message_file(size, name)
    try:
        with descriptors.closed_on_error(file):
            for part, offset in zip(parts, offsets, strict=True):
                write_all(file, part, offset)
            return seal_message_file(file)
    except OSError as error:
        if error.errno in _NO_MEMORY:  # the file's own memory is free again
            raise MessageTooLarge(size, writable_bytes(size)) from error
        raise


def new_message_file(size: int, name: str = "phalanx-message") -> int:
    """Return an empty memory file for a body of *size* bytes.

    Raises:
        MessageTooLarge: there is not enough memory.
    """
    room = writable_bytes(size)
    if size > room:
        raise MessageTooLarge(size, room)
    file = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with descriptors.closed_on_error(file):
        try:
            os.ftruncate(file, size)
            reserve(file, 0, size, missing=size)
        except OSError as error:
            raise MessageTooLarge(size, min(room, size - 1)) from error
    return file


def seal_message_file(file: int) -> int:
    """Seal *file* against every change; return it."""
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
    return file


def read_file(file: int, size: int) -> memoryview:
    """Return a private view of the body in *file*, which may be closed then.

    Raises:
        ValueError: it is smaller, or not sealed.
        MemoryError: this process has no room for it.
    """
    seals = fcntl.fcntl(file, fcntl.F_GET_SEALS)
    if not seals & fcntl.F_SEAL_SHRINK or not 0 < size <= os.fstat(file).st_size:
        # One that can shrink would end its reader by SIGBUS.
        raise ValueError(f"a message of {size} bytes in a file that is smaller or not sealed")
    view = mapped(file, 0, size)
    return copied(file, 0, size) if view is None else view


def decode_large(body: memoryview, inline: bytes | memoryview = b"") -> Any:
    """Return the value in *body*, of which *inline* came in the packet.

    Raises:
        ValueError: its table is malformed.
        Exception: whatever decoding raises.
    """
    if inline:
        parts, end = _read_table(inline, body)
        return loads(inline[end:], buffers=parts)
    parts, _ = _read_table(body, body)
    return loads(parts[0], buffers=parts[1:])


def is_pickle_alone(body: memoryview) -> bool:
    """Whether there is nothing in *body* but a table and a pickle."""
    return body.nbytes >= _COUNT.size and _COUNT.unpack_from(body)[0] == 1


def _read_table(table: bytes | memoryview, body: memoryview) -> tuple[list[memoryview], int]:
    """Return the parts of *body* that *table* lists, and the end of the table."""
    room = len(table)
    count = _COUNT.unpack_from(table)[0] if room >= _COUNT.size else 0
    end = _COUNT.size + count * _ENTRY.size
    if not count or end > room:
        raise ValueError(f"a message of {room} bytes with a table of {count} parts")
    size = body.nbytes
    parts: list[memoryview] = []
    for offset, length in _ENTRY.iter_unpack(table[_COUNT.size : end]):
        if offset + length > size:
            raise ValueError(f"a message of {size} bytes whose table points outside of it")
        parts.append(body[offset : offset + length])
    return parts, end


def write_all(file: int, data: memoryview, offset: int) -> None:
    """Write all of *data* to *file* at *offset*."""
    while data.nbytes:
        written = os.pwrite(file, data, offset)
        data = data[written:]
        offset += written


_write_head = HEADER.pack


@dataclass(slots=True)
class Payload:
    """An encoded body, to be sent any number of times.

    Attributes:
        tail: The bytes after the header: the body, or its place.
        rest: More of them, which the kernel gathers: a copy less where they are many.
        file: The memory file of a large body, or None.
        extent: Its place in an arena, or None.
    """

    flags: int
    tail: bytes
    file: int | None = None
    extent: Extent | None = None
    rest: tuple[bytes, ...] = ()

    @classmethod
    def of(
        cls, encoded: Encoded | None, arena: Arena | None = None, limit: int = INLINE_LIMIT
    ) -> Payload:
        """Return *encoded* as a payload; a body of more than *limit* bytes is copied now.

        Raises:
            MessageTooLarge: there is not enough memory; nothing was written.
        """
        if encoded is None:
            return cls(Flag.NONE, b"")
        if not encoded.buffers:
            if (small := encoded.small(GATHERED)) is not None:
                return cls(Flag.NONE, small)
            if encoded.size_bytes <= limit:
                return cls(Flag.NONE, b"", rest=encoded.fixed_chunks())
        inline, parts, offsets, size = lay_out(encoded, limit)
        extent = arena.place(size) if arena is not None else None
        if extent is None:
            return cls.in_file(write_file(parts, offsets, size), size, inline)
        try:
            extent.write(parts, offsets)
        except BaseException:
            extent.let_go()
            raise
        return cls.in_arena(extent, size, inline)

    @classmethod
    def in_arena(cls, extent: Extent, size: int, inline: bytes = b"") -> Payload:
        """Return the payload of *size* bytes in *extent*, and *inline* in the packet."""
        tail = IN_ARENA.pack(extent.slot, extent.start, size) + inline
        return cls(Flag.ARENA, tail, extent=extent)

    @classmethod
    def in_file(cls, file: int, size: int, inline: bytes = b"") -> Payload:
        """Return the payload of *size* bytes in a sealed memory file, which it owns."""
        return cls(Flag.FILE, IN_FILE.pack(size) + inline, file)

    def lend(self, borrower: Borrower) -> None:
        """Count the message as lent to *borrower*; before each time it is sent."""
        if self.extent is not None:
            self.extent.lend(borrower)

    def take_back(self, borrower: Borrower) -> None:
        """Undo `lend`: it could not be sent."""
        if self.extent is not None:
            borrower.take_back(self.extent.slot)

    def packet(
        self,
        kind: int,
        *,
        epoch: int,
        call_id: int,
        incarnation: int = 0,
        extra: int = EVERY_RANK,
        flags: int = Flag.NONE,
    ) -> bytes:
        """Return the packet; `file` must ride on it."""
        flags |= self.flags
        head = _write_head(MAGIC, kind, flags, epoch, call_id, incarnation, extra)
        return b"".join((head, self.tail, *self.rest))

    def close(self) -> None:
        """Release the memory; receivers keep it."""
        file, self.file = self.file, None
        if file is not None:
            os.close(file)
        extent, self.extent = self.extent, None
        if extent is not None:
            extent.let_go()


def call_packet(  # noqa: PLR0917  # as they stand in the header
    payload: Payload, flags: int, epoch: int, call_id: int, round_: int, extra: int
) -> bytes:
    """Return the packet of a call, as `Payload.packet` does, faster; `Payload.rest` follows it."""
    flags |= payload.flags
    return _write_head(MAGIC, Kind.CALL, flags, epoch, call_id, round_, extra) + payload.tail
