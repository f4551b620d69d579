"""One message on the wire between the driver and one worker.

Guarantees: a frame comes in one packet of a sequenced-packet socket, so it arrives whole or not at
all; what is not a frame of ours decodes to nothing, never to an exception. Small frames in a row
may share a packet (`bundle`).

Every frame carries call id, epoch and incarnation. A socket belongs to one incarnation alone, so a
call needs no incarnation and carries in its place the round it was sent in (`board`): one
encoding serves every rank.

Left to others: bodies too large for a packet (`far`).
"""

from __future__ import annotations

import os
import socket
import struct
from dataclasses import dataclass
from pickle import loads
from typing import TYPE_CHECKING, Any, Final

from phalanx.supervision import RuntimeFault

from .far import decode_far, lay_buffers_out, lay_out, map_file, write_file

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .arena import Arena, Borrower, Extent
    from .arena_reader import ArenaReader
    from .codec import Encoded

MAGIC: Final = 0x5048
HEADER = struct.Struct("<HBBIQII")
"""magic, kind, flags, epoch, call id, incarnation, extra: 24 bytes."""

INLINE_LIMIT: Final = 32 * 1024
"""Bytes of body that travel in the packet itself."""

BUNDLE_LIMIT: Final = INLINE_LIMIT
"""Bytes of frames that travel in one packet."""

PACKET_LIMIT: Final = HEADER.size + INLINE_LIMIT + 4096

EVERY_RANK: Final = 0xFFFFFFFF

ANCILLARY: Final = socket.CMSG_SPACE(4 * 4)
"""Bytes of room for descriptors that ride on a packet."""

# Plain integers: arithmetic on an `IntFlag` takes a microsecond.
CLOSE_ON_EXEC: Final = int(socket.MSG_CMSG_CLOEXEC)
CUT: Final = int(socket.MSG_TRUNC) | int(socket.MSG_CTRUNC)


class Kind:
    """What a frame says. Plain integers: to look a member of an enum up takes as long as a call."""

    CALL: Final[int] = 1
    STOP: Final[int] = 2
    HELLO: Final[int] = 3
    MORE: Final[int] = 4
    CLOSE: Final[int] = 5
    BUNDLE: Final[int] = 6
    ASSIGN: Final[int] = 8
    REFORM: Final[int] = 9
    RESTORE: Final[int] = 10
    ASK: Final[int] = 11
    REPLY: Final[int] = 16
    ERROR: Final[int] = 17
    SKIPPED: Final[int] = 18
    READY: Final[int] = 19
    START_FAILED: Final[int] = 20
    EVENT: Final[int] = 21
    LAST_WORDS: Final[int] = 22
    ITEM: Final[int] = 23
    STANDBY: Final[int] = 24
    LEFT: Final[int] = 25
    NOT_REFORMED: Final[int] = 26
    PASSED: Final[int] = 27
    LINK_ENDED: Final[int] = 28
    SAVED: Final[int] = 29
    NOT_SAVED: Final[int] = 30
    RESTORING: Final[int] = 31
    PULSE: Final[int] = 32
    ENDING: Final[int] = 33
    SAVING: Final[int] = 33


class Flag:
    """How a frame is to be read."""

    NONE: Final[int] = 0
    FILE: Final[int] = 1  # the body lies in the memory file whose descriptor came along
    COLLECTIVE: Final[int] = 2  # withdrawn through the board if not yet begun
    TELL: Final[int] = 4  # the answer is an acknowledgement, whatever the method returns
    JOINED: Final[int] = 8  # an error out of a process group: a death may be behind it
    MARKED: Final[int] = 8  # a call with which the worker's state is stored, before its answer
    ARENA: Final[int] = 16  # the body lies in the sender's arena
    LOST: Final[int] = 64  # set on arrival: no descriptor was free here for the body's
    STREAM: Final[int] = 32  # what the method returns is iterated, and its items are sent
    PACED: Final[int] = 128  # the next call waits elsewhere: `Kind.PASSED` lets it come


LARGE: Final = Flag.FILE | Flag.ARENA


