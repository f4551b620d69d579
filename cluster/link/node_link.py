"""A node's end of its control link.

- The node's secret key never leaves its process. By the gateway's public key, which the order has,
  the other end proves that it is the gateway: messages of any other are not read.
- The link is made once. When its connection ends, so does the link, until it is renewed: it reports
  that, although ZeroMQ connects again, and what was not sent by then is dropped.
- A key that the gateway does not know yet is offered again until the time to join is over.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from enum import Enum, auto
from typing import TYPE_CHECKING, cast

import zmq

from .chunking import Inbox
from .messages import MalformedMessage, Piece, Taken, decode, encode

if TYPE_CHECKING:
    from .messages import Message

_EVENT = struct.Struct("=Hi")  # as zmq_socket_monitor(3) has it; pyzmq's way imports asyncio
_LAST_WORDS = 1000  # milliseconds for what has been said on the way out
_IDLE = 30  # seconds
_AT_ONCE = 0.5  # seconds; half of what an end gives a handshake


class LinkState(Enum):
    """The state of a link."""

    CONNECTING = auto()
    REFUSED = auto()  # the gateway does not know the key, or not yet
    OPEN = auto()
    ENDED = auto()


class NodeLink:
    """The link of one node process, or of what starts one. Used by one thread.

    Args:
        endpoint: As ``tcp://HOST:PORT``.
        server_key: The public key of the other end, in ZeroMQ's encoding.
        secret: The own secret key, in that encoding; None makes one.
        context: Another link's, with which this one is closed; None makes one.

    Attributes:
        state: As of the last `look`.
        failures: How many connections were made and have ended at once, before they were open.
        public: The node's public key, in ZeroMQ's encoding.
        secret: The node's secret key, in that encoding.
        address: The node's own address on the way to the gateway; empty until it is connected.
        ends: Sockets that become readable when there is work: `socket` and `monitor`.
        socket: Readable when there is a message: then `receive`.
        monitor: Readable when the state may have changed: then `look`.
    """

    def __init__(
        self,
        endpoint: str,
        server_key: str,
        secret: bytes | None = None,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._server_key = server_key
        self._context = context or zmq.Context()
        self.secret = secret or zmq.curve_keypair()[1]
        self.public = zmq.curve_public(self.secret).decode()
        self._prepare()

    def another(self) -> NodeLink:
        """Return one more link to the same end, with the same keys; it is closed with this one."""
        return NodeLink(self._endpoint, self._server_key, self.secret, self._context)

    def connect(self) -> None:
        """Begin to connect."""
        self.socket.connect(self._endpoint)

    def renew(self) -> None:
        """Let the connection go, if there is one; `connect` may follow."""
        self.socket.disable_monitor()
        self.monitor.close()
        self.socket.close(linger=0)  # unsent messages must not reach the next listener there
        self._prepare()

    def _prepare(self) -> None:
        self.state, self.failures, self.address = LinkState.CONNECTING, 0, ""
        self._connected_at = 0.0
        self._inbox = Inbox()
        self.socket = self._context.socket(zmq.DEALER)
        for option, value in (
            (zmq.LINGER, _LAST_WORDS),
            (zmq.SNDHWM, 0),
            (zmq.RCVHWM, 0),
            (zmq.TCP_KEEPALIVE, 1),  # or what is between may forget a link that is at rest
            (zmq.TCP_KEEPALIVE_IDLE, _IDLE),
            (zmq.CURVE_SERVERKEY, self._server_key.encode()),
            (zmq.CURVE_PUBLICKEY, self.public.encode()),
            (zmq.CURVE_SECRETKEY, self.secret),
            (zmq.IPV6, 1 if "[" in self._endpoint else 0),
        ):
            self.socket.setsockopt(option, value)
        self.monitor = self.socket.get_monitor_socket(
            zmq.EVENT_CONNECTED
            | zmq.EVENT_HANDSHAKE_SUCCEEDED
            | zmq.EVENT_HANDSHAKE_FAILED_AUTH
            | zmq.EVENT_DISCONNECTED
        )
        self.ends = (self.socket, self.monitor)

    def look(self) -> None:
        """Bring `state` up to date."""
        while self.monitor.poll(0):
            event, value = _EVENT.unpack(self.monitor.recv_multipart()[0])
            match event:
                case _ if self.state is LinkState.ENDED:
                    pass
                case zmq.EVENT_CONNECTED:
                    self.address = _own_address(value)
                    self._connected_at = time.monotonic()
                case zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    self.state = LinkState.OPEN
                case zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                    self.state = LinkState.REFUSED
                case _ if self.state is LinkState.OPEN:
                    # ZeroMQ would connect anew, but what was on its way is lost.
                    self.state = LinkState.ENDED
                case _:  # an end that has the key and no time waits for longer
                    self.failures += time.monotonic() < self._connected_at + _AT_ONCE

    def send(self, message: Message) -> None:
        """Send *message*; it waits for nothing."""
        self.socket.send_multipart(encode(message), zmq.NOBLOCK)

    def receive(self) -> Message | None:
        """Return the next message; None if there is none now. Malformed ones are skipped."""
        while True:
            try:
                message = decode(self.socket.recv_multipart(zmq.NOBLOCK))
                if not isinstance(message, Piece):
                    return message
                self.send(Taken())
                if (whole := self._inbox.put(message)) is not None:
                    return whole
            except zmq.Again:
                return None
            except MalformedMessage:  # from the gateway: not handled here
                continue

    def close(self) -> None:
        """Let the link go, and each `another`; what was sent has a moment to leave."""
        self._context.destroy(_LAST_WORDS)


def _own_address(fd: int) -> str:
    try:
        with socket.socket(fileno=os.dup(fd)) as copy:
            name: object = copy.getsockname()
    except OSError:  # it has been closed meanwhile
        return ""
    # If it is no address of a network, another has its number now.
    return str(cast("tuple[object]", name)[0]) if isinstance(name, tuple) else ""
