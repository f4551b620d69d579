"""The control socket of one rank, on which everything is said that is no call and no answer.

Guarantees: nobody else can connect to it; the driver's end is closed in its forks; what had arrived
before it ended is read.

Left to others: what is said (`hearing`, and `hosting` at the worker's end).
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from phalanx.runtime import Frame, ledger, receive

if TYPE_CHECKING:
    import contextlib


def control_pair(made: contextlib.ExitStack) -> tuple[socket.socket, socket.socket]:
    """Return the driver's end and the worker's, which are closed with *made*."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ledger.own(ours)
    made.callback(shut_control, ours)
    made.callback(theirs.close)
    return ours, theirs


def shut_control(sock: socket.socket) -> None:
    """Close the driver's end."""
    ledger.close(sock)


def read_control(control: socket.socket) -> tuple[list[Frame], int, bool]:
    """Return what has arrived on *control*, how many packets were none, and whether it ended."""
    frames: list[Frame] = []
    foreign = 0
    while True:
        try:
            frame = receive(control)
        except BlockingIOError:
            return frames, foreign, False
        except ConnectionResetError:
            continue
        except OSError:
            return frames, foreign, True
        if isinstance(frame, Frame):
            frames.append(frame)
        elif frame is None:
            foreign += 1
        else:
            return frames, foreign, True
