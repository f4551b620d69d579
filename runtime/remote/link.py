"""Message link over ZeroMQ: window, pieces, acknowledgements and reassembly.

One link between the driver's side and a rank elsewhere, as either end of it sees it.

Guarantees: packets arrive whole, in order, once; a large body travels in pieces, so that signs of
life and small packets of the other end pass beside it; no more than `WINDOW` messages are on
their way or unread at the other end, so neither side's memory grows when the other stops; what is
no message of ours is dropped and counted. A link that is broken stays broken: nothing is sent
twice.

Where a large body lies while it arrives piece by piece: in an arena, or in a file of its own.

Guarantees: there is memory behind the place before the first piece is written; what is not
finished leaves nothing behind.
"""

from __future__ import annotations

import os
import struct
from collections import deque
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

from phalanx.runtime.wire.packet_decoder import Frame, LargeFrame
from phalanx.runtime.wire.packet_encoder import Payload, new_message_file, seal_message_file
from phalanx.runtime.wire.packet_header import HEADER, LARGE, MAGIC, PACKET_LIMIT, Kind
from phalanx.supervision import MessageTooLarge

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from phalanx.runtime.memory.arena import Arena


class Landing:
    """The place of one body.

    Attributes:
        missing: Bytes that have yet to come.
    """

    def __init__(self, size: int, arena: Arena | None) -> None:
        """Find a place for *size* bytes; without an *arena* in a file.

        Raises:
            MessageTooLarge: this machine has no memory for it.
        """
        self.missing = size
        self._size = size
        self._extent = None if arena is None else arena.place(size)
        self._file = new_message_file(size) if self._extent is None else None

    def write(self, piece: memoryview) -> None:
        """Put the next piece down.

        Raises:
            ValueError: it is longer than what is missing.
            OSError: the machine has run out of memory meanwhile.
        """
        if not 0 < piece.nbytes <= self.missing:
            msg = f"a piece of {piece.nbytes} bytes where {self.missing} are missing"
            raise ValueError(msg)
        at = self._size - self.missing
        if self._extent is not None:
            self._extent.write([piece], [at])
        elif self._file is not None:
            done = 0
            while done < piece.nbytes:
                done += os.pwrite(self._file, piece[done:], at + done)
        self.missing -= piece.nbytes

    def payload(self) -> Payload:
        """Return the whole body, which is the caller's to close from now on."""
        extent, self._extent = self._extent, None
        file, self._file = self._file, None
        if extent is not None:
            return Payload.in_arena(extent, self._size)
        assert file is not None
        return Payload.in_file(seal_message_file(file), self._size)

    def close(self) -> None:
        """Give the place up."""
        if self._extent is not None:
            self._extent.let_go()
            self._extent = None
        if self._file is not None:
            os.close(self._file)
            self._file = None


WINDOW = 16
"""Messages that one end may have sent and the other not yet taken."""

PIECE = 512 * 1024
"""Bytes of a large body in one message."""

LARGEST = PIECE + 64 * 1024
"""Bytes that no message of ours exceeds; a peer that sends more is cut off."""

QUEUE = 4 * WINDOW
"""Room for messages in ZeroMQ's own queues: for the window, and what is sent beside it."""

_HEAD = struct.Struct("<BBQQ")
"""say, lane, and two numbers"""

_ACK_EVERY = WINDOW // 4
_BEATS = WINDOW


class Lane(IntEnum):
    """Which of a worker's two sockets a packet belongs to."""

    DATA = 0
    CONTROL = 1


class Say(IntEnum):
    """What a message between the two ends is."""

    OPEN = 1  # the rank's side is there
    PACKET = 2  # a packet for a lane, and the size of the large body that follows in pieces
    PIECE = 3
    TAKEN = 4  # how many messages have been taken in all
    BEAT = 5
    ASK = 6  # which call has the worker begun? the number of the question
    RECALL = 7  # the same, and let it begin none behind the call named
    TOLD = 8  # number of the question, call
    END = 9  # the worker's sockets have ended; the call it had begun
    BYE = 10  # the rank's side is needed no more


@dataclass(slots=True)
class Delivery:
    """One packet that has arrived.

    Attributes:
        head: The frame's header: magic, kind, flags, epoch, call id, incarnation, extra.
        body: What followed the header in the packet.
        large: The large body; to be closed when it has been sent on.
        error: Why there is none here.
    """

    lane: Lane
    head: tuple[int, ...]
    body: bytes
    large: Payload | None = None
    error: MessageTooLarge | None = None

    def packet(self, *, flags: int = 0, incarnation: int | None = None) -> bytes:
        """Return the packet for the next socket: *flags* added, *incarnation* replaced."""
        magic, kind, given, epoch, call_id, own, extra = self.head
        tail = self.body
        if self.large is not None:
            flags |= self.large.flags
            tail = self.large.tail + self.body
        number = own if incarnation is None else incarnation
        return HEADER.pack(magic, kind, given | flags, epoch, call_id, number, extra) + tail


@dataclass(slots=True)
class _Outgoing:
    lane: Lane
    packet: bytes
    body: memoryview | None = None
    at: int = -1  # bytes of the body sent; -1: not even the packet


