"""Crash output and stacks of a worker, written to memory that outlives it.

What a worker says as it dies, where the driver can still read it.

Guarantees: the traceback of an exception nobody caught, in any thread, and the stacks of all
threads at a fatal signal (SIGSEGV, SIGABRT, SIGBUS, SIGFPE, SIGILL) end up in a memfd that the
driver made and keeps. SIGKILL leaves none: nobody can speak then.

Left to others: stacks of a process that hangs, and what of this is shown.

What a process that hangs can still tell: the stacks of its threads, and what the kernel sees.

Guarantees: a worker that is sent `STACKS` writes the stacks of all its threads into its memfd and
dies of the signal, all in C: it needs no interpreter lock, no ptrace and no helper. Nobody waits
for it: the end of the process says that the stacks are there. One that cannot run a handler
(uninterruptible sleep, the signal blocked) says nothing; what the kernel knows of its threads is
read beforehand and always there.

Left to others: when a process is examined, and ending those that withstand the signal.

How: ``faulthandler.register`` with ``chain=True`` runs the action that was there before, which for
a real-time signal is the end of the process.
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
from pathlib import Path
from typing import TYPE_CHECKING, Final

from phalanx.runtime.linux import process_tree

if TYPE_CHECKING:
    from types import TracebackType


STACKS: Final = signal.SIGRTMAX - 3
"""The signal. Real-time ones have no meaning of their own; the last ones are the least used."""

_STATES: Final = {
    "R": "running",
    "S": "sleeping",
    "D": "in uninterruptible sleep",
    "T": "stopped",
    "t": "traced",
}
_EXITING: Final = 0x00000004  # PF_EXITING in linux/sched.h
_MAX_READ: Final = 1 << 18


@dataclass(frozen=True, slots=True)
class Vitals:
    """What the kernel says about a process at one moment.

    Attributes:
        state: The letter of its main thread; empty where it is gone.
        ticks: Processor time that all its threads have used, in clock ticks.
        is_ending: Whether it is on its way out: it gives back what it holds, or some of its
            threads are left.
        wait: The kernel function that its main thread sleeps in; empty where it does not say.
    """

    state: str = ""
    ticks: int = 0
    wait: str = ""
    is_ending: bool = False

    @classmethod
    def of(cls, pid: int | None) -> Vitals:
        """Return those of *pid*; of a process that is gone where there is none."""
        try:
            stat = Path(f"/proc/{pid}/stat").read_bytes()
        except OSError:
            return cls()
        fields = stat[stat.rindex(b")") + 2 :].split()
        state = fields[0].decode()
        if state in ("Z", "X", "x"):
            return cls(is_ending=True)
        ending = bool(int(fields[6]) & _EXITING)
        ticks = int(fields[11]) + int(fields[12])
        return cls(state, ticks, _wait_channel(f"/proc/{pid}"), ending)


def install_stacks(faults_fd: int) -> None:
    """Have this process write its stacks into *faults_fd* and end when it is sent `STACKS`."""
    faulthandler.register(STACKS, file=faults_fd, all_threads=True, chain=True)


def describe_threads(pid: int) -> str:
    """Return one line for each thread of *pid*, as the kernel sees it."""
    lines: list[str] = []
    try:
        threads = sorted(process_tree.numbers_in(f"/proc/{pid}/task"))
    except OSError:
        return ""
    for thread in threads:
        folder = f"/proc/{pid}/task/{thread}"
        try:
            stat = Path(f"{folder}/stat").read_bytes()
        except OSError:
            continue
        name = stat[stat.index(b"(") + 1 : stat.rindex(b")")].decode("utf-8", "replace")
        state = stat[stat.rindex(b")") + 2 :].split()[0].decode()
        where = _wait_channel(folder)
        told = _STATES.get(state, state)
        lines.append(f"thread {thread} ({name}): {told}{f' in {where}' if where else ''}")
    return "\n".join(lines)


def size_of(faults_fd: int) -> int:
    """Return where the next words will begin."""
    return os.fstat(faults_fd).st_size


def read_stacks(faults_fd: int, start: int) -> str:
    """Return what was written into *faults_fd* from *start* on."""
    return os.pread(faults_fd, _MAX_READ, start).decode("utf-8", "backslashreplace")


def _wait_channel(folder: str) -> str:
    try:
        where = Path(f"{folder}/wchan").read_text()
    except OSError:
        return ""
    return "" if where == "0" else where


_MAX_WORDS: Final = 1 << 20  # bytes; threads that die of one error after another end there


class LastWords:
    """The worker's side: writes into the memfd from now on. See `install_last_words`."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        # The hooks and faulthandler write through one offset; appending keeps both whole.
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_APPEND)
        self._hook = sys.excepthook
        self._thread_hook = threading.excepthook

    def record(self, error: BaseException) -> None:
        """Note *error* with its traceback; never raises."""
        try:
            text = "".join(traceback.format_exception(error))
        except Exception as second:  # noqa: BLE001 -- the user's error has a say in how it is shown
            text = (
                f"{type(error).__qualname__}, which cannot be shown: {type(second).__qualname__}\n"
            )
        with contextlib.suppress(OSError):  # closed by the user, or no memory
            if os.fstat(self._fd).st_size < _MAX_WORDS:
                os.write(self._fd, text.encode("utf-8", "backslashreplace"))

    def install(self) -> None:
        """Take over the hooks for what nobody catches, and call those that were there."""
        faulthandler.enable(file=self._fd, all_threads=True)
        sys.excepthook = self._uncaught
        threading.excepthook = self._uncaught_in_thread

    def _uncaught(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        self.record(error)
        self._hook(kind, error, trace)

    def _uncaught_in_thread(self, args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None and not isinstance(args.exc_value, SystemExit):
            self.record(args.exc_value)
        self._thread_hook(args)


def install_last_words(faults_fd: int) -> LastWords:
    """Have this process say its last words into *faults_fd*. Call once, early in the worker."""
    words = LastWords(faults_fd)
    words.install()
    return words


def create_last_words() -> int:
    """Return a memfd for the last words of one incarnation; the caller owns it."""
    return os.memfd_create("phalanx-last-words", os.MFD_CLOEXEC)


def read_last_words(fd: int) -> str:
    """Return what was said into *fd*, its end where it is long; empty where nothing was."""
    size = os.fstat(fd).st_size
    data = os.pread(fd, _MAX_READ, max(0, size - _MAX_READ))
    return data.decode("utf-8", "backslashreplace")
