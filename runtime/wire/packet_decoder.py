"""Frame: decodes one packet between the driver and one worker.

A frame is one packet of a sequenced-packet socket, so it arrives whole or not at all; a malformed
packet decodes to None, not to an exception. Small frames in a row may share a packet (`bundle`).
"""

from __future__ import annotations

import os
import socket
import struct
from dataclasses import dataclass, field
from pickle import loads
from typing import TYPE_CHECKING, Any, Final

from phalanx.runtime.linux.descriptors import fds_in, send_with_fds
from phalanx.runtime.memory.arena import SLOTS
from phalanx.supervision import RuntimeFault

from .codec import check_torch
from .packet_encoder import GATHERED, decode_large, is_pickle_alone, read_file
from .packet_header import (
    ANCILLARY,
    CLOSE_ON_EXEC,
    CUT,
    HEADER,
    IN_ARENA,
    IN_FILE,
    LARGE,
    MAGIC,
    PACKET_LIMIT,
    Flag,
    Kind,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from phalanx.runtime.memory.mapping import ArenaReader

_read_head = HEADER.unpack_from
_HEAD: Final = HEADER.size
_NO_SIGNAL: Final = int(socket.MSG_NOSIGNAL)
_FILES: Final = (Kind.SAVED, Kind.RESTORE)  # of these the file itself is wanted


@dataclass(slots=True, eq=False, repr=False)
class Frame:
    """One message, with its body in the packet.

    Attributes:
        incarnation: That of the rank that replies; for a call the round it was sent in.
        extra: For a call the rank whose value is wanted, or `EVERY_RANK`; for an item its number;
            for `Kind.MORE` how many items are wanted in all.
    """

    kind: int
    flags: int
    epoch: int
    call_id: int
    incarnation: int
    extra: int
    body: bytes | memoryview

    def value(self) -> Any:
        """Return the decoded body, once, and release descriptors and arena slot.

        Raises:
            ValueError: a large body is not where the frame says.
            RuntimeFault: its descriptor could not be received.
            MissingPackage: it holds a tensor, and torch is not installed here.
            Exception: whatever else decoding raises.
        """
        try:
            return loads(self.body) if self.body else None
        except ModuleNotFoundError as error:
            check_torch(error)
            raise

    def large(self) -> memoryview | None:
        """Return the out-of-band part of the body, once; None if there is none.

        Raises:
            ValueError: it is not where the frame says.
        """
        return None

    def drop(self) -> None:
        """Release descriptors and arena slot."""


@dataclass(slots=True, eq=False, repr=False)
class LargeFrame(Frame):
    """One message with an out-of-band body, in an arena or a memory file.

    Attributes:
        fds: Received descriptors; closed when the frame is decoded or dropped.
        lender: The reader of the arena; None once the slot has been returned.
    """

    fds: list[int] = field(default_factory=list[int])
    lender: ArenaReader | None = None
    _view: memoryview | None = None

    def value(self) -> Any:
        """See `Frame.value`."""
        if self.flags & Flag.LOST:
            raise RuntimeFault(
                "a message was lost: this process has no descriptor free (raise `ulimit -n`), or an"
                " exception was thrown into the thread that read it"
            )
        inline = self.inline
        lender = self.lender
        if inline or lender is None:
            return decode_large(self.large(), inline)
        slot, start, size = IN_ARENA.unpack_from(self.body)
        view = lender.in_place(start, size)
        if view is None or slot >= SLOTS or not is_pickle_alone(view):
            return decode_large(self.large())
        try:
            return decode_large(view)  # a pickle in one piece: nothing refers to it afterwards
        finally:
            self.drop()

    @property
    def inline(self) -> bytes | memoryview:
        """The part of the body in the packet; may be empty."""
        return self.body[IN_FILE.size if self.flags & Flag.FILE else IN_ARENA.size :]

    def large(self) -> memoryview:
        """See `Frame.large`."""
        view, self._view = self._view, None
        if view is not None:
            return view
        try:
            if self.flags & Flag.FILE:
                return read_file(self.fds[0], *IN_FILE.unpack_from(self.body))
            lender, self.lender = self.lender, None
            if lender is None:
                raise ValueError("this message has been read or dropped before")
            return lender.open(*IN_ARENA.unpack_from(self.body))
        finally:
            self.drop()

    def map_body(self) -> None:
        """Map the body and close its file: unread answers must not use up the descriptors."""
        try:
            view = read_file(self.fds[0], *IN_FILE.unpack_from(self.body))
        except (MemoryError, OSError, ValueError):
            return  # `value` raises it
        self.drop()
        self._view = view

    def drop(self) -> None:
        """See `Frame.drop`."""
        self._view = None
        while self.fds:
            os.close(self.fds.pop())
        lender, self.lender = self.lender, None
        if lender is not None:
            lender.give_back(IN_ARENA.unpack_from(self.body)[0])

    def __del__(self) -> None:
        if self.fds or self.lender is not None:  # an answer that was never read
            self.drop()


def call_ids_of(packet: bytes) -> list[int]:
    """Return the call id of a packet that this process made; of a bundle those that are in it."""
    _, kind, _, _, call_id, _, count = HEADER.unpack_from(packet)
    if kind != Kind.BUNDLE:
        return [call_id]
    at = HEADER.size + 4 * count
    found: list[int] = []
    for (size,) in struct.iter_unpack("<I", packet[HEADER.size : at]):
        found.append(HEADER.unpack_from(packet, at)[4])
        at += size
    return found


def bundle(packets: Sequence[bytes]) -> bytes:
    """Return one packet that holds *packets*: at most `BUNDLE_LIMIT` bytes, no descriptors."""
    head = HEADER.pack(MAGIC, Kind.BUNDLE, Flag.NONE, 0, 0, 0, len(packets))
    return head + struct.pack(f"<{len(packets)}I", *map(len, packets)) + b"".join(packets)


def unbundle(frame: Frame, lender: ArenaReader | None) -> list[Frame] | None:
    """Return the frames in a frame of kind `Kind.BUNDLE`; None if it is malformed."""
    body = bytes(frame.body)
    at = 4 * frame.extra
    if not 0 < at < len(body):
        return None
    frames: list[Frame] = []
    for (size,) in struct.iter_unpack("<I", body[:at]):
        end = at + size
        inner = unpack(body[at:end], [], lender) if end <= len(body) else None
        if inner is None or inner.kind == Kind.BUNDLE:
            return None
        frames.append(inner)
        at = end
    return frames if at == len(body) else None


def unpack(
    packet: bytes, fds: list[int], lender: ArenaReader | None = None, *, lost: bool = False
) -> Frame | None:
    """Return the frame in *packet*, or None (its descriptors closed) where it is not one.

    Where what comes along was *lost* on the way, the frame has the flag `Flag.LOST`.
    """
    if len(packet) >= _HEAD:
        magic, kind, flags, epoch, call_id, incarnation, extra = _read_head(packet)
        if magic == MAGIC:
            if not flags & LARGE and not fds:
                body = memoryview(packet)[_HEAD:] if len(packet) > GATHERED else packet[_HEAD:]
                return Frame(kind, flags, epoch, call_id, incarnation, extra, body)
            large = LargeFrame(kind, flags, epoch, call_id, incarnation, extra, packet[_HEAD:])
            large.fds = fds
            if _is_whole(large, lender, lost=lost):
                if fds and kind not in _FILES:
                    large.map_body()
                return large
    for fd in fds:
        os.close(fd)
    fds.clear()
    return None


def receive(sock: socket.socket, lender: ArenaReader | None = None) -> Frame | bytes | None:
    """Return the next frame, ``b""`` at the end of the stream, or None for a malformed packet.

    *lender* reads the peer's arena; without one messages there are malformed.

    Raises:
        BlockingIOError: nothing to read on a non-blocking socket.
        ConnectionResetError: the peer died with unread input; its last packets follow.
    """
    packet, ancillary, cut, _ = sock.recvmsg(PACKET_LIMIT, ANCILLARY, CLOSE_ON_EXEC)
    if not ancillary and not cut & CUT:
        return unpack(packet, [], lender) if packet else b""
    return unpack_extra(packet, ancillary, cut, lender)


def unpack_extra(
    packet: bytes, ancillary: list[tuple[int, int, bytes]], cut: int, lender: ArenaReader | None
) -> Frame | bytes | None:
    """Return what `receive` does, for a packet with ancillary data, or that was *cut*."""
    if cut & socket.MSG_TRUNC:
        packet = b""
    return unpack(packet, fds_in(ancillary), lender, lost=bool(cut & socket.MSG_CTRUNC))


def send(sock: socket.socket, packet: bytes, file: int | None) -> None:
    """Send one packet; raises what the socket raises."""
    if file is None:
        sock.send(packet, _NO_SIGNAL)
    else:
        send_with_fds(sock, packet, [file], _NO_SIGNAL)


def _is_whole(large: LargeFrame, lender: ArenaReader | None, *, lost: bool) -> bool:
    """Whether *large* came with what its flags say; sets its lender."""
    match large.flags & LARGE:
        case Flag.FILE if lost and not large.fds:
            # Not malformed: its call must still be answered.
            large.flags |= Flag.LOST
            return len(large.body) >= IN_FILE.size
        case Flag.FILE:
            return len(large.fds) == 1 and len(large.body) >= IN_FILE.size
        case Flag.ARENA if not large.fds and len(large.body) >= IN_ARENA.size:
            if lost:
                large.flags |= Flag.LOST
                return True
            large.lender = lender
            return lender is not None
        case _:
            return False
