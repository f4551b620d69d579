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
from typing import TYPE_CHECKING, TypeVar

from phalanx.supervision import RuntimeFault

from . import executable, ledger, tree
from .events import GuardianReplaced, unheard

if TYPE_CHECKING:
    from collections.abc import Callable

    from .events import LoggedEvent
    from .hub import Hub, Watch
    from .marks import TreeMark

_Item = TypeVar("_Item")

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
        self._tell("session", self._sessions, key)

    def drop_session(self, key: tuple[int, int]) -> None:
        """Nothing is left of that session."""
        self._tell("session", self._sessions, key, drop=True)

    def close(self, deadline: float) -> None:
        """End it; raises where it is still there at *deadline* (monotonic)."""
        with self._lock:
            self._closed = True
            if self._sock is None:
                return
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            poller = select.poll()
            poller.register(self._pidfd, select.POLLIN)
            if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
                msg = f"the guardian (pid {self.pid}) could not be ended in time"
                raise RuntimeFault(msg)
            self._collect()

    def _tell(self, what: str, known: set[_Item], item: _Item, *, drop: bool = False) -> None:
        with self._lock:
            if drop:
                known.discard(item)
            else:
                known.add(item)
            if self._sock is not None:
                self._send(f"{'drop' if drop else 'add'}_{what}", item)

    def _send(self, key: str, item: object) -> None:
        assert self._sock is not None
        try:
            self._sock.send(json.dumps({key: item}).encode(), socket.MSG_DONTWAIT)
        except BlockingIOError:
            # It has not listened for thousands of messages. Its successor is told everything.
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        except OSError:
            pass  # it is dead; the same goes for its successor

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        driver = os.pidfd_open(os.getpid())
        environ = {"PATH": os.environ.get("PATH", ""), "PHALANX_TREE": self._mark.outer}
        try:
            arguments = [str(theirs.fileno()), str(driver), self._mark.needle.decode()]
            popen = subprocess.Popen(
                executable.bare_command("guardian_main", arguments),
                pass_fds=(theirs.fileno(), driver),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=environ,
                cwd="/",
                start_new_session=True,
            )
        except OSError as error:
            ours.close()
            msg = f"the guardian could not be started: {error}"
            raise RuntimeFault(msg) from error
        finally:
            theirs.close()
            os.close(driver)
        popen.returncode = 0  # Popen keeps out of it: the status is collected by pidfd
        self.pid = popen.pid
        self._pidfd = ledger.own(os.pidfd_open(popen.pid))
        self._sock = ledger.own(ours)
        self._started_at = time.monotonic()
        self._watch = self._hub.watch(self._pidfd, select.EPOLLIN, self._on_exit)
        for key in self._sessions:
            self._send("add_session", key)

    def _on_exit(self, _events: int) -> None:
        with self._lock:
            if self._sock is None or self._closed or not tree.is_gone(self._pidfd):
                return
            pid, lived = self.pid, time.monotonic() - self._started_at
            self._collect()
            # Whatever kills it at once must not make us start processes in a loop.
            self._hub.call_at(time.monotonic() + max(0.0, _CALM - lived), lambda: self._again(pid))

    def _again(self, pid: int) -> None:
        with self._lock:
            if self._closed or self._sock is not None:
                return
            self._start()
        self._emit(GuardianReplaced(pid=self.pid, replaced=pid, at=time.monotonic()))

    def _collect(self) -> None:
        assert self._sock is not None
        assert self._watch is not None
        self._watch.cancel()
        with contextlib.suppress(ChildProcessError):  # collected by somebody else: as good
            os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG)
        ledger.close(self._pidfd)
        ledger.close(self._sock)
        self._sock = None
