"""Call channel: the driver's end of the connection to one incarnation of a worker.

Guarantees: packets arrive in the order in which they were sent, whole or not at all; packets
without room are kept in that order until `flush`; packets that the worker wrote before it died can
be read to the last one.

`Channel` is the interface for ranks that are not reached by `SocketChannel`: a socket
pair, a page and memory that the driver makes before the worker starts. None of them has a name, so
no other process can connect and nothing is left behind.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections import deque
from enum import Enum, auto
from functools import partial
from typing import TYPE_CHECKING, Protocol

from phalanx.runtime.linux import descriptors
from phalanx.runtime.memory.mapping import DriverExchange

from .packet_decoder import Frame, send, unpack, unpack_extra
from .packet_encoder import Payload
from .packet_header import ANCILLARY, CLOSE_ON_EXEC, CUT, PACKET_LIMIT, Kind
from .progress_page import ProgressPage

if TYPE_CHECKING:
    from phalanx.runtime.memory.arena import Arena, Borrower

_PEER_GONE = (errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN)


class Arrival(Enum):
    """Result of `Channel.peek` without a message."""

    NOTHING = auto()  # no packet is there now
    FOREIGN = auto()  # a malformed packet; it was dropped
    END = auto()  # the worker's end is closed, and all that it wrote has been read


_ROOM = 1 << 20  # bytes of a socket's buffer; the kernel grants at most its own limit
_NOTHING = Arrival.NOTHING  # the lookup of an enum's member costs as much as a call
_NO_SIGNAL = int(socket.MSG_NOSIGNAL)


class Channel(Protocol):
    """The driver's end. Used by one thread at a time.

    Attributes:
        borrower: The worker, as a reader of the driver's arena.
        backed_up: Packets wait for room; nothing new should be sent.
        unhandled: The message that `peek` returns until this is set to None.
    """

    page: ProgressPage
    borrower: Borrower
    backed_up: bool
    unhandled: Frame | None

    def fileno(self) -> int:
        """Return a descriptor: readable if there is a message, writable if `flush` may send."""
        ...

    def send(self, packet: bytes, file: int | None = None, rest: tuple[bytes, ...] = ()) -> bool:
        """Send *packet* with the descriptor *file*; return False if it waits for `flush`.

        *rest* holds more bytes of it, if there is no *file*.

        One whose sending an exception thrown into the calling thread has interrupted may have left.

        If the worker has exited the packet is dropped; its calls fail when the exit is processed.

        Raises:
            OSError: it cannot be sent at all.
        """
        ...

    def flush(self) -> list[tuple[bytes, OSError]]:
        """Send waiting packets as far as there is room; return those that cannot be sent at all."""
        ...

    def peek(self) -> Frame | Arrival:
        """Return the next message, or why there is none, and the same until it has been handled.

        Does not block. An exception that is thrown into the calling thread, at whatever step, loses
        none.
        """
        ...

    def close(self) -> None:
        """Close everything; received messages stay readable."""
        ...


class SocketChannel:
    """A channel to a worker on this machine: a pair of sequenced-packet sockets."""

    __slots__ = (
        "_decoding",
        "_exchange",
        "_packet",
        "_received",
        "_send",
        "_sock",
        "_theirs",
        "_waiting",
        "backed_up",
        "borrower",
        "page",
        "unhandled",
    )

    def __init__(
        self,
        sock: socket.socket,
        theirs: socket.socket,
        page: ProgressPage,
        exchange: DriverExchange,
    ) -> None:
        self.page = page
        self.borrower = exchange.borrower
        self.backed_up = False
        self.unhandled: Frame | None = None
        self._packet: tuple[bytes, list[tuple[int, int, bytes]], int, object] | None = None
        self._decoding = False
        self._sock = sock
        self._send = sock.send
        self._received = iter(partial(sock.recvmsg, PACKET_LIMIT, ANCILLARY, CLOSE_ON_EXEC), None)
        self._theirs = theirs
        self._exchange = exchange
        self._waiting: deque[tuple[bytes, int | None]] = deque()

    @classmethod
    def create(cls, arena: Arena, epoch: int) -> SocketChannel:
        """Return a channel to a worker that is yet to be started, with a greeting in it."""
        with contextlib.ExitStack() as made:
            page = ProgressPage.create()
            made.callback(page.close)
            exchange = DriverExchange.create(arena)
            made.callback(exchange.close)
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ours.setblocking(False)
            for end in ours, theirs:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _ROOM)
            descriptors.own(ours)
            channel = cls(ours, theirs, page, exchange)
            made.pop_all()
        channel.send(Payload.of(None).packet(Kind.HELLO, epoch=epoch, call_id=0))
        return channel

    def child_fds(self) -> dict[str, int]:
        """Return the descriptors that the worker inherits, by name."""
        data, page = self._theirs.fileno(), self.page.fd
        return {"data": data, "page": page, **self._exchange.fds()}

    def driver_fds(self) -> dict[str, int]:
        """Return the descriptors for a process that takes this end over, by name."""
        return {**self.child_fds(), "data": self._sock.fileno()}

    def close_child_ends(self) -> None:
        """Close the worker's end, once the worker has it."""
        self._theirs.close()

    def fileno(self) -> int:
        """See `Channel.fileno`."""
        return self._sock.fileno()

    def send(self, packet: bytes, file: int | None = None, rest: tuple[bytes, ...] = ()) -> bool:
        """See `Channel.send`."""
        if not self.backed_up:
            try:
                if rest:
                    self._sock.sendmsg((packet, *rest), (), _NO_SIGNAL)
                elif file is None:
                    self._send(packet, _NO_SIGNAL)
                else:
                    send(self._sock, packet, file)
            except BlockingIOError:
                pass
            except OSError as error:
                if error.errno not in _PEER_GONE:
                    raise
                return True
            else:
                return True
        packet = b"".join((packet, *rest)) if rest else packet
        file = None if file is None else os.dup(file)
        self.backed_up = True  # first: an exception thrown in must let nothing overtake the packet
        self._waiting.append((packet, file))
        return False

    def flush(self) -> list[tuple[bytes, OSError]]:
        """See `Channel.flush`."""
        refused: list[tuple[bytes, OSError]] = []
        while self._waiting:
            packet, file = self._waiting[0]
            try:
                send(self._sock, packet, file)
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno not in _PEER_GONE:
                    refused.append((packet, error))
            self._waiting.popleft()
            if file is not None:
                os.close(file)
        self.backed_up = bool(self._waiting)
        return refused

    def peek(self) -> Frame | Arrival:
        """See `Channel.peek`.

        The interpreter throws exceptions in after calls, at the begin of functions and of rounds of
        a loop. Between two of those the packet goes from `_packet` to `unhandled`. It comes there
        from an iterator in C, without a call that the interpreter would see.
        """
        if self.unhandled is not None:
            return self.unhandled
        while True:
            if self._packet is None:
                try:
                    for received in self._received:
                        self._packet = received
                        break
                except BlockingIOError:
                    return _NOTHING
                except ConnectionResetError:
                    continue  # it died with unread input; its last packets follow
                except OSError:
                    return Arrival.END
            if self._packet is None:
                continue
            packet, extra, cut, _ = self._packet
            reader = self._exchange.reader
            interrupted, self._decoding = self._decoding, True
            if interrupted:  # what came along has been given back
                frame: Frame | bytes | None = unpack(packet, [], reader, lost=True)
            elif extra or cut & CUT:
                frame = unpack_extra(packet, extra, cut, reader)
            elif packet:
                frame = unpack(packet, [], reader)
            else:
                frame = packet
            message = frame if isinstance(frame, Frame) else None
            self._decoding = False
            self._packet = None
            if message is not None:
                self.unhandled = message
                return message
            return Arrival.FOREIGN if frame is None else Arrival.END

    def close(self) -> None:
        """See `Channel.close`."""
        self.close_child_ends()
        for _, file in self._waiting:
            if file is not None:
                os.close(file)
        self._waiting.clear()
        descriptors.close(self._sock)
        self.page.close()
        self._exchange.close()
