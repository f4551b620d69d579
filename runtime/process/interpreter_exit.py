"""Exit of a process that was forked with Python's modules loaded.

Python exits by destroying every module and object. In a forked process that copies all memory that
is shared with the parent: 0.1 to 0.2 seconds of processor time if torch is loaded.
So this performs only the documented steps of an exit, and lets the kernel free the memory, as the
children of ``multiprocessing`` do.

- Threads are joined, ``atexit`` functions run, unreferenced objects are finalized.
- Files are flushed, those of C included; archives and temporary files are closed.
- Objects that are still referred to are not finalized, and exit handlers of C code do not
  run. A process that was not forked (``Launch(method="exec")``) ends with both.
"""

from __future__ import annotations

import atexit
import gc
import io
import os
import sys
import threading
import time
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NoReturn

from phalanx.runtime.linux import syscalls

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_ARCHIVES: Final = (  # each may be written into those after it
    *(("tarfile", "TarFile"), ("zipfile", "ZipFile")),
    *(("gzip", "GzipFile"), ("bz2", "BZ2File"), ("lzma", "LZMAFile")),
    ("tempfile", "_TemporaryFileWrapper"),
)
_BUFFERS: Final = (io.BufferedWriter, io.BufferedRandom)
_FILE_TIMEOUT: Final = 0.2  # seconds that one file may take before the next is begun beside it
_LIMIT: Final = 3.0  # seconds for all of them
_FROZEN: Final[weakref.WeakSet[Any]] = weakref.WeakSet()


def freeze() -> None:
    """Leave all objects that are there to themselves: the garbage collector does not look at them.

    A collection in a forked process would copy every page that it counts in. Files are flushed:
    what they hold would be written by every process that is forked.
    """
    gc.collect()
    _FROZEN.update(_find((io.TextIOWrapper, *_BUFFERS)))
    _take(iter([*(each.flush for each in _FROZEN), syscalls.flush_c_streams]))
    gc.freeze()


def finish() -> None:
    """Do what Python does at its end before it destroys anything.

    Files that are not written after three seconds are given up: a thread of the program's that is
    blocked in a read or write may hold one for ever.
    """
    with suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001  # what Python calls
    atexit._run_exitfuncs()  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]  # the same
    gc.collect()
    steps, until = _steps(), time.monotonic() + _LIMIT
    at_work: list[threading.Thread] = []
    while time.monotonic() < until:
        at_work.append(threading.Thread(target=_take, args=(steps,), daemon=True))
        at_work[-1].start()
        at_work[-1].join(_FILE_TIMEOUT)
        if not at_work[-1].is_alive():  # nothing is left that it could begin
            break
    for each in at_work:
        each.join(max(0.0, until - time.monotonic()))


def leave(code: int) -> NoReturn:
    """End this process; a signal that would interrupt it ends it at once."""
    try:
        finish()
    finally:
        os._exit(code)


def _steps() -> Iterator[Callable[[], object]]:
    """Return what writes each file; what may be written into another comes before it.

    Of one kind what is older comes later.
    """
    named = (getattr(sys.modules.get(module), name, None) for module, name in _ARCHIVES)
    archives = tuple(kind for kind in named if isinstance(kind, type))
    order = (io.TextIOWrapper, *archives, *_BUFFERS)
    found = [*reversed(_find(order)), *_FROZEN]
    standard: list[Any] = [getattr(sys, name, None) for name in ("stdout", "stderr")]
    steps = [each.flush for each in standard if each is not None]
    for kind in order:
        same = [each for each in found if _is(each, kind)]
        steps += [each.close if kind in archives else each.flush for each in same]
    return iter([*steps, syscalls.flush_c_streams])


def _take(steps: Iterator[Callable[[], object]]) -> None:
    for step in steps:
        with suppress(BaseException):  # it is closed, or cannot be written
            step()


def _find(kinds: tuple[type, ...]) -> list[Any]:
    return [each for each in gc.get_objects() if _is(each, kinds)]


def _is(value: object, kinds: type | tuple[type, ...]) -> bool:
    return issubclass(type(value), kinds)  # a proxy says that it is what it stands for
