"""A child process: its pidfd, exit status, exit reason, signals, and the kill of its tree.

- The pidfd reports the exit, once, on the event loop's thread. The status is collected there and
  nowhere else; if other code of this process was quicker (``waitpid(-1)``, an ignored SIGCHLD), the
  kernel's copy is read, and if it keeps none the status is unknown.
- Every exit has exactly one reason; ``unknown`` if the status is, never a guess.
- A signal goes to this process or to none, also after its pid was reused.
"""

from __future__ import annotations

import os
import select
import signal as signals
import threading
import time
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from phalanx.runtime.linux import descriptors, process_tree, procfs, syscalls
from phalanx.runtime.observe.crash_report import ExitEvidence
from phalanx.runtime.observe.diagnostics import Vitals, describe_threads
from phalanx.supervision import ExitKind, ExitReason, WouldDeadlock

from . import orphan_reaper

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from phalanx.runtime.threads.event_loop import EventLoop


def exit_of_process(
    status: ExitEvidence, *, asked: bool = False, unresponsive: bool = False, detail: str = ""
) -> ExitReason:
    """Return the reason for a process that ended with *status*.

    Args:
        status: Without code and signal it is unknown.
        asked: Whether a stop had been requested before it ended.
        unresponsive: Whether it was killed because it hung.
        detail: The worker's report on its end, such as its last exception.
    """
    code, signal = status.code, status.signal
    if unresponsive:
        return ExitReason(ExitKind.UNRESPONSIVE, detail or "hung", code, signal)
    if asked:
        return ExitReason(ExitKind.SHUTDOWN, detail, code, signal)
    if signal is None and code is None:
        return ExitReason(ExitKind.UNKNOWN, detail or "its exit status was collected by other code")
    if code == 0:
        return ExitReason(ExitKind.NORMAL, detail, code)
    kind = ExitKind.KILLED if signal == signals.SIGKILL else ExitKind.CRASH
    text = f"exit code {code}"
    if signal is not None:
        text = signals.Signals(signal).name if signal in _KNOWN else f"signal {signal}"
    return ExitReason(kind, f"{text}; {detail}" if detail else text, code, signal)


_KNOWN = frozenset(map(int, signals.Signals))
# What Linux counts of a process, of ``struct rusage``.
_COUNTED = ("ru_maxrss", "ru_utime", "ru_stime", "ru_minflt", "ru_majflt", "ru_nvcsw", "ru_nivcsw")


