"""One message on the wire between the driver and one worker.

Guarantees: a frame is one packet of a sequenced-packet socket, so it arrives whole or not at all;
what is not a frame of ours decodes to None, never to an exception; bytes too many for a packet
travel in a fresh, sealed memory file whose descriptor rides on the packet, is written once for
all readers, and belongs to nobody once they have mapped it. A reader maps it privately: writing
in place changes nobody else's data.

Every frame carries call id, epoch and incarnation. A socket belongs to one incarnation alone, so a
call needs no incarnation and carries in its place the round it was sent in (`board`): one
encoding serves every rank.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
import struct
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from typing import TYPE_CHECKING, Any

from .codec import Encoded, decode

if TYPE_CHECKING:
    from collections.abc import Sequence

MAGIC = 0x5048
HEADER = struct.Struct("<HBBIQII")
"""magic, kind, flags, epoch, call id, incarnation, extra: 24 bytes."""

INLINE_LIMIT = 32 * 1024
"""Bytes of body that travel in the packet itself."""

PACKET_LIMIT = HEADER.size + INLINE_LIMIT + 4096
ALIGNMENT = 64
EVERY_RANK = 0xFFFFFFFF


class Kind(IntEnum):
    """What a frame says."""

    CALL = 1
    STOP = 2
    HELLO = 3
    REPLY = 16
    ERROR = 17
    SKIPPED = 18
    READY = 19
    START_FAILED = 20
    EVENT = 21
    LAST_WORDS = 22


class Flag(IntFlag):
    """How a frame is to be read."""

    NONE = 0
    LARGE = 1  # the body lies in the memory file whose descriptor came along
    COLLECTIVE = 2  # withdrawn through the board if not yet begun
    TELL = 4  # the answer is an acknowledgement, whatever the method returns
    JOINED = 8  # an error out of a process group: another rank's death may be behind it


@dataclass(slots=True)
class Frame:
    """One message.

    Attributes:
        incarnation: Whose reply it is; for a call the round it was sent in.
        extra: For a call the rank whose value is wanted, or `EVERY_RANK`.
        body: The bytes in the packet; for a large frame the table of sizes.
        fds: Descriptors that came along; whoever decodes or drops the frame closes them.
    """

    kind: int
    flags: int
    epoch: int
    call_id: int
    incarnation: int
    extra: int
    body: bytes | memoryview
    fds: list[int]

    def value(self) -> Any:
        """Return the decoded body; closes the descriptors."""
        try:
            if not self.flags & Flag.LARGE:
                return decode(self.body) if self.body else None
            return _decode_large(self.fds[0], self.body)
        finally:
            self.drop()

    def drop(self) -> None:
        """Close what came along."""
        while self.fds:
            os.close(self.fds.pop())

    def __del__(self) -> None:
        if self.fds:  # an answer nobody ever asked for
            self.drop()


@dataclass(slots=True)
class Payload:
    """A body ready to be sent, as often and to as many as it must.

    Attributes:
        tail: What follows the header: the body, or the table of a large one.
        file: The memory file of a large body, or None.
    """

    flags: Flag
    tail: bytes
    file: int | None = None

    @classmethod
    def of(cls, encoded: Encoded | None) -> Payload:
        """Return *encoded* as a payload; a large one is copied now: later changes do not show."""
        if encoded is None:
            return cls(Flag.NONE, b"")
        if not encoded.buffers and len(encoded.body) <= INLINE_LIMIT:
            return cls(Flag.NONE, encoded.body)
        file, table = _write_large(encoded)
        return cls(Flag.LARGE, table, file)

    def packet(
        self,
        kind: Kind,
        *,
        epoch: int,
        call_id: int,
        incarnation: int = 0,
        extra: int = EVERY_RANK,
        flags: Flag = Flag.NONE,
    ) -> bytes:
        """Return the packet; `file` must ride on it."""
        flags |= self.flags
        head = HEADER.pack(MAGIC, kind, flags, epoch, call_id, incarnation, extra)
        return head + self.tail

    def close(self) -> None:
        """Give the memory file back; who has received it keeps it."""
        if self.file is not None:
            os.close(self.file)
            self.file = None


def unpack(packet: bytes | memoryview, fds: list[int]) -> Frame | None:
    """Return the frame in *packet*, or None (its descriptors closed) where it is not one."""
    if len(packet) >= HEADER.size:
        magic, kind, flags, epoch, call_id, incarnation, extra = HEADER.unpack_from(packet)
        if magic == MAGIC and bool(flags & Flag.LARGE) == (len(fds) == 1) and len(fds) <= 1:
            body = packet[HEADER.size :]
            return Frame(kind, flags, epoch, call_id, incarnation, extra, body, fds)
    for fd in fds:
        os.close(fd)
    return None


def receive(sock: socket.socket) -> Frame | bytes | None:
    """Return the next frame, ``b""`` at the end of the stream, or None for a foreign packet.

    Raises:
        BlockingIOError: nothing to read on a non-blocking socket.
        ConnectionResetError: the peer died with unread input; read on, its last words follow.
    """
    packet, ancillary, _flags, _ = sock.recvmsg(PACKET_LIMIT, _ANCILLARY)
    fds: list[int] = []
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            count = len(data) // 4
            fds.extend(struct.unpack(f"<{count}i", data[: count * 4]))
    if not packet and not fds:
        return b""
    return unpack(packet, fds)


def send(sock: socket.socket, packet: bytes, file: int | None) -> None:
    """Send one packet; raises what the socket raises."""
    if file is None:
        sock.send(packet, socket.MSG_NOSIGNAL)
    else:
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("<i", file))
        sock.sendmsg([packet], [rights], socket.MSG_NOSIGNAL)


_ANCILLARY = socket.CMSG_SPACE(4 * 4)
_TABLE_ENTRY = struct.Struct("<QQ")


def _write_large(encoded: Encoded) -> tuple[int, bytes]:
    """Write the value into a sealed memory file; return it and the table of (offset, size)."""
    parts: Sequence[bytes | memoryview] = (encoded.body, *encoded.buffers)
    entries: list[tuple[int, int]] = []
    end = 0
    for part in parts:
        size = len(part) if isinstance(part, bytes) else part.nbytes
        entries.append((end, size))
        end = -(-(end + size) // ALIGNMENT) * ALIGNMENT
    file = os.memfd_create("phalanx-message", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(file, max(end, 1))
        for part, (offset, _) in zip(parts, entries, strict=True):
            _write_all(file, memoryview(part), offset)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
    except BaseException:
        os.close(file)
        raise
    return file, b"".join(_TABLE_ENTRY.pack(*entry) for entry in entries)


def _write_all(file: int, data: memoryview, offset: int) -> None:
    while data.nbytes:
        written = os.pwrite(file, data, offset)
        data = data[written:]
        offset += written


def _decode_large(file: int, table: bytes | memoryview) -> Any:
    entries = list(_TABLE_ENTRY.iter_unpack(table))
    size = os.fstat(file).st_size
    if not entries or any(offset + length > size for offset, length in entries):
        msg = f"a message of {size} bytes whose table points outside of it"
        raise ValueError(msg)
    view = memoryview(mmap.mmap(file, size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE))
    parts = [view[offset : offset + length] for offset, length in entries]
    return decode(parts[0], parts[1:])
