"""The end of a process that was forked with Python's modules loaded.

Python ends by destroying every module and object. In a forked process that copies all memory that
was shared with the process it came from: 0.1 to 0.2 seconds of a processor where torch is loaded.
So this does what a program can rely on, and lets the kernel take the memory, as the children of
``multiprocessing`` do.

- Threads are waited for, ``atexit`` functions run, and files are flushed, those of C included.
- Modules that were imported since the fork are emptied, so that what they refer to is finalized.
- What was imported before it is not, nor is what C code has registered to be run at the end. A
  process that was not forked (``Launch(method="exec")``) ends with both.
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
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, NoReturn

from phalanx.runtime.linux import syscalls

if TYPE_CHECKING:
    from collections.abc import Iterator

_WRITERS = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)
_PATIENCE: Final = 0.5  # seconds that one stream may take before the others go past it
_BLOCKED: Final = 10  # streams, at most
_FROZEN: Final[weakref.WeakSet[Any]] = weakref.WeakSet()
_PRELOADED: Final[dict[str, object]] = {}


def freeze() -> None:
    """Leave all objects that are there to themselves: the garbage collector does not look at them.

    A collection in a forked process would copy every page that it counts in.
    """
    gc.collect()
    _FROZEN.update(_writers())
    _PRELOADED.update(sys.modules)
    gc.freeze()


def finish() -> None:
    """Do what Python does at its end before it destroys anything."""
    with suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001  # what Python calls
    atexit._run_exitfuncs()  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]  # the same
    _flush()


def leave(code: int) -> NoReturn:
    """End this process; a signal that would interrupt it ends it at once."""
    try:
        finish()
        _empty_modules()
        _flush()
    finally:
        os._exit(code)


def _empty_modules() -> None:
    """Finalize what the modules that were imported since `freeze` refer to, as Python does."""
    threading.excepthook = lambda _: None  # a thread that goes on finds its modules gone
    modules = _take_modules()
    gc.collect()
    for reference in reversed(modules):
        if module := reference():  # something else refers to it too
            scope = vars(module)
            scope.update(dict.fromkeys(scope.keys() - {"__builtins__"}))
    gc.collect()


def _take_modules() -> list[weakref.ref[ModuleType]]:
    taken: list[weakref.ref[ModuleType]] = []
    loaded: dict[str, Any] = dict(sys.modules)  # which may hold anything
    for name, module in loaded.items():
        is_own = name.partition(".")[0] == "phalanx"  # this one and its callers among them
        if isinstance(module, ModuleType) and _PRELOADED.get(name) is not module and not is_own:
            taken.append(weakref.ref(module))
            del sys.modules[name]
    return taken


def _flush() -> None:
    """Write what all streams hold.

    One whose lock is held, by a thread that is blocked in a read or write, is left behind.
    """
    standard = (getattr(sys, name, None) for name in ("stdout", "stderr"))
    of_c = SimpleNamespace(flush=syscalls.flush_c_streams)
    streams = iter([*standard, *_FROZEN, *_writers(), of_c])
    for _ in range(_BLOCKED):
        thread = threading.Thread(target=_flush_all, args=(streams,), daemon=True)
        thread.start()
        thread.join(_PATIENCE)
        if not thread.is_alive():
            break


def _flush_all(streams: Iterator[Any]) -> None:
    for stream in streams:
        with suppress(BaseException):  # it is closed, or there is none
            stream.flush()


def _writers() -> list[Any]:
    return [each for each in gc.get_objects() if issubclass(type(each), _WRITERS)]