class Process:
    """A started process. Made by `Launcher` only.

    Attributes:
        pidfd: A descriptor for it, owned and closed by this object.
        start_ticks: When it was started, in clock ticks since boot.
        status: How it ended; None while it lives. Set before `on_exit` is called.
        tree: It and everything that comes from it; None if it has no tag to find that by.
    """

    def __init__(
        self,
        loop: EventLoop,
        pid: int,
        pidfd: int,
        *,
        label: str,
        on_exit: Callable[[Process], None],
        tag: bytes = b"",
        out_of_memory: Callable[[], str] = str,
        on_close: Callable[[Process], None] = lambda _: None,
        collect_later: Callable[[int, int], None] = lambda pidfd, _: os.close(pidfd),
    ) -> None:
        # The process may be gone: SIGCHLD is ignored, or other code waits for any child.
        task = procfs.read(pid) or procfs.Task(pid, os.getpid(), pid, "X", 0)
        key = (task.key,)
        self._loop = loop
        self._owner = os.getpid()
        self.tree = process_tree.TreeTarget(tag, key, key, since=task.ticks) if tag else None
        self._out_of_memory = out_of_memory
        self._on_exit = on_exit
        self._on_close = on_close
        self._collect_later = collect_later
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._closed = False
        self._is_traced = False
        self.pid = pid
        self.pidfd = descriptors.own(pidfd)
        self.label = label
        self.start_ticks = task.ticks
        self.status: ExitEvidence | None = None
        # Under the lock, for which the callback waits: it may be called before `_watch` is there.
        with self._lock:
            self._watch = loop.watch(pidfd, select.EPOLLIN, self._on_readable)

    def __repr__(self) -> str:
        return f"<Process {self.label!r} pid={self.pid} {self.state()}>"

    def send_signal(self, sig: int) -> bool:
        """Send *sig*; return False where it is gone already."""
        with self._lock:
            if self._closed or self._owner != os.getpid():
                return False
            try:
                signals.pidfd_send_signal(self.pidfd, sig)
            except ProcessLookupError:
                return False
            return True

    def wait(self, deadline: float) -> bool:
        """Return True once it has ended and `status` is set, False at *deadline* (monotonic)."""
        if self._loop.is_current() and not self._ended.is_set():
            raise WouldDeadlock("waiting for a process on the thread that learns of its death")
        if self._loop.has_ended and self.status is None and not self._closed:
            process_tree.wait_all([self.pidfd], deadline)
            self._on_readable(0)
            return self.status is not None
        return self._ended.wait(max(0.0, deadline - time.monotonic()))

    def kill_tree(
        self, deadline: float, ended: Iterable[Process] = ()
    ) -> tuple[process_tree.Victim, ...]:
        """Kill the process and everything that came from it, daemons included.

        Works after its own death too: then for what it left behind, and for what those that have
        *ended* too have left. Returns once all of them are gone, or at *deadline* (monotonic) those
        that are still there.
        """
        if self._owner != os.getpid():
            return ()
        left: tuple[process_tree.Victim, ...] = ()
        if self.tree is not None:
            others = [each.tree for each in ended if each.tree is not None]
            left = process_tree.kill(replace(self.tree, others=others), deadline)
        if left or self.tree is None:
            self.send_signal(signals.SIGKILL)  # there may have been no descriptor to find it by
        if self.status is None and not self._closed:
            self.wait(deadline)
        return left

    def is_stopped(self) -> bool:
        """Whether it is stopped (SIGSTOP, Ctrl-Z) and not by a debugger.

        One that has called ``ptrace(PTRACE_TRACEME)`` is stopped by any signal,
        and this process never continues it.
        """
        state = self.state()
        return state == "T" or (state == "t" and procfs.tracer(self.pid) == os.getpid())

    def state(self) -> str:
        """Return the kernel's letter for its state; empty once it is gone, ``?`` if unknown."""
        try:
            task = procfs.read(self.pid)
        except OSError:  # no descriptor is free
            return "?"
        return task.state if task is not None and task.ticks == self.start_ticks else ""

    def vitals(self) -> Vitals:
        """Return its state in /proc."""
        return Vitals.of(self.pid)

    def describe_threads(self) -> str:
        """Return one line with the state of each of its threads."""
        return describe_threads(self.pid)

    @property
    def key(self) -> tuple[int, int]:
        """Its identity on this machine, also after its number was given to another."""
        return self.pid, self.start_ticks

    def close(self) -> None:
        """Close the handle; if the process still runs its exit goes unnoticed."""
        if (pidfd := self.give_up()) >= 0:
            os.close(pidfd)

    def give_up(self) -> int:
        """Close the handle, and return `pidfd`, which the caller then owns; -1 for none."""
        with self._lock:
            if self._closed or self._owner != os.getpid():
                return -1
            self._closed = True
            self._watch.cancel()
            descriptors.disown(self.pidfd)
        self._on_close(self)
        return self.pidfd

    def _on_readable(self, _events: int) -> None:
        with self._lock:
            if self._closed or self.status is not None or not process_tree.is_gone(self.pidfd):
                return
            self.status = self._collect()
            self._watch.cancel()
            if not self._is_traced:
                orphan_reaper.owned.discard(self.pid)
        self._ended.set()
        self._on_exit(self)

    def _collect(self) -> ExitEvidence:
        rusage: dict[str, float] = {}
        status: int | None
        try:
            if os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                # A debugger is to collect it first, and may never do so. Its end is an end.
                self._is_traced = True
                with suppress(OSError):  # no descriptor is free: it stays until this process ends
                    self._collect_later(os.dup(self.pidfd), self.pid)
                raise ChildProcessError  # noqa: TRY301  # as when it has been collected
            # It is there and ours, so the number cannot have been given to another.
            _, status, used = os.wait4(self.pid, os.WNOHANG)
            rusage = {name: getattr(used, name) for name in _COUNTED}
        except ChildProcessError:
            status = syscalls.exit_status_of(self.pidfd)
            if status is None:
                with suppress(OSError):  # no descriptor is free, and this is the only look
                    status = procfs.exit_status(self.pid, self.start_ticks)
            if status is None:
                return ExitEvidence()
        if os.WIFEXITED(status):
            return ExitEvidence(code=os.WEXITSTATUS(status), rusage=rusage)
        number = os.WTERMSIG(status)
        return ExitEvidence(
            signal=number,
            core_dumped=os.WCOREDUMP(status),
            oom=self._out_of_memory() if number == signals.SIGKILL else "",
            rusage=rusage,
        )