class Frame:
    """One message, whose body came in the packet.

    Attributes:
        incarnation: Whose reply it is; for a call the round it was sent in.
        extra: For a call the rank whose value is wanted, or `EVERY_RANK`; for an item its number;
            for `Kind.MORE` how many items are wanted in all.
    """

    __slots__ = ("body", "call_id", "epoch", "extra", "flags", "incarnation", "kind")

    def __init__(  # noqa: PLR0917  # as they stand in the header
        self,
        kind: int,
        flags: int,
        epoch: int,
        call_id: int,
        incarnation: int,
        extra: int,
        body: bytes,
    ) -> None:
        self.kind = kind
        self.flags = flags
        self.epoch = epoch
        self.call_id = call_id
        self.incarnation = incarnation
        self.extra = extra
        self.body = body

    def value(self) -> Any:
        """Return the decoded body, once; gives back what came along.

        Raises:
            ValueError: a large message does not lie where the frame says.
            RuntimeFault: its descriptor could not be received.
            Exception: whatever decoding raises.
        """
        return loads(self.body) if self.body else None

    def large(self) -> memoryview | None:
        """Return what of the body lies elsewhere, once; None where it is all in the packet.

        They stay until the view has died.

        Raises:
            ValueError: they do not lie where the frame says.
        """
        return None

    def drop(self) -> None:
        """Give back what came along."""


class FarFrame(Frame):
    """One message whose body lies elsewhere; the packet says where.

    Attributes:
        fds: Descriptors that came along; whoever decodes or drops the frame closes them.
        lender: What a message in an arena is read through and given back to; None once it has been.
    """

    __slots__ = ("fds", "lender")

    fds: list[int]
    lender: ArenaReader | None

    def value(self) -> Any:
        """See `Frame.value`."""
        if self.flags & Flag.LOST:
            msg = "a message was lost: this process has no descriptor free; raise `ulimit -n`"
            raise RuntimeFault(msg)
        return decode_far(self.large(), self.near)

    @property
    def near(self) -> bytes:
        """What of the body came in the packet; empty where nothing did."""
        return self.body[_IN_FILE.size if self.flags & Flag.FILE else _IN_ARENA.size :]

    def large(self) -> memoryview:
        """See `Frame.large`."""
        try:
            if self.flags & Flag.FILE:
                return map_file(self.fds[0], *_IN_FILE.unpack_from(self.body))
            lender, self.lender = self.lender, None
            if lender is None:
                msg = "this message has been read or dropped before"
                raise ValueError(msg)
            return lender.open(*_IN_ARENA.unpack_from(self.body))
        finally:
            self.drop()

    def drop(self) -> None:
        """See `Frame.drop`."""
        while self.fds:
            os.close(self.fds.pop())
        lender, self.lender = self.lender, None
        if lender is not None:
            lender.give_back(_IN_ARENA.unpack_from(self.body)[0])

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
        beside = lay_buffers_out(encoded, INLINE_LIMIT)
        near, parts, offsets, size = (b"", *lay_out(encoded)) if beside is None else beside
        extent = arena.place(size) if arena is not None else None
        if extent is None:
            return cls.in_file(write_file(parts, offsets, size), size, near)
        try:
            extent.write(parts, offsets)
        except BaseException:
            extent.let_go()
            raise
        return cls.in_arena(extent, size, near)

    @classmethod
    def in_arena(cls, extent: Extent, size: int, near: bytes = b"") -> Payload:
        """Return the *size* bytes that have been written to *extent*, with *near* beside them."""
        tail = _IN_ARENA.pack(extent.slot, extent.start, size) + near
        return cls(Flag.ARENA, tail, extent=extent)

    @classmethod
    def in_file(cls, file: int, size: int, near: bytes = b"") -> Payload:
        """Return the *size* bytes in a sealed memory file, which is closed with the payload."""
        return cls(Flag.FILE, _IN_FILE.pack(size) + near, file)

    def lend(self, borrower: Borrower) -> None:
        """Count the message as read by *borrower*; before each time it is sent."""
        if self.extent is not None:
            self.extent.lend(borrower)

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
        return HEADER.pack(MAGIC, kind, flags, epoch, call_id, incarnation, extra) + self.tail

    def close(self) -> None:
        """Let go of the memory; who has been sent it keeps it."""
        if self.file is not None:
            os.close(self.file)
            self.file = None
        if self.extent is not None:
            self.extent.let_go()
            self.extent = None


def call_packet(  # noqa: PLR0917  # as they stand in the header
    payload: Payload, flags: int, epoch: int, call_id: int, round_: int, extra: int
) -> bytes:
    """Return the packet of a call: what `Payload.packet` makes, more quickly."""
    flags |= payload.flags
    return _write_head(MAGIC, Kind.CALL, flags, epoch, call_id, round_, extra) + payload.tail


def call_id_of(packet: bytes) -> int:
    """Return which call one of our own packets belongs to."""
    call_id: int = HEADER.unpack_from(packet)[4]
    return call_id


