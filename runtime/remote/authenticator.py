"""Authenticator of connections: admits each peer whose key this process was given, once.

Guarantees: a connection exists only to a peer that has proved a key which was admitted and has not
been used; any other is refused before a byte of it is read as a message. Other metadata of a peer
is ignored.

Source: ZAP, https://rfc.zeromq.org/spec/27/.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import zmq
from zmq.utils import z85

if TYPE_CHECKING:
    from collections.abc import Callable

_ADDRESS = "inproc://zeromq.zap.01"


class Authenticator:
    """Answers ZeroMQ's question about each connection. Used by one thread.

    Attributes:
        socket: Readable when there is a question: then `answer`.
        let_in: How many connections.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.socket = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(_ADDRESS)
        self.let_in = 0
        self._admitted: dict[bytes, bytes] = {}

    def admit(self, secret: bytes, name: bytes) -> None:
        """Admit the peer with the key pair of *secret* (32 bytes); its messages carry *name*."""
        self.admit_key(zmq.curve_public(z85.encode(secret)), name)

    def admit_key(self, public: bytes, name: bytes) -> None:
        """Admit the peer with the secret of *public*, in ZeroMQ's encoding; see `admit`."""
        self._admitted[z85.decode(public)] = name

    def dismiss(self, name: bytes) -> None:
        """Admit *name* no longer."""
        self._admitted = {key: own for key, own in self._admitted.items() if own != name}

    def answer(self, on_refused: Callable[[str, str, bytes], None]) -> None:
        """Answer every pending request; *on_refused* gets address, reason and key of a refusal."""
        while self.socket.poll(0):
            parts = self.socket.recv_multipart()
            version, number = parts[0], parts[1]
            name, key = None, b""
            if len(parts) == 7 and version == b"1.0" and parts[5] == b"CURVE":
                key = parts[6]
                name = self._admitted.get(key)
            if name is not None:
                self.let_in += 1
                verdict = [b"200", b"OK", name, b""]
            else:
                address = parts[3].decode("utf-8", "replace") if len(parts) > 3 else ""
                on_refused(address, "its key is not one of this group's", key)
                verdict = [b"400", b"unknown key", b"", b""]
            self.socket.send_multipart([version, number, *verdict])
