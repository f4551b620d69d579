"""Reaper: collects children that have no owner, and the orphans that a subreaper adopts.

- The process is a subreaper while workers are being forked and at no other time, unless it was one
  before. An unrelated process that it adopts meanwhile (a daemon of the user's that lost its parent
  just then) is collected when it ends, and never waited for.
- Statuses are read by pidfd. A child that the user's own code started is never collected.

The window is one per process because the flag is.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

from phalanx.runtime.linux import descriptors, process_tree, procfs, syscalls

if TYPE_CHECKING:
    from collections.abc import Iterable

    from phalanx.runtime.threads.event_loop import EventLoop, Watch

_AGAIN = 0.01  # seconds until the next attempt to collect a dead process that is not yet adopted
_LONGEST = 1.0  # seconds, after many failed attempts
_RETRY = 0.1  # seconds until a descriptor may have become free
_REAP_TIMEOUT = 10.0  # seconds, for the death of what was killed, and until it is our child

_lock = threading.Lock()
_open = 0
_before = False
_children_before: frozenset[int] = frozenset()
_opened_at = 0  # in clock ticks since boot, as the kernel dates processes
owned: set[int] = set()
"""The children of this process that are collected by an owner."""


def open_window() -> None:
    """Adopt orphans until as many `close_window` have been called."""
    global _open, _before, _children_before, _opened_at  # noqa: PLW0603  # as the flag
    with _lock:
        if _open == 0:
            _before = syscalls.is_subreaper()
            since_boot = time.clock_gettime(time.CLOCK_BOOTTIME)
            _opened_at = int(since_boot * os.sysconf("SC_CLK_TCK"))
            _children_before = frozenset(_children())
            syscalls.set_subreaper(on=True)
        _open += 1


def close_window() -> bool:
    """Return whether this was the last window, so that it is time for `Reaper.take_adopted`."""
    global _open  # noqa: PLW0603  # the flag is the process's
    with _lock:
        _open -= 1
        if _open:
            return False
        syscalls.set_subreaper(on=_before)
        return not _before


def _unowned_children() -> list[procfs.Task]:
    """Return the children of this process that were not claimed."""
    found = (procfs.read(pid) for pid in _children() if pid not in owned)
    return [task for task in found if task is not None]


def _children() -> list[int]:
    found: list[int] = []
    folder = "/proc/self/task"
    for thread in procfs.numbers_in(folder):
        try:
            found += map(int, (procfs.content(f"{folder}/{thread}/children") or b"").split())
        except OSError:
            continue
    return found


def _forget() -> None:
    # The flag itself is not inherited, and the lock may have been held by another thread.
    global _open, _lock  # noqa: PLW0603  # the flag is the process's
    _open = 0
    owned.clear()
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forget)


@dataclass(slots=True, eq=False)
class _Orphan:
    """One dead or dying process."""

    pidfd: int
    watch: Watch
    is_killed: bool
    wait: float = _AGAIN
    until: float = 0.0


class Reaper:
    """Collects each process that it is given once. Thread-safe."""

    def __init__(self, loop: EventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._orphans: dict[int, _Orphan] = {}
        self._closed = False

    def take(self, pidfd: int, pid: int, *, kill: bool) -> None:
        """Collect the process behind *pidfd*, which is ours from now on, once it has ended."""
        if kill:
            process_tree.send_signal(pidfd, signal.SIGKILL)
        with self._lock:  # for which the callback waits: it comes at once for one that is dead
            if self._closed or self._loop.has_ended or pid in self._orphans:
                if pid not in self._orphans:  # nothing would report its end: now or never
                    process_tree.collect(pidfd)
                os.close(pidfd)
                return
            watch = self._loop.watch(pidfd, select.EPOLLIN, lambda _: self._look(pid))
            self._orphans[pid] = _Orphan(descriptors.own(pidfd), watch, kill)
            owned.add(pid)

    def take_number(self, pid: int) -> None:
        """Collect our child *pid*, for which there is no descriptor, once there is one again.

        It ends by itself. Nothing else may collect it meanwhile: its number would be free.
        """
        owned.add(pid)
        try:
            self.take(os.pidfd_open(pid), pid, kill=True)
        except ProcessLookupError:
            owned.discard(pid)
        except OSError:
            if not self._closed:
                self._loop.call_at(time.monotonic() + _RETRY, lambda: self.take_number(pid))

    def take_adopted(self) -> None:
        """Collect the children of this process that others started, adopted within the window.

        A process that this one started is in this one's session or leads its own; nothing can join
        a third. So a child in another session was adopted, and so was one that is older than the
        window and was not a child when it opened. One that was both started and orphaned within the
        window, and is in our session or leads its own, may be a child of the user's,
        and is not collected. Nor is a child of before the window: this process may have led no
        session then.
        """
        session = os.getsid(0)
        self._take_all(
            task
            for task in _unowned_children()
            if task.pid not in _children_before
            and (task.session not in (task.pid, session) or task.ticks < _opened_at)
        )

    def take_orphans(self, leader: int) -> None:
        """Collect what this process inherited from *leader*, a process of ours that has died.

        That is in the session that it led, which no other process can join, and came here because
        this process is a subreaper, or the init of its PID namespace, throughout.
        """
        if os.getpid() == 1 or syscalls.is_subreaper():
            with contextlib.suppress(OSError):  # no descriptor is free to look for them
                self._take_all(
                    task
                    for task in _unowned_children()
                    if task.pid != leader and task.session == leader
                )

    def end(self, pidfd: int, pid: int) -> None:
        """Kill the process behind *pidfd* and collect it; return once it is dead, or late."""
        process_tree.send_signal(pidfd, signal.SIGKILL)
        process_tree.wait_all([pidfd], time.monotonic() + _REAP_TIMEOUT)
        self.take(pidfd, pid, kill=False)

    def close(self, deadline: float) -> None:
        """Collect those that are dead or were killed, and forget the others.

        Args:
            deadline: Monotonic; one that is alive by then, or still has its parent, is forgotten,
                ten seconds from now at the latest.
        """
        with self._lock:
            self._closed = True
            left, self._orphans = self._orphans, {}
            for orphan in left.values():
                orphan.watch.cancel()
        deadline = min(deadline, time.monotonic() + _REAP_TIMEOUT)
        with contextlib.ExitStack() as freeing:
            for pid, orphan in left.items():
                freeing.callback(owned.discard, pid)
                freeing.callback(descriptors.close, orphan.pidfd)
            for orphan in left.values():
                process_tree.wait_all([orphan.pidfd], deadline if orphan.is_killed else 0.0)
                if not process_tree.is_gone(orphan.pidfd):
                    continue
                while _collect(orphan.pidfd) is _Collected.NOT_YET and time.monotonic() < deadline:
                    time.sleep(_AGAIN)  # its parent is about to end, which nothing tells

    def _take_all(self, tasks: Iterable[procfs.Task]) -> None:
        for task in tasks:
            try:
                pidfd = process_tree.open_pidfd(task)
            except OSError:  # no descriptor is free
                continue
            if pidfd is not None:
                self.take(pidfd, task.pid, kill=False)

    def _look(self, pid: int) -> None:
        with self._lock:
            orphan = self._orphans.get(pid)
            if orphan is None or not process_tree.is_gone(orphan.pidfd):
                return
            collected = _collect(orphan.pidfd)
            now = time.monotonic()
            orphan.until = orphan.until or now + _REAP_TIMEOUT
            if collected is _Collected.YES or (
                collected is _Collected.NOT_YET and now >= orphan.until
            ):
                self._drop(pid)
                return
            orphan.watch.modify(0)
            self._loop.call_at(now + orphan.wait, lambda: self._look(pid))
            orphan.wait = min(2 * orphan.wait, _LONGEST)

    def _drop(self, pid: int) -> None:
        orphan = self._orphans.pop(pid)
        orphan.watch.cancel()
        descriptors.close(orphan.pidfd)
        owned.discard(pid)


class _Collected(Enum):
    YES = auto()  # by us, or by other code
    NOT_YET = auto()  # it is not our child yet: its parent still lives
    BY_DEBUGGER = auto()  # it is to be, first, and that has no limit


def _collect(pidfd: int) -> _Collected:
    """Collect the dead process behind *pidfd*."""
    try:
        found = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG)
    except ChildProcessError:
        return _Collected.YES if _has_been_collected(pidfd) else _Collected.NOT_YET
    return _Collected.BY_DEBUGGER if found is None else _Collected.YES


def _has_been_collected(pidfd: int) -> bool:
    try:
        signal.pidfd_send_signal(pidfd, 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # it was another user's
        pass
    return False
