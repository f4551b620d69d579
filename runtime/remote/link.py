"""Message link over ZeroMQ: window, pieces, acknowledgements and reassembly.

A `Link` is one connection between the driver's side and a machine, as either end of it sees it; it
has a `Line` for each rank there, and one for bodies that several of them are sent.

- Packets of a line arrive whole, in order, once. A large body travels in pieces, so that signs of
  life and small packets pass beside it. One that several ranks are sent travels once, before the
  packets that refer to it, and is kept at the other end until the last of them has left.
- No more than `WINDOW` messages of a line are in flight or unread at the other end, so neither
  side's memory grows when the other stops, and a rank that reads nothing delays no other.
- Malformed messages are dropped and counted. A link that is broken stays broken: nothing is
  sent twice.
- Memory for a body is reserved before its first piece is written; an unfinished body
  leaves nothing behind.
"""

from __future__ import annotations

import os
import struct
from collections import deque
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

from phalanx.runtime.linux import descriptor_limit
from phalanx.runtime.wire.packet_decoder import Frame, LargeFrame
from phalanx.runtime.wire.packet_encoder import (
    Payload,
    new_message_file,
    seal_message_file,
    write_all,
)
from phalanx.runtime.wire.packet_header import (
    HEADER,
    IN_ARENA,
    LARGE,
    MAGIC,
    PACKET_LIMIT,
    Flag,
    Kind,
)
from phalanx.supervision import MessageTooLarge, RuntimeFault

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from phalanx.runtime.memory.arena import Arena, Extent


class IncomingBody:
    """The place of one body; where there is no memory for it, pieces are counted all the same.

    Attributes:
        missing: Bytes that have yet to come.
        error: Why it has no place.
    """

    def __init__(self, size: int, arena: Arena | None) -> None:
        """Find a place for *size* bytes; without an *arena* in a file."""
        self.missing = size
        self.error: Exception | None = None
        self._size = size
        self._extent: Extent | None = None
        self._file: int | None = None
        try:
            self._extent = None if arena is None else arena.place(size)
            if self._extent is None:
                with descriptor_limit.all_available():
                    self._file = new_message_file(size)
        except MessageTooLarge as error:
            self.error = error
        except OSError as error:
            self.error = RuntimeFault(f"a message was lost: {error}; raise `ulimit -n`")

    def write(self, piece: memoryview) -> bool:
        """Put the next piece down; return False if it is longer than what is missing."""
        if not 0 < piece.nbytes <= self.missing:
            return False
        at = self._size - self.missing
        self.missing -= piece.nbytes
        try:
            if self._extent is not None:
                self._extent.write([piece], [at])
            elif self._file is not None:
                write_all(self._file, piece, at)
        except OSError:  # the machine has run out of memory meanwhile
            self.close()
            self.error = MessageTooLarge(self._size, at)
        return True

    def payload(self) -> Payload | None:
        """Return the whole body, which is the caller's to close from now on; None for an error."""
        extent, self._extent = self._extent, None
        file, self._file = self._file, None
        if extent is not None:
            return Payload.in_arena(extent, self._size)
        return None if file is None else Payload.in_file(seal_message_file(file), self._size)

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
"""Bytes of a large body in one message, at most; as many as cross in time."""

LARGEST = PIECE + 64 * 1024
"""Bytes that no message of ours exceeds; a peer that sends more is cut off."""

TOGETHER = 64
"""Messages of one part that leave as one, at most."""

_HEAD = struct.Struct("<BBQQQQ")
"""say, lane, line, two numbers, and how many messages of that line have been taken in all"""

_ACK_EVERY = WINDOW // 4
_LEAST = 32 * 1024  # bytes of a piece
_PACE = 0.25  # seconds that one may take: an eighth of the least silence that ends a cluster's link
_BEATS = WINDOW


BODIES = 0
"""The number of the line for bodies that several ranks are sent; those of ranks are above it."""


class Lane(IntEnum):
    """The socket of a worker that a packet belongs to."""

    DATA = 0
    CONTROL = 1
    BODY = 2  # none: several packets refer to it


class Say(IntEnum):
    """The kind of a message between the two ends."""

    OPEN = 1  # the rank's side is there
    PACKET = 2  # for a lane; the size of the body that follows in pieces; the body it refers to
    PIECE = 3
    TAKEN = 4  # nothing but what every message of a line says: how many have been taken
    BEAT = 5
    ASK = 6  # which call has the worker begun? the number of the question
    RECALL = 7  # the same, and let it begin none behind the call named
    TOLD = 8  # number of the question, call
    END = 9  # the worker's sockets have ended; the call it had begun
    BYE = 10  # the rank's side is needed no more; of the line for bodies: nor is the other end
    FORGET = 11  # no packet will refer to that body any longer
    PROGRESS = 12  # the call that the worker runs has reported progress


