"""Ends the connections of gloo groups that were left, while something still refers to them.

- Each rank that waits in a collective operation of such a group, here or elsewhere, gets its error
  at once; no other socket of the process is touched. A rank in the middle of a message gets none
  (`Pair::sendAsyncMode` and `Pair::signalException`, as of torch 2.13): it waits until the group's
  timeout.

Why: gloo closes its connections when the last reference to a group is gone. A worker that keeps one
of its own (the group, a module that was given it, the handle of an operation, a thread that is in
one) would hold up every rank that waits for it until the group's timeout, 30 minutes by default;
torch has no call that ends them (``shutdown`` and ``abort`` do nothing in gloo 2.13).

How they are found: gloo watches the connections of each group with a thread of a name of its own,
which sleeps in ``epoll_wait``; the kernel shows which descriptor that is, and what it watches.
Where any of this is different nothing is found, and the ranks wait as they would have.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_THREAD = "gloo_tcp_loop"
_TASKS = Path("/proc/self/task")
_PATIENCE = 2.0  # seconds for a thread to go back to sleep that is at work, or due for it
_LOOK_AGAIN = 0.002


def end_gloo_connections() -> int:
    """End every connection between ranks that gloo has open; return how many there were."""
    ended = 0
    deadline = time.monotonic() + _PATIENCE
    waiting = set(_loops())
    while waiting:
        for task in tuple(waiting):
            polled = _polled_by(task)
            if polled is not None:
                waiting.discard(task)
                ended += sum(_end(fd, inode) for fd, inode in _watched_by(polled))
        if not waiting or time.monotonic() >= deadline:
            break
        time.sleep(_LOOK_AGAIN)
    return ended


def _loops() -> Iterator[Path]:
    """The threads that watch connections."""
    for task in _TASKS.iterdir():
        with contextlib.suppress(OSError):  # it has just ended
            if (task / "comm").read_text().strip() == _THREAD:
                yield task


def _polled_by(task: Path) -> int | None:
    """Return the descriptor that *task* sleeps in; -1 where it has ended, None where it works."""
    try:
        number, *arguments = (task / "syscall").read_text().split()
    except OSError:
        return -1
    if number == "running" or not arguments:
        return None
    fd = int(arguments[0], 16)
    try:
        is_epoll = "eventpoll" in str(Path(f"/proc/self/fd/{fd}").readlink())
    except OSError:
        return None
    return fd if is_epoll else None


def _watched_by(polled: int) -> Iterator[tuple[int, int]]:
    """The descriptors, and the inodes behind them, that the one *polled* watches."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/self/fdinfo/{polled}").read_text().splitlines():
            told = line.replace(":", " ").split()
            if told and told[0] == "tfd" and "ino" in told:
                yield int(told[1]), int(told[told.index("ino") + 1], 16)


def _end(fd: int, inode: int) -> bool:
    """End the connection *fd*, if it is one, and the one of that inode; gloo closes it itself."""
    try:
        copy = socket.socket(fileno=os.dup(fd))
    except OSError:  # no socket: gloo wakes its thread by others
        return False
    with copy:
        if os.fstat(copy.fileno()).st_ino != inode:  # closed, and its number another's
            return False
        try:
            copy.getpeername()  # one that listens must be left alone: gloo would abort
            copy.shutdown(socket.SHUT_RDWR)
        except OSError:
            return False
    return True
