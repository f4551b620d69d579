"""What a worker says as it dies, where the driver can still read it.

Guarantees: the traceback of an exception nobody caught, in any thread, and the stacks of all
threads at a fatal signal (SIGSEGV, SIGABRT, SIGBUS, SIGFPE, SIGILL) end up in a memfd that the
driver made and keeps. SIGKILL leaves none: nobody can speak then.

Left to others: stacks of a process that hangs, and what of this is shown.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import os
import sys
import threading
import traceback
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from types import TracebackType

_MAX_WORDS: Final = 1 << 20  # bytes; threads that die of one error after another end there
_MAX_READ: Final = 1 << 18


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
