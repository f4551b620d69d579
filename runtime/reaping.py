"""Collecting processes whose end nobody waits for.

Guarantees: none of them stays a zombie; their status is read by pidfd, so nobody else's is taken.

Left to others: whose end it is that nobody waits for.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from typing import TYPE_CHECKING

from . import ledger, subreaper, tree

if TYPE_CHECKING:
    from collections.abc import Callable

    from .hub import Hub
    from .start_request import StartRequest

_AGAIN = 0.01  # seconds until a dead process is asked for again that is not ours to collect yet
_LONGEST = 1.0  # seconds, after it has been asked for in vain again and again
_RETRY = 0.1  # seconds until a descriptor may have become free
_PATIENCE = 10.0  # seconds, for the death of what was killed, and until it is our child


class Reaping:
    """One dead or dying process."""

    def __init__(self, hub: Hub, pidfd: int, pid: int, done: Callable[[], object]) -> None:
        self._hub = hub
        self._pid = pid
        self._pidfd = ledger.own(pidfd)
        self._done = done
        self._until = 0.0
        self._lock = threading.Lock()
        self._closed = False
        self._is_traced = False
        self._wait = _AGAIN
        subreaper.claim(pid)
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
            ledger.close(self._pidfd)
            subreaper.release(self._pid)
        self._done()

    def _on_readable(self, _events: int) -> None:
        with self._lock:
            if self._closed or not tree.is_gone(self._pidfd):
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
        subreaper.claim(pid)
        try:
            self.take(os.pidfd_open(pid), pid, kill=True)
        except ProcessLookupError:
            subreaper.release(pid)
        except OSError:
            if not self._closed:
                self._hub.call_at(time.monotonic() + _RETRY, lambda: self.take_number(pid))

    def take_adopted(self) -> None:
        """Collect what this process adopted while it was a subreaper."""
        for task in subreaper.adopted():
            try:
                pidfd = os.pidfd_open(task.pid)
            except OSError:
                continue
            if tree.is_same(task):
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
