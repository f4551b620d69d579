"""The end of a process that was forked with Python's modules loaded.

Python ends by destroying every module and object. In a forked process that copies all memory that
was shared with the process it came from: 0.1 to 0.2 seconds of a processor where torch is loaded.
So this does what a program can rely on, and lets the kernel take the memory, as the children of
``multiprocessing`` do.

- Threads are waited for, ``atexit`` functions run, objects that nothing refers to are finalized,
  and files are flushed, those of C included.
- Objects that modules still refer to are not finalized, and what C code has registered to be run at
  the end is not. A process that was not forked (``Launch(method="exec")``) ends with both.
"""

from __future__ import annotations

import atexit
import gc
import io
import os
import sys
import threading
import weakref
from contextlib import suppress
from typing import Any, Final, NoReturn

from phalanx.runtime.linux import syscalls

_WRITERS = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)
_PATIENCE: Final = 1.0  # seconds, for files that are written
_FROZEN: Final[weakref.WeakSet[Any]] = weakref.WeakSet()


def freeze() -> None:
    """Leave all objects that are there to themselves: the garbage collector does not look at them.

    A collection in a forked process would copy every page that it counts in.
    """
    gc.collect()
    _FROZEN.update(_writers())
    gc.freeze()


def finish() -> None:
    """Do what Python does at its end before it destroys anything."""
    with suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001  # what Python calls
    atexit._run_exitfuncs()  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]  # the same
    gc.collect()
    # A thread of the program's that is blocked may hold the lock of a stream for ever.
    flushing = threading.Thread(target=_flush, daemon=True)
    flushing.start()
    flushing.join(_PATIENCE)


def _flush() -> None:
    standard: list[Any] = [getattr(sys, name, None) for name in ("stdout", "stderr")]
    for stream in (*standard, *_FROZEN, *_writers()):
        with suppress(BaseException):  # it is closed
            stream.flush()
    syscalls.flush_c_streams()


def leave(code: int) -> NoReturn:
    """End this process; a signal that would interrupt it ends it at once."""
    try:
        finish()
    finally:
        os._exit(code)


def _writers() -> list[Any]:
    return [each for each in gc.get_objects() if issubclass(type(each), _WRITERS)]
