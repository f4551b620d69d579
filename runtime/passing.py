"""Descriptors over a socket.

Guarantees: what comes in is closed on exec, and the flags are heeded. (``socket.recv_fds`` and
``socket.send_fds`` of CPython take flags and drop them.)
"""

from __future__ import annotations

import array
import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def receive_with_fds(
    sock: socket.socket, size: int, most: int, flags: int = 0
) -> tuple[bytes, list[int]]:
    """Return one packet of at most *size* bytes and the descriptors that came with it."""
    room = socket.CMSG_LEN(most * array.array("i").itemsize)
    data, ancillary, _, _ = sock.recvmsg(size, room, flags | socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    return data, fds.tolist()


def send_with_fds(sock: socket.socket, data: bytes, fds: Sequence[int], flags: int = 0) -> None:
    """Send one packet and *fds* with it."""
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))
    sock.sendmsg([data], [rights] if fds else [], flags)
