"""One message on the wire between the driver and one worker.

Guarantees: a frame is one packet of a sequenced-packet socket, so it arrives whole or not at all;
what is not a frame of ours decodes to None, never to an exception. Bytes too many for a packet are
written once for all readers: into the sender's arena, or, where that has no room or there is none,
into a fresh sealed memory file whose descriptor rides on the packet. A reader maps either
privately: writing in place changes nobody else's data. A message that no memory is left for is
refused before its first byte is written.

Every frame carries call id, epoch and incarnation. A socket belongs to one incarnation alone, so a
call needs no incarnation and carries in its place the round it was sent in (`board`): one
encoding serves every rank.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import socket
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final

from phalanx.supervision import MessageTooLarge, RuntimeFault

from .codec import Encoded, decode
from .memory import writable_bytes

if TYPE_CHECKING:
    from .arena import Arena, Borrower, Extent
    from .arena_reader import ArenaReader

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
    MORE = 4
    CLOSE = 5
    ASSIGN = 8
    REFORM = 9
    REPLY = 16
    ERROR = 17
    SKIPPED = 18
    READY = 19
    START_FAILED = 20
    EVENT = 21
    LAST_WORDS = 22
    ITEM = 23
    STANDBY = 24
    LEFT = 25
    NOT_REFORMED = 26
    PASSED = 27
    LINK_ENDED = 28


class Flag:
    """How a frame is to be read. Plain integers: arithmetic on an `IntFlag` takes a microsecond."""

    NONE: Final[int] = 0
    FILE: Final[int] = 1  # the body lies in the memory file whose descriptor came along
    COLLECTIVE: Final[int] = 2  # withdrawn through the board if not yet begun
    TELL: Final[int] = 4  # the answer is an acknowledgement, whatever the method returns
    JOINED: Final[int] = 8  # an error out of a process group: a death may be behind it
    ARENA: Final[int] = 16  # the body lies in the sender's arena
    LOST: Final[int] = 64  # set on arrival: no descriptor was free here for the body's
    STREAM: Final[int] = 32  # what the method returns is iterated, and its items are sent
    PACED: Final[int] = 128  # the next call waits elsewhere: `Kind.PASSED` lets it come


@dataclass(slots=True)
class Frame:
    """One message.

    Attributes:
        incarnation: Whose reply it is; for a call the round it was sent in.
        extra: For a call the rank whose value is wanted, or `EVERY_RANK`; for an item its number;
            for `Kind.MORE` how many items are wanted in all.
        body: The bytes in the packet; for a large message where it lies.
        fds: Descriptors that came along; whoever decodes or drops the frame closes them.
        lender: What a message in an arena is read through and given back to; None once it has been.
    """

    kind: int
    flags: int
    epoch: int
    call_id: int
    incarnation: int
    extra: int
    body: bytes | memoryview
    fds: list[int]
    lender: ArenaReader | None = None

    def value(self) -> Any:
        """Return the decoded body, once; gives back what came along.

        Raises:
            ValueError: a large message does not lie where the frame says.
            RuntimeFault: its descriptor could not be received.
            Exception: whatever decoding raises.
        """
        if self.flags & Flag.LOST:
            msg = "a message was lost: this process has no descriptor free; raise `ulimit -n`"
            raise RuntimeFault(msg)
        try:
            if not self.flags & LARGE:
                return decode(self.body) if self.body else None
            return _decode_large(self._open())
        finally:
            self.drop()

    def large(self) -> memoryview | None:
        """Return the bytes of a large body, once; None for one that lies in the packet.

        They stay until the view has died.

        Raises:
            ValueError: they do not lie where the frame says.
        """
        if not self.flags & LARGE:
            return None
        try:
            return self._open()
        finally:
            self.drop()

    def _open(self) -> memoryview:
        if self.flags & Flag.FILE:
            return _map_file(self.fds[0], *_IN_FILE.unpack(self.body))
        lender, self.lender = self.lender, None
        if lender is None:
            msg = "this message has been read or dropped before"
            raise ValueError(msg)
        return lender.open(*_IN_ARENA.unpack(self.body))

    def drop(self) -> None:
        """Give back what came along."""
        while self.fds:
            os.close(self.fds.pop())
        lender, self.lender = self.lender, None
        if lender is not None:
            lender.give_back(_IN_ARENA.unpack(self.body)[0])

    def __del__(self) -> None:
        if self.fds or self.lender is not None:  # an answer nobody ever asked for
            self.drop()


@dataclass(slots=True)
class Payload:
    """A body ready to be sent, as often and to as many as it must.

    Attributes:
        tail: What follows the header: the body, or where a large one lies.
        file: The memory file of a large body that lies in one of its own, or None.
        extent: The place of one that lies in an arena, or None.
    """

    flags: int
    tail: bytes
    file: int | None = None
    extent: Extent | None = None

    @classmethod
    def of(cls, encoded: Encoded | None, arena: Arena | None = None) -> Payload:
        """Return *encoded* as a payload; a large one is copied now: later changes do not show.

        Raises:
            MessageTooLarge: there is not memory enough for it; nothing was written.
        """
        if encoded is None:
            return cls(Flag.NONE, b"")
        if not encoded.buffers and (small := encoded.small(INLINE_LIMIT)) is not None:
            return cls(Flag.NONE, small)
        parts, offsets, size = _lay_out(encoded)
        extent = arena.place(size) if arena is not None else None
        if extent is None:
            return cls.in_file(_write_file(parts, offsets, size), size)
        try:
            extent.write(parts, offsets)
        except BaseException:
            extent.let_go()
            raise
        return cls.in_arena(extent, size)

    @classmethod
    def in_arena(cls, extent: Extent, size: int) -> Payload:
        """Return the *size* bytes that have been written to *extent*."""
        return cls(Flag.ARENA, _IN_ARENA.pack(extent.slot, extent.start, size), extent=extent)

    @classmethod
    def in_file(cls, file: int, size: int) -> Payload:
        """Return the *size* bytes in a sealed memory file, which is closed with the payload."""
        return cls(Flag.FILE, _IN_FILE.pack(size), file)

    def lend(self, borrower: Borrower) -> None:
        """Count the message as read by *borrower*; before each time it is sent."""
        if self.extent is not None:
            self.extent.lend(borrower)

    def packet(
        self,
        kind: Kind,
        *,
        epoch: int,
        call_id: int,
        incarnation: int = 0,
        extra: int = EVERY_RANK,
        flags: int = Flag.NONE,
    ) -> bytes:
        """Return the packet; `file` must ride on it."""
        flags |= self.flags
        head = HEADER.pack(MAGIC, kind, flags, epoch, call_id, incarnation, extra)
        return head + self.tail

    def close(self) -> None:
        """Let go of the memory; who has been sent it keeps it."""
        if self.file is not None:
            os.close(self.file)
            self.file = None
        if self.extent is not None:
            self.extent.let_go()
            self.extent = None


def call_id_of(packet: bytes) -> int:
    """Return which call one of our own packets belongs to."""
    call_id: int = HEADER.unpack_from(packet)[4]
    return call_id


def unpack(
    packet: bytes | memoryview,
    fds: list[int],
    lender: ArenaReader | None = None,
    *,
    lost: bool = False,
) -> Frame | None:
    """Return the frame in *packet*, or None (its descriptors closed) where it is not one.

    Where descriptors were *lost* on the way, the frame has the flag `Flag.LOST`.
    """
    if len(packet) >= HEADER.size:
        magic, kind, flags, epoch, call_id, incarnation, extra = HEADER.unpack_from(packet)
        body = packet[HEADER.size :]
        match flags & LARGE:
            case 0:
                whole = not fds
                lender = None
            case Flag.FILE if lost and not fds:
                # Its call must still be answered: to drop the frame would leave it waiting.
                whole = len(body) == _IN_FILE.size
                flags |= Flag.LOST
                lender = None
            case Flag.FILE:
                whole = len(fds) == 1 and len(body) == _IN_FILE.size
                lender = None
            case Flag.ARENA:
                whole = not fds and len(body) == _IN_ARENA.size and lender is not None
            case _:
                whole = False
        if whole and magic == MAGIC:
            return Frame(kind, flags, epoch, call_id, incarnation, extra, body, fds, lender)
    for fd in fds:
        os.close(fd)
    return None


def receive(sock: socket.socket, lender: ArenaReader | None = None) -> Frame | bytes | None:
    """Return the next frame, ``b""`` at the end of the stream, or None for a foreign packet.

    *lender* is what messages in the peer's arena are read through; without one they are foreign.

    Raises:
        BlockingIOError: nothing to read on a non-blocking socket.
        ConnectionResetError: the peer died with unread input; read on, its last words follow.
    """
    packet, ancillary, cut, _ = sock.recvmsg(PACKET_LIMIT, _ANCILLARY)
    fds: list[int] = []
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            count = len(data) // 4
            fds.extend(struct.unpack(f"<{count}i", data[: count * 4]))
    if not packet and not fds:
        return b""
    if cut & socket.MSG_TRUNC:
        packet = b""
    return unpack(packet, fds, lender, lost=bool(cut & socket.MSG_CTRUNC))


def send(sock: socket.socket, packet: bytes, file: int | None) -> None:
    """Send one packet; raises what the socket raises."""
    if file is None:
        sock.send(packet, socket.MSG_NOSIGNAL)
    else:
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("<i", file))
        sock.sendmsg([packet], [rights], socket.MSG_NOSIGNAL)


_ANCILLARY = socket.CMSG_SPACE(4 * 4)
LARGE = Flag.FILE | Flag.ARENA
_IN_FILE = struct.Struct("<Q")
"""size"""

_IN_ARENA = struct.Struct("<IQQ")
"""slot, start, size"""

_COUNT = struct.Struct("<Q")
_ENTRY = struct.Struct("<QQ")


def _lay_out(encoded: Encoded) -> tuple[list[memoryview], list[int], int]:
    """Return what a large message consists of, where each part begins, and its size.

    It begins with a table: how many parts there are, and (offset, size) of each; the first part is
    the pickle, the others are the buffers it refers to.
    """
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


def _write_file(parts: list[memoryview], offsets: list[int], size: int) -> int:
    """Return a sealed memory file with the message in it."""
    file = new_message_file(size)
    try:
        for part, offset in zip(parts, offsets, strict=True):
            _write_all(file, part, offset)
        return seal_message_file(file)
    except OSError as error:
        os.close(file)
        if error.errno in _NO_MEMORY:
            raise MessageTooLarge(size, writable_bytes(size)) from error
        raise
    except BaseException:
        os.close(file)
        raise


def new_message_file(size: int) -> int:
    """Return an empty memory file for a message of *size* bytes.

    Raises:
        MessageTooLarge: there is not memory enough for it.
    """
    room = writable_bytes(size)
    if size > room:
        raise MessageTooLarge(size, room)
    file = os.memfd_create("phalanx-message", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
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


_NO_MEMORY = (errno.ENOMEM, errno.ENOSPC, errno.EFBIG)


def _write_all(file: int, data: memoryview, offset: int) -> None:
    while data.nbytes:
        written = os.pwrite(file, data, offset)
        data = data[written:]
        offset += written


def _map_file(file: int, size: int) -> memoryview:
    """Return the message in *file*, to be written in place as one likes."""
    seals = fcntl.fcntl(file, fcntl.F_GET_SEALS)
    if not seals & fcntl.F_SEAL_SHRINK or not 0 < size <= os.fstat(file).st_size:
        # One that can shrink would end its reader by SIGBUS.
        msg = f"a message of {size} bytes in a file that is smaller or not sealed"
        raise ValueError(msg)
    return memoryview(mmap.mmap(file, size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE))


def _decode_large(message: memoryview) -> Any:
    size = message.nbytes
    count = _COUNT.unpack_from(message)[0] if size >= _COUNT.size else 0
    end = _COUNT.size + count * _ENTRY.size
    if not count or end > size:
        msg = f"a message of {size} bytes with a table of {count} parts"
        raise ValueError(msg)
    entries = list(_ENTRY.iter_unpack(message[_COUNT.size : end]))
    if any(offset + length > size for offset, length in entries):
        msg = f"a message of {size} bytes whose table points outside of it"
        raise ValueError(msg)
    parts = [message[offset : offset + length] for offset, length in entries]
    return decode(parts[0], parts[1:])
