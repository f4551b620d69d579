"""Bodies too large for a packet: written once, into memory that every reader maps.

Guarantees: such a body lies in the sender's arena, or, where that has no room or there is none, in
a fresh sealed memory file whose descriptor rides on the packet. It is refused before its first
byte is written where there is not memory enough. A reader maps either privately: writing in place
changes nobody else's data. What claims to be such a body and is not ends in an exception.

It begins with a table: how many parts there are, and (offset, size) of each; the first part is the
pickle, the others are the buffers it refers to.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import struct
from typing import TYPE_CHECKING, Any

from phalanx.supervision import MessageTooLarge

from .codec import Encoded, decode
from .memory import writable_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

ALIGNMENT = 64

_COUNT = struct.Struct("<Q")
_ENTRY = struct.Struct("<QQ")
_NO_MEMORY = (errno.ENOMEM, errno.ENOSPC, errno.EFBIG)


def lay_out(encoded: Encoded) -> tuple[list[memoryview], list[int], int]:
    """Return what the body consists of, where each piece begins, and its size."""
    count = 1 + len(encoded.buffers)
    end = _COUNT.size + count * _ENTRY.size
    chunks = [memoryview(chunk) for chunk in encoded.chunks]
    offsets = [0]
    entries = [_ENTRY.pack(end, sum(chunk.nbytes for chunk in chunks))]
    for chunk in chunks:
        offsets.append(end)
        end += chunk.nbytes
    for buffer in encoded.buffers:
        end = -(-end // ALIGNMENT) * ALIGNMENT
        entries.append(_ENTRY.pack(end, buffer.nbytes))
        offsets.append(end)
        end += buffer.nbytes
    table = memoryview(_COUNT.pack(count) + b"".join(entries))
    return [table, *chunks, *encoded.buffers], offsets, end


def write_file(
    parts: Sequence[memoryview],
    offsets: Sequence[int],
    size: int,
    name: str = "phalanx-message",
) -> int:
    """Return a sealed memory file, shown as *name*, with the body in it.

    Raises:
        MessageTooLarge: there is not memory enough; it says for how much there is.
    """
    file = new_message_file(size, name)
    try:
        for part, offset in zip(parts, offsets, strict=True):
            write_all(file, part, offset)
        return seal_message_file(file)
    except OSError as error:
        os.close(file)
        if error.errno in _NO_MEMORY:
            raise MessageTooLarge(size, writable_bytes(size)) from error
        raise
    except BaseException:
        os.close(file)
        raise


def new_message_file(size: int, name: str = "phalanx-message") -> int:
    """Return an empty memory file for a body of *size* bytes.

    Raises:
        MessageTooLarge: there is not memory enough for it.
    """
    room = writable_bytes(size)
    if size > room:
        raise MessageTooLarge(size, room)
    file = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(file, size)
    except OSError as error:
        os.close(file)
        raise MessageTooLarge(size, room) from error
    return file


def seal_message_file(file: int) -> int:
    """Make *file* one that nobody can change any more, its readers included; return it."""
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
    return file


def map_file(file: int, size: int) -> memoryview:
    """Return the body in *file*, to be written in place as one likes.

    Raises:
        ValueError: no body of that size can lie in it.
    """
    seals = fcntl.fcntl(file, fcntl.F_GET_SEALS)
    if not seals & fcntl.F_SEAL_SHRINK or not 0 < size <= os.fstat(file).st_size:
        # One that can shrink would end its reader by SIGBUS.
        msg = f"a message of {size} bytes in a file that is smaller or not sealed"
        raise ValueError(msg)
    return memoryview(mmap.mmap(file, size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE))


def decode_far(body: memoryview) -> Any:
    """Return the value in *body*.

    Raises:
        ValueError: its table makes no sense.
        Exception: whatever decoding raises.
    """
    size = body.nbytes
    count = _COUNT.unpack_from(body)[0] if size >= _COUNT.size else 0
    end = _COUNT.size + count * _ENTRY.size
    if not count or end > size:
        msg = f"a message of {size} bytes with a table of {count} parts"
        raise ValueError(msg)
    entries = list(_ENTRY.iter_unpack(body[_COUNT.size : end]))
    if any(offset + length > size for offset, length in entries):
        msg = f"a message of {size} bytes whose table points outside of it"
        raise ValueError(msg)
    parts = [body[offset : offset + length] for offset, length in entries]
    return decode(parts[0], parts[1:])


def write_all(file: int, data: memoryview, offset: int) -> None:
    """Write all of *data* to *file* at *offset*."""
    while data.nbytes:
        written = os.pwrite(file, data, offset)
        data = data[written:]
        offset += written
