"""Diagnostics of a worker: crash output in a memfd that outlives it, thread states of /proc.

- The traceback of an uncaught exception, in any thread, and the stacks of all threads at a fatal
  signal (SIGSEGV, SIGABRT, SIGBUS, SIGFPE, SIGILL) are written to a memfd of the driver.
- A worker that receives the signal `STACKS` writes the stacks of all its threads there and dies of
  the signal, all in C, without the interpreter lock or ptrace. One that cannot run a handler
  (uninterruptible sleep, signal blocked) writes nothing.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import os
import signal
import sys
import threading
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from phalanx.runtime.linux import procfs

if TYPE_CHECKING:
    from types import TracebackType


STACKS: Final = signal.SIGRTMAX - 3
"""The signal that requests stacks: a real-time one that is rarely used."""

_STATES: Final = {
    "R": "running",
    "S": "sleeping",
    "D": "in uninterruptible sleep",
    "T": "stopped",
    "t": "traced",
}
_EXITING: Final = 0x00000004  # PF_EXITING in linux/sched.h
_MAX_READ: Final = 1 << 18
_MAX_WRITTEN: Final = 1 << 20  # bytes of tracebacks


@dataclass(frozen=True, slots=True)
class Vitals:
    """State of a process in /proc at one moment.

    Attributes:
        state: The letter of its main thread; empty if it is gone.
        ticks: Processor time of all its threads, in clock ticks.
        ran: Processor time of its main thread, in nanoseconds; 0 where the kernel does not say.
        is_ending: Whether it is exiting: it releases its resources, or other threads are left.
        wait: The kernel function in which its main thread sleeps; empty if unknown.
    """

    state: str = ""
    ticks: int = 0
    wait: str = ""
    is_ending: bool = False
    ran: int = 0

    @classmethod
    def of(cls, pid: int | None) -> Vitals:
        """Return those of *pid*; of a process that is gone if there is none."""
        folder = f"/proc/{pid}"
        try:
            fields = procfs.stat_fields(folder)
            ran = int((procfs.content(f"{folder}/schedstat") or b"0").split()[0])
            wait = _wait_channel(folder)
        except OSError:  # no descriptor is free
            return cls()
        if not fields:
            return cls()
        state = fields[0].decode()
        if state in ("Z", "X", "x"):
            return cls(is_ending=True)
        ending = bool(int(fields[6]) & _EXITING)
        return cls(state, int(fields[11]) + int(fields[12]), wait, ending, ran)


def describe_threads(pid: int) -> str:
    """Return one line with the state of each thread of *pid*."""
    lines: list[str] = []
    with contextlib.suppress(OSError):  # it is gone, or no descriptor is free
        for thread in sorted(procfs.numbers_in(f"/proc/{pid}/task")):
            folder = f"/proc/{pid}/task/{thread}"
            fields = procfs.stat_fields(folder)
            name = (procfs.content(f"{folder}/comm") or b"").decode("utf-8", "replace").strip()
            if fields:
                state, where = fields[0].decode(), _wait_channel(folder)
                line = f"thread {thread} ({name}): {_STATES.get(state, state)}"
                lines.append(f"{line} in {where}" if where else line)
    return "\n".join(lines)


def _wait_channel(folder: str) -> str:
    return (procfs.content(f"{folder}/wchan") or b"").decode().removeprefix("0")


def read_crash_output(fd: int, start: int = 0, end: int | None = None) -> str:
    """Return the text in *fd* from *start* to *end*, of bytes; of a long one what is last."""
    end = os.fstat(fd).st_size if end is None else end
    start = max(start, end - _MAX_READ)
    data = os.pread(fd, max(0, end - start), start)
    return data.decode("utf-8", "backslashreplace")


def install_crash_output(fd: int) -> None:
    """Write crash output to the memfd *fd* from now on. Call once, early in the worker."""
    # The hooks and faulthandler write through one offset; appending keeps both whole.
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_APPEND)
    faulthandler.enable(file=fd, all_threads=True)
    # chain: the previous action of a real-time signal, which is the end of the process.
    faulthandler.register(STACKS, file=fd, all_threads=True, chain=True)
    hook, thread_hook = sys.excepthook, threading.excepthook

    def uncaught(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        _record(fd, error)
        hook(kind, error, trace)

    def uncaught_in_thread(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None and not isinstance(args.exc_value, SystemExit):
            _record(fd, args.exc_value)
        thread_hook(args)

    sys.excepthook = uncaught
    threading.excepthook = uncaught_in_thread


def _record(fd: int, error: BaseException) -> None:
    """Write *error* with its traceback; never raises."""
    try:
        text = "".join(traceback.format_exception(error))
    except Exception as second:  # noqa: BLE001 -- the user's error has a say in how it is shown
        text = f"{type(error).__qualname__}, which cannot be shown: {type(second).__qualname__}\n"
    with contextlib.suppress(OSError):  # closed by the user, or no memory
        if os.fstat(fd).st_size < _MAX_WRITTEN:
            os.write(fd, text.encode("utf-8", "backslashreplace"))
