"""The driver's hold on its guardian.

Guarantees: from the first process of a tree until its last there is a guardian; one that was
killed is replaced and told everything anew. A clean close ends it, and returns when it is gone.

Left to others: what the guardian does (`guardian_main`).
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import threading
import time
from typing import TYPE_CHECKING

from phalanx.runtime.event import unheard
from phalanx.runtime.linux import descriptors, process_tree
from phalanx.supervision import RuntimeFault

from . import interpreter
from .events import GuardianReplaced

if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx.runtime.event import LoggedEvent
    from phalanx.runtime.linux.process_tree import TreeMark
    from phalanx.runtime.threads.event_loop import Hub, Watch

_LONGEST = 30.0  # seconds until it is tried again to start one
_HEARING = 2.0  # seconds for a guardian to read when its socket is full: it has hundreds to read
_CALM = 1.0  # seconds a guardian must live before its death is answered at once


class Guardian:
    """The one guardian of a tree."""

    def __init__(
        self, hub: Hub, mark: TreeMark, emit: Callable[[LoggedEvent], None] = unheard
    ) -> None:
        self._hub = hub
        self._emit = emit
        self._mark = mark
        self._lock = threading.RLock()
        self._sessions: set[tuple[int, int]] = set()
        self._sock: socket.socket | None = None
        self._pidfd = -1
        self._watch: Watch | None = None
        self._started_at = 0.0
        self._closed = False
        self.pid = 0

    def start(self) -> None:
        """Start it unless it runs."""
        with self._lock:
            if self._sock is None and not self._closed:
                self._start()

    def add_session(self, key: tuple[int, int]) -> None:
        """Tell it of a worker: its session falls with the driver."""
        with self._lock:
            self._sessions.add(key)
            self._send("add_session", key)

    def drop_session(self, key: tuple[int, int]) -> None:
        """Nothing is left of that session."""
        with self._lock:
            self._sessions.discard(key)
            self._send("drop_session", key)

    def close(self, deadline: float) -> None:
        """End it; raises where it is still there at *deadline* (monotonic)."""
        with self._lock:
            self._closed = True
            if self._sock is None:
                return
            if self._watch is not None:
                self._watch.cancel()
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            poller = select.poll()
            poller.register(self._pidfd, select.POLLIN)
            if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
                msg = f"the guardian (pid {self.pid}) could not be ended in time"
                raise RuntimeFault(msg)
            self._collect()

    def _send(self, key: str, item: object) -> None:
        if self._sock is None:
            return
        with contextlib.suppress(OSError):  # it is dead: its successor is told everything
            poller = select.poll()
            poller.register(self._sock, select.POLLOUT)
            if poller.poll(_HEARING * 1000):
                self._sock.send(json.dumps({key: item}).encode(), socket.MSG_DONTWAIT)
            else:  # it has not read hundreds of messages in all that time
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def _start(self) -> None:
        with contextlib.ExitStack() as failed:
            try:
                ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                failed.callback(ours.close)
                known = os.fdopen(os.memfd_create("phalanx-guardian"), "w+")
                with theirs, known, os.fdopen(os.pidfd_open(os.getpid()), "rb") as driver:
                    # No messages: thousands do not fit into a socket's buffer, and nothing reads
                    # them while the new interpreter starts.
                    json.dump([*self._sessions], known)
                    known.seek(0)
                    fds = (theirs.fileno(), driver.fileno())
                    arguments = [*map(str, fds), self._mark.needle.decode()]
                    self.pid, self._pidfd = interpreter.start(
                        "the guardian",
                        interpreter.bare_command("guardian_main", arguments),
                        pass_fds=fds,
                        stdin=known,
                        stdout=subprocess.DEVNULL,
                        stderr=subprocess.DEVNULL,
                        env={
                            "PATH": os.environ.get("PATH", ""),
                            "PHALANX_TREE": self._mark.outer,
                        },
                        cwd="/",
                        start_new_session=True,
                    )
            except OSError as error:
                msg = f"the guardian could not be started: {error}"
                raise RuntimeFault(msg) from error
            failed.pop_all()
        self._sock = descriptors.own(ours)
        self._started_at = time.monotonic()
        try:
            self._watch = self._hub.watch(self._pidfd, select.EPOLLIN, self._on_exit)
        except BaseException:
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            self._collect()
            raise

    def _on_exit(self, _events: int) -> None:
        with self._lock:
            if self._sock is None or self._closed or not process_tree.is_gone(self._pidfd):
                return
            pid, lived = self.pid, time.monotonic() - self._started_at
            self._collect()
            # Whatever kills it at once must not make us start processes in a loop.
            self._start_later(pid, max(0.0, _CALM - lived), _CALM)

    def _start_later(self, dead: int, wait: float, then: float) -> None:
        self._hub.call_at(time.monotonic() + wait, lambda: self._again(dead, then))

    def _again(self, dead: int, wait: float) -> None:
        with self._lock:
            if self._closed or self._sock is not None:
                return
            try:
                self._start()
            except RuntimeFault:
                # Until then nothing ends what a dead driver leaves behind; the hub logs that.
                self._start_later(dead, wait, min(2 * wait, _LONGEST))
                raise
        self._emit(GuardianReplaced(pid=self.pid, replaced=dead, at=time.monotonic()))

    def _collect(self) -> None:
        assert self._sock is not None
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        with contextlib.suppress(ChildProcessError):  # collected by somebody else: as good
            os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG)
        descriptors.close(self._pidfd)
        descriptors.close(self._sock)
        self._sock = None
