"""Event stream of a driver: discovery by processes of the same user, sending and receiving ends.

- A stream is a Unix socket with an abstract name, which the kernel reclaims with the driver. The
  driver itself listens, so the peer credentials of a connection are those of the driver: a socket
  of another user or process is ignored.
- One JSON message per line, record and event, numbered without gaps, so that an observer knows how
  many it missed. Nothing is encoded without an observer.
- zmq starts threads, and the driver must be free to fork: only the ends import it.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self
from urllib.parse import quote, unquote

from phalanx.runtime.linux import descriptors
from phalanx.supervision import RuntimeFault

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_LISTENS: Final = "00010000"  # in the flags that /proc/net/unix shows
_LONGEST: Final = 107  # bytes of an abstract name, the kernel's limit
_BACKLOG: Final = 64  # observers that connect while the collector is being replaced; arbitrary
_CREDENTIALS: Final = struct.Struct("3i")
_CONNECTED: Final = struct.Struct("=Hi")  # zmq's event: its kind and the connection's descriptor
_STATE: Final = b"state"
_HELD_FOR_ONE: Final = 10_000  # messages; then that observer misses some


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverStream:
    """A driver that observers can attach to.

    Attributes:
        name: The driver's name; may be empty.
        started_at: When its stream was opened, wall clock, in seconds.
        address: The abstract name of its socket, without the leading zero byte.
    """

    pid: int
    name: str
    started_at: float
    address: str


def open_stream(name: str) -> socket.socket:
    """Return a listening socket at which observers find this process under *name*.

    A name that is too long is cut.
    """
    head = f"{_prefix()}{time.time():.3f}-{secrets.token_hex(8)}-"
    while len(address := head + quote(name, safe="", errors="replace")) > _LONGEST:
        name = name[:-1]
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with descriptors.closed_on_error(listener):
        listener.bind(f"\0{address}")
        listener.listen(_BACKLOG)
    return listener


def address_of(listener: int) -> str:
    """Return the address of a socket of `open_stream`."""
    with socket.socket(fileno=os.dup(listener)) as copy:
        name: bytes = copy.getsockname()
    return name[1:].decode()


def find_drivers() -> list[DriverStream]:
    """Return the living drivers of this user that observers can attach to, oldest first."""
    marker = f" @{_prefix()}"
    with Path("/proc/net/unix").open(errors="replace") as lines:
        addresses = {
            line.split()[-1][1:] for line in lines if marker in line and _LISTENS in line.split()
        }
    found = [driver for address in addresses if (driver := _driver_at(address)) is not None]
    return sorted(found, key=lambda driver: driver.started_at)


def _prefix() -> str:
    return f"phalanx-stream-{os.geteuid()}-"


def _driver_at(address: str) -> DriverStream | None:
    started, _, rest = address.removeprefix(_prefix()).partition("-")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(f"\0{address}")
            pid = _peer_of(probe)
            if pid is None:
                return None
            os.close(os.pidfd_open(pid))
            name = unquote(rest.partition("-")[2])
            return DriverStream(pid=pid, name=name, started_at=float(started), address=address)
        except (OSError, ValueError):  # ended meanwhile, or not a stream
            return None


def _peer_of(connection: socket.socket) -> int | None:
    """Return the pid of the peer, if it is of this user; else None."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(data)
    return pid if user == os.geteuid() and pid > 0 else None


class Publisher:
    """Publishes to the observers that connect to a socket of `open_stream`.

    Attributes:
        fd: Readable when an observer comes or goes; call `settle` then.
    """

    def __init__(self, listener: int) -> None:
        import zmq  # noqa: PLC0415  # see the module

        self._context = zmq.Context()
        try:
            self._socket = self._context.socket(zmq.XPUB)
            self._socket.setsockopt(zmq.SNDHWM, _HELD_FOR_ONE)
            self._socket.setsockopt(zmq.LINGER, 200)
            self._socket.setsockopt(zmq.XPUB_VERBOSE, 1)  # reports each observer, not each topic
            self._socket.setsockopt(zmq.IPC_FILTER_UID, os.geteuid())
            self._socket.setsockopt(zmq.USE_FD, listener)  # its to close from here on
            self._socket.bind(f"ipc://@{address_of(listener)}")
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self.fd = self._socket.fileno()
        self._at_once = zmq.NOBLOCK
        self._topics: set[bytes] = set()
        self._sent = 0

    @property
    def has_subscribers(self) -> bool:
        """Whether an observer subscribes to lines."""
        return not self._topics.isdisjoint((b"stdout", b"stderr"))

    @property
    def is_watched(self) -> bool:
        """Whether an observer subscribes to status snapshots."""
        return _STATE in self._topics

    def settle(self) -> bool:
        """Read subscriptions; return whether one more observer wants status snapshots.

        Must follow every send: zmq's descriptor is edge-triggered.
        """
        is_new = False
        while self._socket.poll(0):
            message = self._socket.recv(self._at_once)
            begins, topic = message[:1] == b"\x01", message[1:]
            (self._topics.add if begins else self._topics.discard)(topic)
            is_new |= begins and topic == _STATE
        return is_new

    def send(self, record: Mapping[str, Any]) -> None:
        """Publish *record*; with a number, unless it is a part of a status snapshot."""
        topic = str(record["kind"]).encode()
        if topic not in self._topics:
            return
        if topic != _STATE:
            self._sent += 1
            record = {**record, "seq": self._sent}
        self._socket.send_multipart([topic, json.dumps(record).encode()], self._at_once)

    def close(self) -> None:
        """Stop publishing."""
        self._socket.close()
        self._context.term()


class Observer:
    """Listens to one driver. Iterate it; use it as a context manager, or close it.

    Its iteration ends when the driver ends.

    Attributes:
        missed: How many messages were lost so far because this observer was too slow.
    """

    def __init__(self, driver: DriverStream, *, watch: bool = False) -> None:
        """Connect to *driver*.

        Args:
            watch: Receive events and, once a second, a status snapshot (``kind="state"``), instead
                of all output.

        Raises:
            RuntimeFault: The driver has ended.
        """
        import zmq  # noqa: PLC0415  # see the module

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
        for each in (self._socket, self._connections, self._death):
            self._poller.register(each, zmq.POLLIN)

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
                    self._is_deceived |= _peer_of(connection) != self._pid
            except OSError:  # closed again
                self._is_deceived |= self.has_ended

    def _received(self) -> dict[str, Any]:
        _, data = self._socket.recv_multipart()
        record: dict[str, Any] = json.loads(data)
        seq: int = record.get("seq", 0)
        if not self._watches and seq:
            if self._seq and seq > self._seq + 1:
                self.missed += seq - self._seq - 1
            self._seq = seq  # lower than before if the output collector was replaced
        return record
