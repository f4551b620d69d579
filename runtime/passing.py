"""Receiving descriptors over a socket.

Guarantees: what comes in is closed on exec, and the flags are heeded. (``socket.recv_fds`` of
CPython takes flags and drops them.)

Left to others: sending; ``socket.send_fds`` does that.
"""

from __future__ import annotations

import array
import socket


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
