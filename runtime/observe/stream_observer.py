"""Observer: listens to the event stream of a driver, from another process of the same user.

Records are JSON, not pickle. An observer knows how many messages it missed, and its iteration ends
when the driver ends.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import time
from typing import TYPE_CHECKING, Any, Final, Self

from phalanx.supervision import RuntimeFault

from .find_drivers import peer_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from .find_drivers import DriverStream

_CONNECTED: Final = struct.Struct("=Hi")  # zmq's event: its kind and the connection's descriptor


class Observer:
    """Listens to one driver. Iterate it; use it as a context manager, or close it.

    Attributes:
        missed: How many messages were lost so far because this observer was too slow.
    """

    def __init__(self, driver: DriverStream, *, watch: bool = False) -> None:
        """Connect to *driver*.

        Args:
            driver: The driver.
            watch: Receive events and, once a second, a status snapshot (``kind="state"``), instead
                of all output.

        Raises:
            RuntimeFault: The driver has ended.
        """
        import zmq  # noqa: PLC0415 -- only observers need it, and importing it costs a driver time

        try:
            self._death = os.pidfd_open(driver.pid)
        except ProcessLookupError:
            raise RuntimeFault(f"driver {driver.pid} has ended; nothing to listen to") from None
        self.missed = 0
        self._seq = 0
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        for kind in ("event", "state") if watch else ("event", "log", "stdout", "stderr"):
            self._socket.setsockopt(zmq.SUBSCRIBE, kind.encode())
        self._watches = watch
        self._pid = driver.pid
        self._is_deceived = False
        self._connections = self._socket.get_monitor_socket(zmq.EVENT_CONNECTED)
        self._socket.connect(f"ipc://@{driver.address}")
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._connections, zmq.POLLIN)
        self._poller.register(self._death, zmq.POLLIN)

    def next(self, deadline: float | None = None) -> dict[str, Any] | None:
        """Return the next message, or None at *deadline* (monotonic) or when the driver has ended.

        Every message has a ``kind``: ``event`` (the driver's), ``log`` (a worker's record),
        ``stdout`` or ``stderr`` (a worker's line, in ``text``), ``state`` (see `GroupStatus`,
        `TreeStatus` and `StatusEnded`).
        """
        while True:
            left = None if deadline is None else max(0, int((deadline - time.monotonic()) * 1000))
            ready = {handle for handle, _ in self._poller.poll(left)}
            if self._connections in ready:  # before its messages
                self._check_peer()
            if self._is_deceived:
                return None
            if self._socket in ready:  # before the death: its last messages
                return self._received()
            if ready != {self._connections}:
                return None

    @property
    def has_ended(self) -> bool:
        """Whether the driver has ended; its last messages may still be unread."""
        return bool(dict(self._poller.poll(0)).get(self._death))

    @staticmethod
    def is_last(record: Mapping[str, Any]) -> bool:
        """Return whether *record* says that the driver has closed its stream."""
        return record.get("kind") == "event" and record.get("event") == "phalanx.stream_closed"

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while (record := self.next()) is not None:
            yield record
            if self.is_last(record):
                return

    def close(self) -> None:
        """Stop listening."""
        self._socket.disable_monitor()
        self._connections.close()
        self._socket.close()
        self._context.term()
        os.close(self._death)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_peer(self) -> None:
        """Check that new connections lead to the driver.

        Its address is free when it has ended, and zmq connects again by itself.
        """
        while self._connections.poll(0):
            kind_and_fd, _ = self._connections.recv_multipart()
            _, fd = _CONNECTED.unpack(kind_and_fd)
            try:
                with socket.socket(fileno=os.dup(fd)) as connection:
                    self._is_deceived |= peer_of(connection) != self._pid
            except OSError:  # closed again
                self._is_deceived |= self.has_ended

    def _received(self) -> dict[str, Any]:
        _, data = self._socket.recv_multipart()
        record: dict[str, Any] = json.loads(data)
        seq: int = record.get("seq", 0)
        if self._watches or not seq:
            return record
        if self._seq and seq > self._seq + 1:
            self.missed += seq - self._seq - 1
        self._seq = seq  # lower than before where the output collector was replaced: it counts anew
        return record