class Line:
    """One end. Used by one thread.

    Args:
        post: Hands a message to ZeroMQ.
        arena: Where large bodies land.

    Attributes:
        heard_at: When the other end was last heard of, in seconds on the monotonic clock.
        spoke_at: When something was last sent.
        malformed: How many messages came that were none of ours.
    """

    def __init__(
        self, post: Callable[[Sequence[bytes | memoryview]], None], arena: Arena, now: float
    ) -> None:
        self._post = post
        self._arena = arena
        self._out: deque[_Outgoing] = deque()
        self._posted = 0
        self._taken_there = 0
        self._taken = 0
        self._told = 0
        self._beats = 0
        self._arriving: Delivery | None = None
        self._landing: Landing | None = None
        self._size = 0
        self._missing = 0
        self.heard_at = now
        self.spoke_at = now
        self.malformed = 0

    @property
    def has_room(self) -> bool:
        """Whether what is sent now leaves soon: else leave it where it comes from."""
        return len(self._out) < 2

    @property
    def is_empty(self) -> bool:
        """Whether everything has been sent."""
        return not self._out

    # --- sending ------------------------------------------------------------------------

    def send(self, lane: Lane, frame: Frame) -> None:
        """Send *frame*, which is used up; `pump` has it leave.

        Raises:
            ValueError: its large body does not lie where it says.
        """
        head = HEADER.pack(
            MAGIC,
            frame.kind,
            frame.flags & ~LARGE,
            frame.epoch,
            frame.call_id,
            frame.incarnation,
            frame.extra,
        )
        body = frame.large()
        packet = head + (frame.inline if isinstance(frame, LargeFrame) else frame.body)
        self._out.append(_Outgoing(lane, packet, body))

    def send_packet(self, lane: Lane, packet: bytes) -> None:
        """Send a packet that has no large body."""
        self._out.append(_Outgoing(lane, packet))

    def say(self, what: Say, number: int = 0, call: int = 0, *, now: float) -> None:
        """Send a message that needs no room in the window."""
        self._post([_HEAD.pack(what, 0, number, call)])
        self.spoke_at = now

    def beat(self, now: float) -> None:
        """Give a sign of life, unless many went unanswered: they must not fill the queue."""
        if self._beats < _BEATS:
            self._beats += 1
            self.say(Say.BEAT, now=now)

    def pump(self, now: float) -> None:
        """Send what the window has room for, and say what has been taken."""
        if self._taken - self._told >= _ACK_EVERY:
            self._told = self._taken
            self.say(Say.TAKEN, self._taken, now=now)
        out = self._out
        while out and self._posted - self._taken_there < WINDOW:
            first = out[0]
            body = first.body
            size = 0 if body is None else body.nbytes
            if first.at < 0:
                self._post([_HEAD.pack(Say.PACKET, first.lane, size, 0), first.packet])
                first.at = 0
            elif body is not None:
                piece = body[first.at : first.at + PIECE]
                self._post([_HEAD.pack(Say.PIECE, first.lane, 0, 0), piece])
                first.at += piece.nbytes
            self._posted += 1
            self.spoke_at = now
            if first.at >= size:
                out.popleft()

    # --- receiving ----------------------------------------------------------------------

    def take(
        self, parts: Sequence[memoryview], now: float
    ) -> Delivery | tuple[Say, int, int] | None:
        """Return what the message *parts* brings: a packet, something said, or nothing yet.

        A packet counts as taken only once `taken` has been told.
        """
        self.heard_at = now
        self._beats = 0
        match parts:
            case [head]:
                return self._said(head)
            case [head, content] if head.nbytes == _HEAD.size:
                what, lane, size, _ = _HEAD.unpack(head)
                if what == Say.PACKET and self._arriving is None:
                    return self._packet(lane, content, size)
                if what == Say.PIECE and self._arriving is not None:
                    return self._piece(content)
            case _:
                pass
        self.malformed += 1
        return None

    def taken(self, count: int) -> None:
        """Say that *count* packets have been passed on."""
        self._taken += count

    def close(self) -> None:
        """Give back what was on its way."""
        self._out.clear()
        self._arriving = None
        if self._landing is not None:
            self._landing.close()
            self._landing = None

    def _said(self, head: memoryview) -> tuple[Say, int, int] | None:
        if head.nbytes == _HEAD.size:
            what, _, number, call = _HEAD.unpack(head)
            if what == Say.TAKEN:
                if self._taken_there <= number <= self._posted:
                    self._taken_there = number
                    return None
            elif what not in (Say.PACKET, Say.PIECE) and what in _SAYINGS:
                return Say(what), number, call
        self.malformed += 1
        return None

    def _packet(self, lane: int, content: memoryview, size: int) -> Delivery | None:
        if not HEADER.size <= content.nbytes <= PACKET_LIMIT or lane not in _LANES:
            self.malformed += 1
            self._taken += 1
            return None
        head: tuple[int, ...] = HEADER.unpack_from(content)
        body = bytes(content[HEADER.size :])
        if head[0] != MAGIC or head[2] & LARGE:
            self.malformed += 1
            self._taken += 1
            return None
        delivery = Delivery(Lane(lane), head, body)
        if not size:
            return delivery
        try:
            # What comes beside the calls is read without the arena, and a state is kept for long.
            keeps = lane != Lane.DATA or head[1] == Kind.SAVED
            self._landing = Landing(size, None if keeps else self._arena)
        except MessageTooLarge as error:
            delivery.error = error
        self._arriving = delivery
        self._size = self._missing = size
        self._taken += 1  # the last piece stands for the packet
        return None

    def _piece(self, content: memoryview) -> Delivery | None:
        delivery = self._arriving
        assert delivery is not None
        if not 0 < content.nbytes <= self._missing:
            self.malformed += 1
            self._taken += 1
            return None
        self._missing -= content.nbytes
        if self._landing is not None:
            try:
                self._landing.write(content)
            except OSError:
                self._landing.close()
                self._landing = None
                delivery.error = MessageTooLarge(self._size, self._size - self._missing)
        if self._missing:
            self._taken += 1
            return None
        self._arriving = None
        landing, self._landing = self._landing, None
        if landing is not None:
            delivery.large = landing.payload()
        return delivery


_SAYINGS = frozenset(Say)
_LANES = frozenset(Lane)