@dataclass(slots=True)
class Delivery:
    """One packet that has arrived.

    Attributes:
        head: The frame's header: magic, kind, flags, epoch, call id, incarnation, extra.
        sent: The packet as it was sent, without its large body.
        large: The large body; to be closed when it has been sent on.
        shared: The number of the body that it refers to; 0 for none.
        error: Why there is none here.
    """

    lane: Lane
    head: tuple[int, ...]
    sent: bytes
    large: Payload | None = None
    shared: int = 0
    error: Exception | None = None

    @property
    def body(self) -> bytes:
        """The packet without its header and its large body."""
        return self.sent[HEADER.size :]

    def packet(self, *, flags: int = 0, incarnation: int | None = None) -> bytes:
        """Return the packet for the next socket: *flags* added, *incarnation* replaced."""
        if self.large is None and not flags and incarnation is None:
            return self.sent
        magic, kind, given, epoch, call_id, own, extra = self.head
        tail = self.body
        if self.large is not None:
            flags |= self.large.flags
            tail = self.large.tail + tail
        number = own if incarnation is None else incarnation
        return HEADER.pack(magic, kind, given | flags, epoch, call_id, number, extra) + tail


@dataclass(slots=True)
class _Outgoing:
    lane: Lane
    packet: bytes
    body: memoryview | None = None
    shared: SharedBody | None = None  # that it refers to, or is
    at: int = -1  # bytes of the body sent; -1: not even the packet


_PACKET, _PIECE = int(Say.PACKET), int(Say.PIECE)  # plain numbers take less time to compare
_PIECE_BYTE = bytes([_PIECE])


class Link:
    """One end of a connection. Used by one thread.

    What is posted leaves with `flush`, and what is posted together as one message: see `records`.

    Args:
        send: Sends a message of those parts.

    Attributes:
        last_received_at: When a message last arrived, in seconds on the monotonic clock.
        posted_at: When one was last posted.
    """

    def __init__(self, send: Callable[[Sequence[bytes | memoryview]], None], now: float) -> None:
        self._send = send
        self._posted: list[bytes] = []
        self._beats = 0
        self.last_received_at = now
        self.posted_at = now

    def post(self, message: bytes, now: float) -> None:
        """Have *message* leave with the next `flush` at the latest."""
        self._posted.append(message)
        self.posted_at = now
        if len(self._posted) == TOGETHER:
            self.flush()

    def post_piece(self, head: bytes, piece: memoryview, now: float) -> None:
        """Send a piece: it leaves alone, for the other end puts it down before the next comes."""
        self.flush()
        self._send([head, piece])
        self.posted_at = now

    def flush(self) -> None:
        """Send what was posted."""
        if self._posted:
            posted, self._posted = self._posted, []
            self._send(posted)

    def say(
        self, what: Say, line: int, number: int = 0, call: int = 0, taken: int = 0, *, now: float
    ) -> None:
        """Post a message that needs no room in a window."""
        self.post(_HEAD.pack(what, 0, line, number, call, taken), now)

    def beat(self, now: float) -> None:
        """Give a sign of life, unless many went unanswered: they must not fill the queue."""
        if self._beats < _BEATS:
            self._beats += 1
            self.say(Say.BEAT, BODIES, now=now)

    def note_received(self, parts: Sequence[memoryview], now: float) -> int:
        """Note that a message has come; return the number of its line, `BODIES` for noise too."""
        self.last_received_at = now
        self._beats = 0
        head = parts[0] if parts else memoryview(b"")
        if head.nbytes != _HEAD.size and not (head.nbytes > _HEAD.size and head[0] == _PACKET):
            return BODIES
        number: int = _HEAD.unpack_from(head)[2]
        return number


def records(parts: Sequence[memoryview]) -> Iterable[Sequence[memoryview]]:
    """Return the messages that were posted one by one and have come together, as *parts*.

    More than `TOGETHER` of them are one, and malformed: they would keep others waiting.
    """
    if 1 < len(parts) <= TOGETHER and parts[0][:1].tobytes() != _PIECE_BYTE:
        return [(part,) for part in parts]
    return (parts,)


class SharedBody:
    """A body that several packets refer to.

    Attributes:
        refers: Packets that refer to it and have not been sent.
        is_open: Whether there may be more of them.
        is_sent: Whether it has been sent itself.
    """

    def __init__(self, number: int, key: object) -> None:
        self.number = number
        self.key = key
        self.refers = 0
        self.is_open = True
        self.is_sent = False


