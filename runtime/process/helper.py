"""A helper process: spawn, control socket, exit watch, restart, replay, close.

- The control socket is a SEQPACKET pair. Messages of the process are delivered on the event
  loop's thread, in order, all of them before its exit.
- A process that exits is restarted if `on_exit` says so: at most once a second, with a longer delay
  while the start fails. The successor gets the messages of `replay` before any other.
- `close` ends the process by its deadline; a second call ends the rest.
- In a forked child of its owner there is no process, and the owner's is not touched.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from phalanx.runtime.event import Event, LoggedEvent, discard_event
from phalanx.runtime.linux import descriptors
from phalanx.runtime.linux.descriptors import receive_with_fds, send_with_fds
from phalanx.runtime.observe.crash_report import ExitEvidence
from phalanx.supervision import ExitKind, ExitReason, RuntimeFault

from .child_process import Process, exit_of_process

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from phalanx.runtime.threads.event_loop import EventLoop, Watch

    Message: TypeAlias = tuple[bytes, Sequence[int]]
    Spawn: TypeAlias = Callable[[socket.socket, Callable[[Process], None]], Process]

_LARGEST = 1 << 17  # bytes of a message
_CALM = 1.0  # seconds from one start to the next, so that a crash loop starts few processes
_LONGEST = 30.0  # seconds between attempts while the start fails
_SEND_TIMEOUT = 5.0  # seconds for a process to read when its socket is full
_KILL = 5.0  # seconds for the death of what was killed


class HelperReplaced(Event, event="helper_replaced", level="warning"):
    """A helper process ended and another has taken its place.

    Attributes:
        helper: ``guardian``, ``zygote`` or ``output collector``.
        replaced: The process that ended.
    """

    helper: str
    pid: int
    replaced: int
    reason: str


class HelperUnavailable(Event, event="helper_unavailable", level="error"):
    """A helper process cannot be started.

    Attributes:
        wait: Seconds until the next attempt.
    """

    helper: str
    problem: str
    wait: float


class Helper:
    """One helper process after another. Thread-safe.

    Args:
        name: In events and errors.
        spawn: Starts the process with the child's end of the control socket, and has the callback
            called on the event loop's thread once it has ended. May block.
        on_message: Called on the event loop's thread with each message and its descriptors.
        on_exit: Called with the pid and the reason when the process has ended unasked, or with None
            and the error if `start_soon` fails; returns whether to start another.
        replay: Returns what a new process is sent first. Called with `lock` held.

    Attributes:
        lock: Held while messages are sent. Hold it to change what `replay` returns if the
            descriptors in it are closed afterwards.
    """

    def __init__(
        self,
        loop: EventLoop,
        name: str,
        spawn: Spawn,
        *,
        on_message: Callable[[bytes, list[int]], None] | None = None,
        on_exit: Callable[[int | None, ExitReason], bool] = lambda _pid, _reason: True,
        replay: Callable[[], Iterable[Message]] = tuple,
        emit: Callable[[LoggedEvent], None] = discard_event,
    ) -> None:
        self.name = name
        self.lock = threading.RLock()
        self.closed = False
        self._owner = os.getpid()
        self._loop = loop
        self._spawn = spawn
        self._on_message = on_message
        self._on_exit = on_exit
        self._replay = replay
        self._emit = emit
        self._starting = threading.Lock()  # one start at a time
        self._process: Process | None = None
        self._socket: socket.socket | None = None
        self._watch: Watch | None = None
        self._started_at = 0.0
        self._killed_for = ""
        self._left: list[Process] = []  # ended, but not gone by the deadline

    @property
    def is_inherited(self) -> bool:
        """Whether this is a forked child of the owner."""
        return self._owner != os.getpid()

    @property
    def pid(self) -> int | None:
        """The process; None while there is none."""
        process = self._process
        return None if process is None else process.pid

    @property
    def is_stopped(self) -> bool:
        """Whether the process is stopped (SIGSTOP)."""
        process = self._process
        return process is not None and process.is_stopped()

    @property
    def is_ending(self) -> bool:
        """Whether the process has closed its end, though `on_exit` has not been called yet."""
        with self.lock:
            if self._socket is None:
                return False
            poller = select.poll()
            poller.register(self._socket, 0)  # POLLHUP comes in any case
            return bool(poller.poll(0))

    def start(self) -> None:
        """Start the process unless it runs; return once it exists.

        Raises:
            RuntimeFault: it could not be started, or this helper is closed.
        """
        with self._starting:
            if self.closed or self.is_inherited:
                raise RuntimeFault(f"the {self.name} is closed")
            if self._process is None:
                self._start()

    def start_soon(
        self, delay: float = 0.0, *, retry: float = _CALM, replaced: int = 0, reason: str = ""
    ) -> None:
        """Start it on a thread of its own, after *delay* seconds.

        Args:
            retry: Seconds until the next attempt if the start fails; doubled with each.
            replaced: The process that it replaces; 0 for none.
            reason: Why that ended.
        """

        def again() -> None:
            longer = min(2 * retry, _LONGEST)
            self.start_soon(retry, retry=longer, replaced=replaced, reason=reason)

        def start() -> None:
            now = time.monotonic()
            try:
                self.start()
            except Exception as error:  # noqa: BLE001  # reported: there is no caller to raise to
                text = str(error)
                if not self.closed and self._on_exit(None, ExitReason(ExitKind.CRASH, text)):
                    failed = HelperUnavailable(helper=self.name, problem=text, wait=retry, at=now)
                    self._emit(failed)
                    again()
                return
            if replaced:
                new = HelperReplaced(
                    helper=self.name, pid=self.pid or 0, replaced=replaced, reason=reason, at=now
                )
                self._emit(new)

        def begin() -> None:
            # Not on the event loop's thread: a start may wait for that thread.
            thread = threading.Thread(target=start, name=f"phalanx-{self.name}-start", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the limit of threads is reached
                again()
                raise

        with contextlib.suppress(RuntimeFault):  # the event loop is closed
            self._loop.call_at(time.monotonic() + delay, begin)

    def send(self, data: bytes, fds: Sequence[int] = ()) -> bool:
        """Send a message; False if there is no process to read it.

        A process that reads nothing for some seconds while its socket is full is killed.

        Raises:
            OSError: the kernel refuses the message; one of *fds* is not open.
        """
        with self.lock:
            return self._socket is not None and self._send(self._socket, data, fds)

    def kill(self, reason: str = "") -> None:
        """Kill the process; its exit is reported with *reason*."""
        with self.lock:
            if self._process is not None:
                self._killed_for = reason
                self._process.send_signal(signal.SIGKILL)

    def end(self, deadline: float, *, ask: bool = False) -> None:
        """End the process; `start` may follow.

        Args:
            ask: Whether it may end by itself, at the end of file of its socket, until then.

        Raises:
            RuntimeFault: it was still there some seconds after it was killed at *deadline*.
        """
        with self.lock:
            if self._process is not None:
                self._left.append(self._process)
                if not ask:
                    # Before its socket is closed: a guardian or zygote takes end of file for the
                    # death of the driver, and kills the tree.
                    self._process.send_signal(signal.SIGKILL)
                self._forget()
            left, self._left = self._left, []
        for process in left:
            if process.is_stopped() or not (ask and process.wait(deadline)):
                process.send_signal(signal.SIGKILL)
            if process.wait(max(deadline, time.monotonic() + _KILL if ask else 0.0)):
                process.close()
            else:
                self._left.append(process)
        if self._left:
            pids = ", ".join(str(process.pid) for process in self._left)
            raise RuntimeFault(f"the {self.name} (pid {pids}) could not be ended in time")

    def close(self, deadline: float, *, ask: bool = False) -> None:
        """End the process for good; see `end`."""
        if self.is_inherited:
            return
        self.closed = True
        # A start under way ends its process if it is not waited for here.
        is_mine = self._starting.acquire(timeout=max(0.0, deadline - time.monotonic()))
        try:
            self.end(deadline, ask=ask)
        finally:
            if is_mine:
                self._starting.release()

    # --- starting -----------------------------------------------------------------------------

    def _start(self) -> None:
        with contextlib.ExitStack() as failed:
            try:
                ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                descriptors.own(ours, failed)
                with theirs:
                    process = self._spawn(theirs, self._exited)
            except OSError as error:
                raise RuntimeFault(f"the {self.name} could not be started: {error}") from error
            failed.pop_all()
        try:
            with self.lock:
                self._process, self._socket = process, ours
                self._started_at = time.monotonic()
                for data, fds in self._replay():
                    self._send(ours, data, fds)
                if self._on_message is not None:
                    self._watch = self._loop.watch(ours.fileno(), select.EPOLLIN, self._readable)
            if process.status is not None:  # `_exited` came before there was a process
                self._loop.post(partial(self._exited, process))
        except BaseException:
            self.end(time.monotonic() + _KILL)
            raise
        if self.closed:
            self.end(time.monotonic() + _KILL)

    # --- on the event loop's thread ----------------------------------------------------------

    def _exited(self, process: Process) -> None:
        if process is not self._process:
            return  # not there yet, or ended by `end`
        self._readable(0)  # what it has said before it ended
        with self.lock:
            if process is not self._process:
                return
            lived = time.monotonic() - self._started_at
            detail, self._killed_for = self._killed_for, ""
            self._forget()
        process.close()
        reason = exit_of_process(process.status or ExitEvidence(), detail=detail)
        if self._on_exit(process.pid, reason) and not self.closed:
            delay = max(0.0, _CALM - lived)
            self.start_soon(delay, replaced=process.pid, reason=str(reason))

    def _readable(self, _events: int) -> None:
        while (message := self._receive()) is not None and self._on_message is not None:
            self._on_message(*message)

    def _receive(self) -> tuple[bytes, list[int]] | None:
        with self.lock:
            if self._socket is None:
                return None
            try:
                data, fds = receive_with_fds(self._socket, _LARGEST, 1, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return None
            except OSError:
                data, fds = b"", []
            if not data and self._watch is not None:
                self._watch.cancel()  # its exit comes by the pidfd
            return (data, fds) if data else None

    # --- with the lock held --------------------------------------------------------------------

    def _forget(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        if self._socket is not None:
            descriptors.close(self._socket)
            self._socket = None
        self._process = None

    def _send(self, link: socket.socket, data: bytes, fds: Sequence[int]) -> bool:
        deadline = time.monotonic() + _SEND_TIMEOUT
        poller = select.poll()
        poller.register(link, select.POLLOUT)
        flags = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
        while True:
            try:
                send_with_fds(link, data, fds, flags)
            except BlockingIOError:
                if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
                    self.kill("it read no message")
                    return False
            except (BrokenPipeError, ConnectionResetError):
                return False  # it has ended, and its exit is on the way
            else:
                return True
