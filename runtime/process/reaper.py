"""Collects children that have no owner, and the orphans that a subreaper adopts.

Collecting processes whose end nobody waits for.

Guarantees: none of them stays a zombie; their status is read by pidfd, so nobody else's is taken.

Left to others: whose end it is that nobody waits for.

The moments in which orphaned descendants of the driver become its children.

Guarantees: the driver is a subreaper while workers are being forked and at no other time, unless
it was one before; what it adopted meanwhile that is not ours (a daemon of the user's that lost its
parent just then) is reaped when it ends, and is never waited for. A child that the user's own code
started is never touched: its status is that code's to collect.

Left to others: saying which children are ours (`claim`, until they are collected).

It is one per process because the flag is.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.runtime.linux import descriptors, process_tree, syscalls

if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx.runtime.threads.event_loop import Hub

    from .zygote import StartRequest


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
            _before = syscalls.is_subreaper()
            since_boot = time.clock_gettime(time.CLOCK_BOOTTIME)
            _opened_at = int(since_boot * os.sysconf("SC_CLK_TCK"))
            _children_before = frozenset(_children())
            syscalls.set_subreaper(on=True)
        _open += 1


def close_window() -> bool:
    """Return whether this was the last window, so that it is time to look at `adopted`."""
    global _open  # noqa: PLW0603  # the flag is the process's
    with _lock:
        _open -= 1
        if _open:
            return False
        syscalls.set_subreaper(on=_before)
        return not _before


def claim(pid: int) -> None:
    """Note that the child *pid* has somebody who collects it."""
    _ours.add(pid)


def release(pid: int) -> None:
    """The child *pid* has been collected; its number may come again."""
    _ours.discard(pid)


def adopted() -> list[process_tree.Task]:
    """Return those children of this process that others brought into the world.

    A process that this one started is in this one's session or leads its own; nothing can join a
    third. So a child in somebody else's session was adopted, and so was one that is older than
    the window and was not a child when it opened. One that was both born and orphaned within the
    window, and is in our session or leads its own, cannot be told from a child of the user's: it
    is let be.
    """
    session = os.getsid(0)
    found: list[process_tree.Task] = []
    for pid in _children():
        task = None if pid in _ours else process_tree.read(pid)
        if task is None:
            continue
        if pid in _children_before:
            continue  # which was here before, perhaps from before this process led a new session
        if task.session not in (pid, session) or task.ticks < _opened_at:
            found.append(task)
    return found


def _children() -> list[int]:
    found: list[int] = []
    for thread in process_tree.numbers_in("/proc/self/task"):
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


_AGAIN = 0.01  # seconds until a dead process is asked for again that is not ours to collect yet
_LONGEST = 1.0  # seconds, after it has been asked for in vain again and again
_RETRY = 0.1  # seconds until a descriptor may have become free
_PATIENCE = 10.0  # seconds, for the death of what was killed, and until it is our child


class Reaping:
    """One dead or dying process."""

    def __init__(self, hub: Hub, pidfd: int, pid: int, done: Callable[[], object]) -> None:
        self._hub = hub
        self._pid = pid
        self._pidfd = descriptors.own(pidfd)
        self._done = done
        self._until = 0.0
        self._lock = threading.Lock()
        self._closed = False
        self._is_traced = False
        self._wait = _AGAIN
        claim(pid)
        # Under the lock, for which the callback waits: it is called at once for one that is dead.
        with self._lock:
            self._watch = hub.watch(pidfd, select.EPOLLIN, self._on_readable)

    def close(self) -> None:
        """Let go of it."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._watch.cancel()
            descriptors.close(self._pidfd)
            release(self._pid)
        self._done()

    def _on_readable(self, _events: int) -> None:
        with self._lock:
            if self._closed or not process_tree.is_gone(self._pidfd):
                return
            if not self._collect():
                # Not our child yet: the process between it and us still lives. Or a debugger is
                # to collect it first, and that has no limit.
                self._watch.modify(0)
                now = time.monotonic()
                self._until = self._until or now + _PATIENCE
                if self._is_traced or now < self._until:
                    wait, self._wait = self._wait, min(2 * self._wait, _LONGEST)
                    self._hub.call_at(now + wait, lambda: self._on_readable(0))
                    return
        self.close()

    def _collect(self) -> bool:
        """Collect it; return whether there is nothing left of it, whoever has done that."""
        try:
            found = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG)
        except ChildProcessError:
            return self._has_been_collected()
        self._is_traced = found is None
        return found is not None

    def _has_been_collected(self) -> bool:
        """Whether somebody else has: init, or the hunt that ended it."""
        try:
            signal.pidfd_send_signal(self._pidfd, 0)
        except ProcessLookupError:
            return True
        except PermissionError:  # it was another user's
            return False
        return False


class Reapings:
    """Those of one launcher: each pid once. Thread-safe."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._lock = threading.Lock()
        self._open: dict[int, Reaping] = {}
        self._closed = False

    def take(self, pidfd: int, pid: int, *, kill: bool) -> None:
        """Collect the process behind *pidfd*, which is ours from now on, once it has ended."""
        if kill:
            _kill(pidfd)
        with self._lock:
            if self._closed or pid in self._open:
                os.close(pidfd)
                return
            self._open[pid] = Reaping(self._hub, pidfd, pid, lambda: self._forget(pid))

    def take_number(self, pid: int) -> None:
        """Collect our child *pid*, for which there is no descriptor, once there is one again.

        It ends by itself. Nobody else may collect it meanwhile: its number would be free.
        """
        claim(pid)
        try:
            self.take(os.pidfd_open(pid), pid, kill=True)
        except ProcessLookupError:
            release(pid)
        except OSError:
            if not self._closed:
                self._hub.call_at(time.monotonic() + _RETRY, lambda: self.take_number(pid))

    def take_adopted(self) -> None:
        """Collect what this process adopted while it was a subreaper."""
        for task in adopted():
            try:
                pidfd = os.pidfd_open(task.pid)
            except OSError:
                continue
            if process_tree.is_same(task):
                self.take(pidfd, task.pid, kill=False)
            else:
                os.close(pidfd)

    def discard(self, request: StartRequest) -> None:
        """Kill what came of *request* and was not let go; it may be asked for again.

        Returns once that is gone, so that nothing is held by it any more; or after some seconds.
        """
        pidfd = request.take_pidfd()
        if pidfd >= 0:
            _kill(pidfd)
            poller = select.poll()
            poller.register(pidfd, select.POLLIN)
            poller.poll(_PATIENCE * 1000)
            self.take(pidfd, request.pid, kill=False)
        request.begin_anew()

    def _forget(self, pid: int) -> None:
        with self._lock:  # `take` enters it first
            self._open.pop(pid, None)

    def close(self) -> None:
        """Let go of all of them."""
        with self._lock:
            self._closed = True
            reapings = list(self._open.values())
        for one in reapings:
            one.close()


def _kill(pidfd: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
