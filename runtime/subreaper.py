"""The moments in which orphaned descendants of the driver become its children.

Guarantees: the driver is a subreaper while workers are being forked and at no other time, unless
it was one before; what it adopted meanwhile that is not ours (a daemon of the user's that lost its
parent just then) is reaped when it ends, and is never waited for. A child that the user's own code
started is never touched: its status is that code's to collect.

Left to others: saying which children are ours (`claim`, until they are collected).

It is one per process because the flag is.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

from . import kernel, tree

_lock = threading.Lock()
_open = 0
_before = False
_children_before: frozenset[int] = frozenset()
_opened_at = 0  # in clock ticks since boot, as the kernel dates processes
_ours: set[int] = set()


def open_window() -> None:
    """Adopt orphans until as many `close_window` have been called."""
    global _open, _before, _children_before, _opened_at  # noqa: PLW0603  # as the flag
    with _lock:
        if _open == 0:
            _before = kernel.is_subreaper()
            since_boot = time.clock_gettime(time.CLOCK_BOOTTIME)
            _opened_at = int(since_boot * os.sysconf("SC_CLK_TCK"))
            _children_before = frozenset(_children())
            kernel.set_subreaper(on=True)
        _open += 1


def close_window() -> bool:
    """Return whether this was the last window, so that it is time to look at `adopted`."""
    global _open  # noqa: PLW0603  # the flag is the process's
    with _lock:
        _open -= 1
        if _open:
            return False
        kernel.set_subreaper(on=_before)
        return not _before


def claim(pid: int) -> None:
    """Note that the child *pid* has somebody who collects it."""
    _ours.add(pid)


def release(pid: int) -> None:
    """The child *pid* has been collected; its number may come again."""
    _ours.discard(pid)


def adopted() -> list[tree.Task]:
    """Return those children of this process that others brought into the world.

    A process that this one started is in this one's session or leads its own; nothing can join a
    third. So a child in somebody else's session was adopted, and so was one that is older than
    the window and was not a child when it opened. One that was both born and orphaned within the
    window, and is in our session or leads its own, cannot be told from a child of the user's: it
    is let be.
    """
    session = os.getsid(0)
    found: list[tree.Task] = []
    for pid in _children():
        task = None if pid in _ours else tree.read(pid)
        if task is None:
            continue
        if pid in _children_before:
            continue  # which was here before, perhaps from before this process led a new session
        if task.session not in (pid, session) or task.ticks < _opened_at:
            found.append(task)
    return found


def _children() -> list[int]:
    found: list[int] = []
    for thread in tree.numbers_in("/proc/self/task"):
        try:
            found += map(int, Path(f"/proc/self/task/{thread}/children").read_text().split())
        except OSError:
            continue
    return found


def _forget() -> None:
    # The flag itself is not inherited, and the lock may have been held by another thread.
    global _open, _lock  # noqa: PLW0603  # the flag is the process's
    _open = 0
    _ours.clear()
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forget)