class SharedBodies:
    """The bodies that the ranks at the other end of *link* are sent.

    Attributes:
        line: The one on which they travel.
        left: Those that are yet to be sent or forgotten: where there are none, nor is `pump`.
    """

    def __init__(self, link: Link) -> None:
        self.line = Line(BODIES, None)
        self.line.attach(link)
        self._link = link
        self._numbers = self._looked_at = 0
        self._open: SharedBody | None = None
        self.left: list[SharedBody] = []

    def refer(self, frame: LargeFrame) -> SharedBody | None:
        """Return the body of *frame*, which is used up then; None if it is that frame's alone.

        Raises:
            ValueError, OSError, MemoryError: it cannot be read.
        """
        if frame.kind != Kind.CALL or not frame.flags & Flag.COLLECTIVE:
            return None
        place: object = frame.body[: IN_ARENA.size]
        if frame.flags & Flag.FILE:
            file = os.fstat(frame.fds[0])
            place = (file.st_dev, file.st_ino)
        key = (frame.epoch, frame.call_id, place)
        body = self._open
        if body is None or body.key != key:
            view = frame.large()
            self.shut()
            self._numbers += 1
            body = self._open = SharedBody(self._numbers, key)
            self.left.append(body)
            self.line.send_body(body, view)
        else:
            frame.drop()
        body.refers += 1
        return body

    def shut(self) -> None:
        """Let nothing more refer to the last one."""
        if self._open is not None:
            self._open.is_open = False
            self._open = None

    def look(self) -> None:
        """Let nothing more refer to one that was there at the last look."""
        if self._open is not None and self._open.number <= self._looked_at:
            self.shut()
        self._looked_at = self._numbers

    def pump(self, now: float) -> None:
        """Send what there is room for, and say which bodies nothing will refer to any longer."""
        self.line.pump(now)
        for body in self.left[:]:
            if body.is_sent and not body.is_open and not body.refers:
                self.left.remove(body)
                self._link.say(Say.FORGET, BODIES, body.number, now=now)


