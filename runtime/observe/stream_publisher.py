"""Event stream, publishing end.

- One message per line, record and event, numbered without gaps, so that a slow observer knows how
  much it missed. Nothing is encoded without an observer.
- Only processes of this user can connect.
- Used in the output collector only: zmq starts threads, and the driver must be free to fork.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any, Final

import zmq

from .find_drivers import address_of

if TYPE_CHECKING:
    from collections.abc import Mapping

_STATE: Final = b"state"
_HELD_FOR_ONE: Final = 10_000  # messages; then that observer misses some


class Publisher:
    """Publishes to the observers that connect to a socket of `open_stream`.

    Attributes:
        fd: Readable when an observer comes or goes; call `settle` then.
    """

    def __init__(self, listener: int) -> None:
        self._context = zmq.Context()
        try:
            self._socket = self._context.socket(zmq.XPUB)
            self._socket.setsockopt(zmq.SNDHWM, _HELD_FOR_ONE)
            self._socket.setsockopt(zmq.LINGER, 200)
            self._socket.setsockopt(zmq.IPC_FILTER_UID, os.geteuid())
            self._socket.setsockopt(zmq.USE_FD, listener)  # its to close from here on
            self._socket.bind(f"ipc://@{address_of(listener)}")
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self.fd = self._socket.fileno()
        self._topics: set[bytes] = set()
        self._sent = 0

    @property
    def is_heard(self) -> bool:
        """Whether an observer subscribes to lines, records and events."""
        return bool(self._topics - {_STATE})

    @property
    def is_watched(self) -> bool:
        """Whether an observer subscribes to status snapshots."""
        return _STATE in self._topics

    def settle(self) -> None:
        """Read subscriptions. Must follow every send: zmq's descriptor is edge-triggered."""
        while self._socket.poll(0, zmq.POLLIN):
            message = self._socket.recv(zmq.NOBLOCK)
            if message[:1] == b"\x01":
                self._topics.add(message[1:])
            else:
                self._topics.discard(message[1:])

    def send(self, record: Mapping[str, Any]) -> None:
        """Publish *record*."""
        if not self._topics:
            return
        self._sent += 1
        data = json.dumps({**record, "seq": self._sent}).encode()
        topic = str(record["kind"]).encode()
        self._socket.send_multipart([topic, data], zmq.NOBLOCK)

    def send_state(self, record: Mapping[str, Any]) -> None:
        """Publish a part of a status snapshot, without a number."""
        if self.is_watched:
            data = json.dumps({**record, "kind": "state"}).encode()
            self._socket.send_multipart([_STATE, data], zmq.NOBLOCK)

    def close(self) -> None:
        """Stop publishing."""
        self._socket.close()
        self._context.term()
