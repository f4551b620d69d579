"""Observers: how another process of the same user finds a driver and listens to it.

Guarantees: only directories that belong to this user, with mode 0700 and a living driver, are
looked at; what an observer yields is JSON and nothing else (no pickle); it is told how many
messages it missed, and its iteration ends when the driver ends.

Left to others: what is published (the scribe), and what is made of it (the command line).
"""

from __future__ import annotations

import json
import os
import secrets
import stat
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self, cast

from phalanx.supervision import RuntimeFault

if TYPE_CHECKING:
    from collections.abc import Iterator

_SOCKET: Final = "stream"
_CARD: Final = "driver.json"
_LONGEST_PATH: Final = 107  # bytes of a socket's path, the kernel's limit


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverStream:
    """A driver that can be listened to.

    Attributes:
        name: What the driver calls itself; empty where it does not.
        started_at: When its stream was opened, wall clock, in seconds.
    """

    pid: int
    name: str
    started_at: float
    directory: str


def stream_bases() -> list[Path]:
    """Return where streams are looked for and made, the preferred place first."""
    places = [os.environ.get("XDG_RUNTIME_DIR", ""), tempfile.gettempdir(), "/tmp"]  # noqa: S108 -- a private directory is made in it
    found = [Path(place) for place in places if place and Path(place).is_dir()]
    return list(dict.fromkeys(found))


def new_stream_directory() -> Path | None:
    """Return a path for a stream of this driver, or None where no place is short enough.

    Nothing is made yet: whoever is to remove it if the driver dies must know it first.
    """
    name = f"phalanx-{os.getuid()}-{os.getpid()}-{secrets.token_hex(4)}"
    for base in stream_bases():
        path = base / name
        fits = len(os.fsencode(path / _SOCKET)) <= _LONGEST_PATH
        if fits and os.access(base, os.W_OK | os.X_OK):
            return path
    return None


def make_stream_directory(path: Path, name: str) -> None:
    """Make *path*, for this user only, and put the driver's card into it."""
    path.mkdir(mode=0o700)
    path.chmod(0o700)  # whatever the umask is
    pid = os.getpid()
    card = {"pid": pid, "start": _start_of(pid), "name": name, "started_at": time.time()}
    (path / _CARD).write_text(json.dumps(card))


def find_drivers() -> list[DriverStream]:
    """Return the living drivers of this user that can be listened to, oldest first."""
    found = [
        driver
        for base in stream_bases()
        for path in base.glob(f"phalanx-{os.getuid()}-*")
        if (driver := _driver_at(path)) is not None
    ]
    return sorted(found, key=lambda driver: driver.started_at)


class Observer:
    """Listens to one driver. Iterate it; use it as a context manager, or close it.

    Attributes:
        missed: How many messages were lost so far because this observer was too slow.
    """

    def __init__(self, driver: DriverStream, *, watch: bool = False) -> None:
        """Connect to *driver*.

        Args:
            driver: The one to listen to.
            watch: See events, and what the driver looks like, once a second (``kind="state"``),
                instead of everything that is written.

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
        self._socket.connect(f"ipc://{driver.directory}/{_SOCKET}")
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._death, zmq.POLLIN)

    def next(self, deadline: float | None = None) -> dict[str, Any] | None:
        """Return the next message, or None at *deadline* (monotonic) or when the driver has ended.

        Every message has a ``kind``: ``event`` (the driver's), ``log`` (a worker's record),
        ``stdout`` or ``stderr`` (a worker's line, in ``text``), ``state`` (see `GroupGlance`,
        `TreeGlance` and `GlanceEnded`).
        """
        while True:
            left = None if deadline is None else max(0, int((deadline - time.monotonic()) * 1000))
            ready = {handle for handle, _ in self._poller.poll(left)}
            if self._socket in ready:  # before the death: what it said last is still to come
                return self._received()
            return None

    @property
    def has_ended(self) -> bool:
        """Whether the driver has; what it said last may still be to be read."""
        return bool(dict(self._poller.poll(0)).get(self._death))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while (record := self.next()) is not None:
            yield record
            if record.get("event") == "phalanx.stream_closed":
                return

    def close(self) -> None:
        """Stop listening."""
        self._socket.close()
        self._context.term()
        os.close(self._death)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _received(self) -> dict[str, Any]:
        _, data = self._socket.recv_multipart()
        record: dict[str, Any] = json.loads(data)
        seq: int = record.get("seq", 0)
        if self._watches or not seq:
            return record
        if self._seq and seq > self._seq + 1:
            self.missed += seq - self._seq - 1
        self._seq = seq  # lower than before where the scribe was replaced: it counts anew
        return record


def _driver_at(path: Path) -> DriverStream | None:
    try:
        seen = path.lstat()
        private = stat.S_ISDIR(seen.st_mode) and stat.S_IMODE(seen.st_mode) == 0o700
        if not private or seen.st_uid != os.getuid():
            return None  # somebody else's, made to look like ours
        loaded: object = json.loads((path / _CARD).read_text())
        if not isinstance(loaded, dict):
            return None
        card = cast("dict[str, Any]", loaded)
        pid = int(card["pid"])
        if _start_of(pid) != card["start"]:
            return None
        return DriverStream(
            pid=pid,
            name=str(card["name"]),
            started_at=float(card["started_at"]),
            directory=str(path),
        )
    except (OSError, ValueError, KeyError, TypeError):  # gone, or going, or being made
        return None


def _start_of(pid: int) -> int:
    """Return when *pid* was started, in the kernel's ticks: with the pid it names one process."""
    status = Path(f"/proc/{pid}/stat").read_text()
    return int(status.rpartition(")")[2].split()[19])