class Line:
    """One end of what is sent to, and comes from, one rank. Used by one thread.

    Args:
        number: Of the line, the same at both ends.
        arena: Where large bodies land; None if none come.

    Attributes:
        malformed: How many messages came that were none of ours.
    """

    def __init__(self, number: int, arena: Arena | None) -> None:
        self.number = number
        self._arena = arena
        self._link: Link | None = None
        self._out: deque[_Outgoing] = deque()
        self._posted = 0
        self._taken_there = 0
        self._size = _LEAST  # of the next piece
        self._paced = 0  # messages taken there by then
        self._paced_at = 0.0
        self._taken = 0
        self._acknowledged = 0
        self._arriving: Delivery | None = None
        self._incoming: IncomingBody | None = None
        self.malformed = 0

    def attach(self, link: Link) -> None:
        """Have what is sent leave over *link*; nothing does before."""
        self._link = link

    @property
    def has_room(self) -> bool:
        """Whether what is sent now leaves soon: else leave it where it comes from."""
        return len(self._out) < 2

    @property
    def is_empty(self) -> bool:
        """Whether everything has been sent."""
        return not self._out

    # --- sending ------------------------------------------------------------------------

    def send(self, lane: Lane, frame: Frame, bodies: SharedBodies | None = None) -> None:
        """Send *frame*, which is used up; `pump` has it leave.

        Args:
            bodies: Where its body is looked for; None: it is that frame's alone.

        Raises:
            ValueError, OSError, MemoryError: its large body does not lie where it says, or there
                is no room to read it.
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
        if not isinstance(frame, LargeFrame):
            self._out.append(_Outgoing(lane, head + frame.body))
            return
        shared = None if bodies is None else bodies.refer(frame)
        body = frame.large() if shared is None else None
        self._out.append(_Outgoing(lane, head + frame.inline, body, shared))

    def send_packet(self, lane: Lane, packet: bytes) -> None:
        """Send a packet that has no large body."""
        self._out.append(_Outgoing(lane, packet))

    def send_body(self, shared: SharedBody, body: memoryview) -> None:
        """Send a body that packets of other lines refer to."""
        packet = HEADER.pack(MAGIC, Kind.CALL, Flag.NONE, 0, shared.number, 0, 0)
        self._out.append(_Outgoing(Lane.BODY, packet, body, shared))

    def say(self, what: Say, number: int = 0, call: int = 0, *, now: float) -> None:
        """Send a message that needs no room in the window."""
        if self._link is not None:
            self._acknowledged = self._taken
            self._link.say(what, self.number, number, call, self._taken, now=now)

    def pump(self, now: float) -> None:
        """Send what the window has room for, and say what has been taken."""
        link = self._link
        if link is None:
            return
        if self._out:
            self._send_waiting(link, now)
        if self._taken - self._acknowledged >= _ACK_EVERY:
            self.say(Say.TAKEN, now=now)

    def _send_waiting(self, link: Link, now: float) -> None:
        out = self._out
        if out[0].at > 0 and (count := self._taken_there - self._paced) > 0:
            took = (now - self._paced_at) / count
            size = 2 * self._size if took < _PACE / 2 else self._size
            self._size = min(max(size // 2 if took > _PACE else size, _LEAST), PIECE)
            self._paced, self._paced_at = self._taken_there, now
        while out and self._posted - self._taken_there < WINDOW:
            first = out[0]
            body, shared = first.body, first.shared
            size = 0 if body is None else body.nbytes
            refers_to = 0
            if first.at < 0:
                if shared is not None and body is None:
                    if not shared.is_sent:
                        break
                    shared.refers -= 1
                    refers_to = shared.number
                head = self._head(_PACKET, first.lane, size, refers_to)
                link.post(head + first.packet, now)
                first.at = 0
                self._paced, self._paced_at = self._taken_there, now
            elif body is not None:
                piece = body[first.at : first.at + self._size]
                link.post_piece(self._head(_PIECE, first.lane, 0, 0), piece, now)
                first.at += piece.nbytes
            self._posted += 1
            if first.at >= size:
                out.popleft()
                if shared is not None and body is not None:
                    shared.is_sent = True

    def _head(self, what: int, lane: int, size: int, refers_to: int) -> bytes:
        self._acknowledged = self._taken
        return _HEAD.pack(what, lane, self.number, size, refers_to, self._taken)

    # --- receiving ----------------------------------------------------------------------

    def take(self, parts: Sequence[memoryview]) -> Delivery | tuple[Say, int, int] | None:
        """Return what the message *parts* brings: a packet, something said, or nothing yet.

        A packet counts as taken only once `taken` has been called.
        """
        head = parts[0] if parts else memoryview(b"")
        if head.nbytes >= _HEAD.size:
            what, lane, _, number, other, taken = _HEAD.unpack_from(head)
            if self._taken_there < taken <= self._posted:
                self._taken_there = taken
            elif taken > self._posted:
                self.malformed += 1
            if len(parts) == 1:
                if what == _PACKET and self._arriving is None:
                    return self._packet(lane, head[_HEAD.size :], number, other)
                if head.nbytes == _HEAD.size:
                    return self._said(what, number, other)
            elif len(parts) == 2 and what == _PIECE and self._arriving is not None:
                return self._piece(parts[1])
        self.malformed += 1
        return None

    def taken(self, count: int) -> None:
        """Say that *count* packets have been passed on."""
        self._taken += count

    def close(self) -> None:
        """Give back what was on its way."""
        for each in self._out:
            if each.shared is not None and each.body is None:
                each.shared.refers -= each.at < 0
        self._out.clear()
        self._arriving = None
        if self._incoming is not None:
            self._incoming.close()
            self._incoming = None

    def _said(self, what: int, number: int, call: int) -> tuple[Say, int, int] | None:
        if what == Say.TAKEN:
            return None
        if what not in (_PACKET, _PIECE) and what in _SAYINGS:
            return Say(what), number, call
        self.malformed += 1
        return None

    def _packet(self, lane: int, content: memoryview, size: int, refers_to: int) -> Delivery | None:
        of = _LANES.get(lane)
        head = _head_of(content)
        is_in_place = (of is Lane.BODY) == (self.number == BODIES)
        if of is None or head is None or not is_in_place or self._arena is None:
            self.malformed += 1
            self._taken += 1
            return None
        delivery = Delivery(of, head, bytes(content), shared=refers_to)
        if not size:
            return delivery
        # What comes beside the calls is read without the arena, and a state is kept for long.
        keeps = lane == Lane.CONTROL or head[1] == Kind.SAVED
        self._incoming = IncomingBody(size, None if keeps else self._arena)
        self._arriving = delivery
        self._taken += 1  # the last piece stands for the packet
        return None

    def _piece(self, content: memoryview) -> Delivery | None:
        delivery, incoming = self._arriving, self._incoming
        assert delivery is not None
        assert incoming is not None
        is_next = incoming.write(content)
        self.malformed += not is_next
        if not is_next or incoming.missing:
            self._taken += 1
            return None
        self._arriving = self._incoming = None
        delivery.large, delivery.error = incoming.payload(), incoming.error
        return delivery


def _head_of(content: memoryview) -> tuple[int, ...] | None:
    """Return the header of a packet; None if it is none of ours."""
    if not HEADER.size <= content.nbytes <= PACKET_LIMIT:
        return None
    head: tuple[int, ...] = HEADER.unpack_from(content)
    return head if head[0] == MAGIC and not head[2] & LARGE else None


_SAYINGS = frozenset(Say)
_LANES = {int(lane): lane for lane in Lane}
