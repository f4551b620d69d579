"""Registry of open descriptors, and passing of descriptors over Unix sockets (SCM_RIGHTS).

- After ``os.fork`` every registered descriptor is closed in the child before any of the child's own
  code runs. Otherwise a child of the user's would hold these sockets open: the other end would get
  no end of file, and two processes would read from one socket. A fork by C code bypasses this.
- Register a descriptor after opening it, and unregister it before closing it.
- Received descriptors are closed on exec, and flags are applied: ``socket.recv_fds`` and
  ``socket.send_fds`` of CPython take flags and ignore them.
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Sequence


def receive_with_fds(
    sock: socket.socket, size: int, most: int, flags: int = 0
) -> tuple[bytes, list[int]]:
    """Return one packet of at most *size* bytes and the descriptors that came with it.

    Nothing once the other end is closed, even if it has left packets unread.
    """
    room = socket.CMSG_LEN(most * array.array("i").itemsize)
    try:
        data, ancillary, _, _ = sock.recvmsg(size, room, flags | socket.MSG_CMSG_CLOEXEC)
    except ConnectionResetError:
        return b"", []
    return data, fds_in(ancillary)


def fds_in(ancillary: Iterable[tuple[int, int, bytes]]) -> list[int]:
    """Return the descriptors in the *ancillary* data of a packet."""
    fds = array.array("i")
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    return fds.tolist()


def send_with_fds(sock: socket.socket, data: bytes, fds: Sequence[int], flags: int = 0) -> None:
    """Send one packet and *fds* with it."""
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))
    sock.sendmsg([data], [rights] if fds else [], flags)


class Closeable(Protocol):
    """An object that closes its own descriptor, such as a socket."""

    def close(self) -> None:
        """Close it."""
        ...


Entry = TypeVar("Entry", bound="int | Closeable")

_owned: set[int | Closeable] = set()


def own(entry: Entry, stack: contextlib.ExitStack | None = None) -> Entry:
    """Register a descriptor, or the object that holds it, for *stack* to close; return it.

    Register the object if there is one: it closes its number a second time when it is collected,
    and in the child that number may be another file's by then.
    """
    _owned.add(entry)
    if stack is not None:
        stack.callback(close, entry)
    return entry


def disown(entry: Entry) -> Entry:
    """Unregister *entry*, before it is closed or given away; return it."""
    _owned.discard(entry)
    return entry


def close(entry: int | Closeable) -> None:
    """Unregister *entry* and close it."""
    _owned.discard(entry)  # first: its number may be another's as soon as it is closed
    if isinstance(entry, int):
        os.close(entry)
    else:
        entry.close()


@contextlib.contextmanager
def closed_on_error(entry: int | Closeable) -> Generator[None]:
    """Close *entry* if the block raises."""
    try:
        yield
    except BaseException:
        close(entry)
        raise


def make_shared_file(name: str, size: int = 0) -> tuple[str, int]:
    """Make a memory file of *size* zeros, which other processes open by a path while it is open.

    Returns:
        The path, and the descriptor, which is registered.

    Raises:
        OSError: there is no memory, or no descriptor, for it.
    """
    fd = own(os.memfd_create(name, os.MFD_CLOEXEC))
    with closed_on_error(fd):
        if size:
            os.posix_fallocate(fd, 0, size)
    return f"/proc/{os.getpid()}/fd/{fd}", fd


def _close_all() -> None:
    for entry in list(_owned):
        with contextlib.suppress(OSError):
            close(entry)


os.register_at_fork(after_in_child=_close_all)
