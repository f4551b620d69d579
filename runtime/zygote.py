"""The driver's end of one zygote.

Guarantees: what the zygote says comes as values, on the hub's thread, in order, all of it before
word of its death; every descriptor that came with a message is owned by whoever got the message.

Left to others: what to do about it (`launcher`), and the other end (`zygote_main`).
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from phalanx.supervision import RuntimeFault

from . import executable, kernel, ledger, tree
from .marks import VARIABLE
from .passing import receive_with_fds
from .zygote_main import REQUEST

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .hub import Hub
    from .marks import TreeMark

# A module of the preload that asks torch whether there is a GPU must not start CUDA by that, for
# nothing could be forked from then on. A worker's environment is its own, without this.
_ASK_NVML = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
_LARGEST = 1 << 17
_START = 5.0  # seconds for the death of one that could not be watched


@dataclass(frozen=True, slots=True)
class ZygoteSaid:
    """One message.

    Attributes:
        kind: ``ready`` (the preload is imported), ``import_failed``, ``born`` (a worker exists,
            its pidfd came along), ``parted`` (workers are the driver's children now),
            ``refused`` (the kernel would not fork), ``unfit`` (forking would not be safe).
        ids: The numbers of the requests it is about.
        pidfd: The worker's, or -1.
        text: The problem, or the traceback.
    """

    kind: Literal["ready", "import_failed", "born", "parted", "refused", "unfit"]
    ids: tuple[int, ...] = ()
    pid: int = 0
    pidfd: int = -1
    module: str = ""
    text: str = ""


class Zygote:
    """One zygote process, from its start to its end."""

    def __init__(
        self,
        hub: Hub,
        mark: TreeMark,
        preload: Sequence[str],
        *,
        on_message: Callable[[Zygote, ZygoteSaid], None],
        on_exit: Callable[[Zygote, str], None],
    ) -> None:
        self._on_message = on_message
        self._on_exit = on_exit
        self._gone = False  # or somebody is about to collect it
        self._lock = threading.Lock()
        self.is_ready = False
        with contextlib.ExitStack() as failed:
            try:
                ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                failed.callback(ours.close)
                with theirs, os.fdopen(os.pidfd_open(os.getpid()), "rb") as driver:
                    fds = (theirs.fileno(), driver.fileno())
                    arguments = [*map(str, fds), mark.needle.decode(), json.dumps(preload)]
                    self.pid, self._pidfd = executable.start(
                        "the zygote",
                        executable.command("zygote_main", arguments, tuple(sys.path)),
                        pass_fds=fds,
                        stdin=subprocess.DEVNULL,
                        stdout=None if _is_open(1) else subprocess.DEVNULL,
                        stderr=None if _is_open(2) else subprocess.DEVNULL,
                        env={**_ASK_NVML, **os.environ, VARIABLE: mark.of(0, "zygote").value},
                        start_new_session=True,
                    )
            except OSError as error:
                msg = f"the zygote could not be started: {error}"
                raise RuntimeFault(msg) from error
            self._sock = ledger.own(ours)
            failed.pop_all()
        ours.setblocking(False)
        self.started_at = time.monotonic()
        # Under the lock, for which the callbacks wait: they may be called before there are names
        # for the watches.
        with self._lock:
            try:
                self._sock_watch = hub.watch(ours.fileno(), select.EPOLLIN, self._on_readable)
                self._exit_watch = hub.watch(self._pidfd, select.EPOLLIN, self._on_death)
            except BaseException:
                self._gone = True
                self._end(time.monotonic() + _START)
                raise

    def request(self, number: int, fds: Sequence[int], deadline: float) -> None:
        """Ask for a worker; its answers bear *number*. Raises OSError where the zygote is gone."""
        packet = REQUEST.pack(number)
        while True:
            try:
                socket.send_fds(self._sock, [packet], list(fds))
            except BlockingIOError:
                poller = select.poll()
                poller.register(self._sock, select.POLLOUT)
                if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
                    raise TimeoutError from None
            else:
                return

    def is_stopped(self) -> bool:
        """Whether it is stopped (SIGSTOP) and not by a debugger: it would take no order."""
        task = None if self._gone else tree.read(self.pid)
        return task is not None and task.state == "T"

    def kill(self) -> None:
        """Kill it; its death is told as any other."""
        with self._lock, contextlib.suppress(ProcessLookupError):
            if not self._gone:
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def close(self, deadline: float) -> None:
        """Kill it and let go, without a word to anybody; raises where it withstands."""
        self._exit_watch.cancel()
        self._sock_watch.cancel()
        if self._take():
            self._end(deadline)

    def _take(self) -> bool:
        """Return True once: for who is to collect it."""
        with self._lock:
            gone, self._gone = self._gone, True
            return not gone

    def _end(self, deadline: float) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        poller = select.poll()
        poller.register(self._pidfd, select.POLLIN)
        if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
            self._gone = False  # it can be closed again
            msg = f"the zygote (pid {self.pid}) could not be ended in time"
            raise RuntimeFault(msg)
        self._collect()

    def _is_gone(self) -> bool:
        with self._lock:
            return self._gone

    def _on_readable(self, _events: int) -> None:
        while not self._is_gone():
            try:
                said = self._receive()
            except BlockingIOError:
                return
            except OSError:
                said = None
            if said is None:
                self._sock_watch.cancel()  # the end of it; its death comes by the pidfd
                return
            self._on_message(self, said)

    def _receive(self) -> ZygoteSaid | None:
        data, fds = receive_with_fds(self._sock, _LARGEST, 1)
        if not data:
            return None
        message: dict[str, Any] = json.loads(data)
        text = message.get("problem") or message.get("traceback") or message.get("unfit") or ""
        if message["kind"] == "ready":
            self.is_ready = True
        return ZygoteSaid(
            kind=message["kind"],
            ids=tuple(message.get("ids", ())),
            pid=message.get("pid", 0),
            pidfd=fds[0] if fds else -1,
            module=message.get("module", ""),
            text=text,
        )

    def _on_death(self, _events: int) -> None:
        if self._is_gone() or not tree.is_gone(self._pidfd):
            return
        self._on_readable(0)  # what it said before it died
        self._exit_watch.cancel()
        self._sock_watch.cancel()
        if self._take():
            self._on_exit(self, self._collect())

    def _collect(self) -> str:
        """Reap it, close everything, and return how it ended, for people."""
        status = None
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            _, status = os.waitpid(self.pid, os.WNOHANG)
        if status is None:
            status = kernel.exit_status_of(self._pidfd)
        ledger.close(self._pidfd)
        ledger.close(self._sock)
        if status is None:
            return "its exit status was collected by somebody else"
        if os.WIFSIGNALED(status):
            return f"signal {os.WTERMSIG(status)}"
        return f"exit code {os.WEXITSTATUS(status)}"


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True
