"""How a process of the same user finds the drivers that run: by the sockets of their event streams.

A stream is a Unix socket with an abstract name, which the kernel reclaims with the driver. The
driver itself listens, so the peer credentials of a connection are those of the driver: a socket of
another user or process is ignored.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import quote, unquote

from phalanx.runtime.linux import descriptors

_LISTENS: Final = "00010000"  # in the flags that /proc/net/unix shows
_LONGEST: Final = 107  # bytes of an abstract name, the kernel's limit
_BACKLOG: Final = 64  # observers that connect while the collector is being replaced; arbitrary
_CREDENTIALS: Final = struct.Struct("3i")


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
    while len(address := head + quote(name, safe="")) > _LONGEST:
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
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as knock:
        knock.setblocking(False)
        try:
            knock.connect(f"\0{address}")
            pid = peer_of(knock)
            if pid is None:
                return None
            os.close(os.pidfd_open(pid))
            name = unquote(rest.partition("-")[2])
            return DriverStream(pid=pid, name=name, started_at=float(started), address=address)
        except (OSError, ValueError):  # ended meanwhile, or not a stream
            return None


def peer_of(connection: socket.socket) -> int | None:
    """Return the pid of the peer, if it is of this user; else None."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(data)
    return pid if user == os.geteuid() and pid > 0 else None