def bundle(packets: Sequence[bytes]) -> bytes:
    """Return one packet that holds *packets*, on which no descriptor rides.

    Together they have at most `BUNDLE_LIMIT` bytes.
    """
    head = HEADER.pack(MAGIC, Kind.BUNDLE, Flag.NONE, 0, 0, 0, len(packets))
    return head + struct.pack(f"<{len(packets)}I", *map(len, packets)) + b"".join(packets)


def unbundle(frame: Frame, lender: ArenaReader | None) -> list[Frame] | None:
    """Return the frames in a frame of kind `Kind.BUNDLE`, or None where it holds something else."""
    body = memoryview(frame.body)
    at = 4 * frame.extra
    if not 0 < at < len(body):
        return None
    frames: list[Frame] = []
    for (size,) in struct.iter_unpack("<I", body[:at]):
        inner = unpack(bytes(body[at : at + size]), [], lender) if at + size <= len(body) else None
        if inner is None or inner.kind == Kind.BUNDLE:
            return None
        frames.append(inner)
        at += size
    return frames if at == len(body) else None


def unpack(
    packet: bytes, fds: list[int], lender: ArenaReader | None = None, *, lost: bool = False
) -> Frame | None:
    """Return the frame in *packet*, or None (its descriptors closed) where it is not one.

    Where descriptors were *lost* on the way, the frame has the flag `Flag.LOST`.
    """
    if len(packet) >= _HEAD:
        magic, kind, flags, epoch, call_id, incarnation, extra = _read_head(packet)
        if magic == MAGIC:
            if not flags & LARGE and not fds:
                return Frame(kind, flags, epoch, call_id, incarnation, extra, packet[_HEAD:])
            far = FarFrame(kind, flags, epoch, call_id, incarnation, extra, packet[_HEAD:])
            far.fds = fds
            far.lender = None
            if _is_whole(far, lender, lost=lost):
                return far
    for fd in fds:
        os.close(fd)
    fds.clear()
    return None


def receive(sock: socket.socket, lender: ArenaReader | None = None) -> Frame | bytes | None:
    """Return the next frame, ``b""`` at the end of the stream, or None for a foreign packet.

    *lender* is what messages in the peer's arena are read through; without one they are foreign.

    Raises:
        BlockingIOError: nothing to read on a non-blocking socket.
        ConnectionResetError: the peer died with unread input; read on, its last words follow.
    """
    packet, ancillary, cut, _ = sock.recvmsg(PACKET_LIMIT, ANCILLARY, CLOSE_ON_EXEC)
    if not ancillary and not cut & CUT:
        return unpack(packet, [], lender) if packet else b""
    return unpack_extra(packet, ancillary, cut, lender)


def unpack_extra(
    packet: bytes, ancillary: list[tuple[int, int, bytes]], cut: int, lender: ArenaReader | None
) -> Frame | bytes | None:
    """Return what `receive` does of a packet with which more came, or which was *cut*."""
    fds: list[int] = []
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            count = len(data) // 4
            fds.extend(struct.unpack(f"<{count}i", data[: count * 4]))
    if cut & socket.MSG_TRUNC:
        packet = b""
    return unpack(packet, fds, lender, lost=bool(cut & socket.MSG_CTRUNC))


def send(sock: socket.socket, packet: bytes, file: int | None) -> None:
    """Send one packet; raises what the socket raises."""
    if file is None:
        sock.send(packet, _NO_SIGNAL)
    else:
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("<i", file))
        sock.sendmsg([packet], [rights], _NO_SIGNAL)


_read_head = HEADER.unpack_from
_write_head = HEADER.pack
_HEAD: Final = HEADER.size
_NO_SIGNAL: Final = int(socket.MSG_NOSIGNAL)
_IN_FILE = struct.Struct("<Q")
"""size"""

_IN_ARENA = struct.Struct("<IQQ")
"""slot, start, size"""


def _is_whole(far: FarFrame, lender: ArenaReader | None, *, lost: bool) -> bool:
    """Whether *far* came with what its flags say; sees to its lender."""
    match far.flags & LARGE:
        case Flag.FILE if lost and not far.fds:
            # Its call must still be answered: to drop the frame would leave it waiting.
            far.flags |= Flag.LOST
            return len(far.body) >= _IN_FILE.size
        case Flag.FILE:
            return len(far.fds) == 1 and len(far.body) >= _IN_FILE.size
        case Flag.ARENA if not far.fds and len(far.body) >= _IN_ARENA.size:
            far.lender = lender
            return lender is not None
        case _:
            return False
