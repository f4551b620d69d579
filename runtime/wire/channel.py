"""The way between the driver and one incarnation of a worker: what it is sent, and its answers.

Guarantees: packets arrive in the order in which they were sent, whole or not at all; what has no
room yet is kept in that order, and `flush` sends it; what the worker wrote before it died can be
read to the last packet; which call it had begun last can be read after its death (`board`).

Left to others: what the packets mean (`frames`), who waits for them (`actors.reading`), how many
may be under way (`actors.turns`).

`Channel` is all that the layer above knows of it, and the seam for ranks that are reached in some
other way than by `SocketChannel`: a socket pair, a page and memory made by the driver before the
worker's birth. None of those has a name, so nobody else can connect and nothing is left behind.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections import deque
from enum import Enum, auto
from typing import TYPE_CHECKING, Protocol

from phalanx.runtime.linux import descriptors
from phalanx.runtime.memory.exchange import DriverExchange

from .frame import Frame, send, unpack, unpack_extra
from .message import Payload
from .progress_page import Board
from .protocol import ANCILLARY, CLOSE_ON_EXEC, CUT, PACKET_LIMIT, Kind

if TYPE_CHECKING:
    from phalanx.runtime.memory.arena import Arena

_PEER_GONE = (errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN)


class Arrival(Enum):
    """What `Channel.receive` found in place of a message."""

    NOTHING = auto()  # no packet is there now
    FOREIGN = auto()  # a packet that is none of ours; it was dropped
    END = auto()  # the worker has closed its end, and everything it wrote has been read


_NOTHING = Arrival.NOTHING  # to look a member of an enum up takes as long as a call
_NO_SIGNAL = int(socket.MSG_NOSIGNAL)


class Channel(Protocol):
    """The driver's end. Used by one thread at a time.

    Attributes:
        board: What the worker has begun and ended, as it says itself.
        backed_up: Packets wait for room: then nothing new should be sent.
    """

    board: Board
    backed_up: bool

    def fileno(self) -> int:
        """Return what is readable when there is something to receive, writable for `flush`."""
        ...

    def lend(self, payload: Payload) -> None:
        """Note that *payload* is about to be sent here, and so will be read by the worker."""
        ...

    def take_back(self, payload: Payload) -> None:
        """Note that *payload*, which was to be sent here, has been refused."""
        ...

    def send(self, packet: bytes, file: int | None = None) -> bool:
        """Send *packet*, on which *file* rides; return False where it must wait for `flush`.

        To a worker that is gone it goes nowhere: its death settles everything.

        Raises:
            OSError: it cannot be sent at all.
        """
        ...

    def flush(self) -> list[tuple[bytes, OSError]]:
        """Send what waits, as far as there is room; return what cannot be sent at all."""
        ...

    def receive(self) -> Frame | Arrival:
        """Return the next message, or why there is none; does not wait."""
        ...

    def close(self) -> None:
        """Give everything back; messages that have been received stay readable."""
        ...


class SocketChannel:
    """A channel to a worker on this machine: a pair of sequenced-packet sockets."""

    __slots__ = (
        "_exchange",
        "_receive",
        "_send",
        "_sock",
        "_theirs",
        "_waiting",
        "backed_up",
        "board",
    )

    def __init__(
        self, sock: socket.socket, theirs: socket.socket, board: Board, exchange: DriverExchange
    ) -> None:
        self.board = board
        self.backed_up = False
        self._sock = sock
        self._send = sock.send
        self._receive = sock.recvmsg
        self._theirs = theirs
        self._exchange = exchange
        self._waiting: deque[tuple[bytes, int | None]] = deque()

    @classmethod
    def create(cls, arena: Arena, epoch: int) -> SocketChannel:
        """Return a channel to a worker that is not there yet, which will find a greeting in it."""
        with contextlib.ExitStack() as made:
            board = Board.create()
            made.callback(board.close)
            exchange = DriverExchange.create(arena)
            made.callback(exchange.close)
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ours.setblocking(False)
            descriptors.own(ours)
            channel = cls(ours, theirs, board, exchange)
            made.pop_all()
        channel.send(Payload.of(None).packet(Kind.HELLO, epoch=epoch, call_id=0))
        return channel

    def child_fds(self) -> dict[str, int]:
        """Return what the worker inherits, by name."""
        data, board = self._theirs.fileno(), self.board.fd
        return {"data": data, "board": board, **self._exchange.fds()}

    def driver_fds(self) -> dict[str, int]:
        """Return what another process needs to stand in for this one, by name."""
        return {**self.child_fds(), "data": self._sock.fileno()}

    def close_child_ends(self) -> None:
        """Let go of what only the worker uses, once it has it."""
        self._theirs.close()

    def fileno(self) -> int:
        """See `Channel.fileno`."""
        return self._sock.fileno()

    def lend(self, payload: Payload) -> None:
        """See `Channel.lend`."""
        payload.lend(self._exchange.borrower)

    def take_back(self, payload: Payload) -> None:
        """See `Channel.take_back`."""
        payload.take_back(self._exchange.borrower)

    def send(self, packet: bytes, file: int | None = None) -> bool:
        """See `Channel.send`."""
        if not self.backed_up:
            try:
                if file is None:
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
        self._waiting.append((packet, None if file is None else os.dup(file)))
        self.backed_up = True
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

    def receive(self) -> Frame | Arrival:
        """See `Channel.receive`."""
        while True:
            try:
                packet, extra, cut, _ = self._receive(PACKET_LIMIT, ANCILLARY, CLOSE_ON_EXEC)
            except BlockingIOError:
                return _NOTHING
            except ConnectionResetError:
                continue  # it died with unread input; what it wrote before follows
            except OSError:
                return Arrival.END
            reader = self._exchange.reader
            if extra or cut & CUT:
                frame = unpack_extra(packet, extra, cut, reader)
            elif packet:
                frame = unpack(packet, [], reader)
            else:
                return Arrival.END
            if isinstance(frame, Frame):
                return frame
            return Arrival.FOREIGN if frame is None else Arrival.END

    def close(self) -> None:
        """See `Channel.close`."""
        self.close_child_ends()
        for _, file in self._waiting:
            if file is not None:
                os.close(file)
        self._waiting.clear()
        descriptors.close(self._sock)
        self.board.close()
        self._exchange.close()
