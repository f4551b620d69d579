"""The command line's pages, and its output: encodings, broken pipes, redirection, Ctrl-C."""

from __future__ import annotations

import _thread
import argparse
import inspect
import os
import signal
import sys
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import threading
    from collections.abc import Generator
    from types import FrameType

ESCAPED: Final = "backslashreplace"
"""Error handler for text that an encoding lacks: an exception would hide all the rest."""


def rank_number(text: str) -> int:
    """Return the number of a rank, from the command line."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a rank number: ranks begin at 0")
    return int(text)


def add_page(subparsers: Any, name: str, documented: object) -> argparse.ArgumentParser:
    """Add the parser *name* to *subparsers*; the page of its ``--help`` is a docstring.

    The first line is its summary; what begins with the exit codes follows the arguments.
    """
    page = inspect.getdoc(documented) or ""
    purpose, codes, rest = page.partition("Exit codes:")
    parser: argparse.ArgumentParser = subparsers.add_parser(
        name,
        help=page.partition("\n")[0],
        description=purpose,
        epilog=codes + rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return parser


@contextmanager
def whatever_the_encoding() -> Generator[None]:
    """Have what stdout and stderr cannot encode escaped; both may be closed."""
    if sys.stdout is None:
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115  # stays open, as Python's own does
    if sys.stderr is None:  # a subcommand duplicates its descriptor
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115
    with ExitStack() as before:
        streams: tuple[Any, ...] = (sys.stdout, sys.stderr)
        for stream in streams:
            if hasattr(stream, "reconfigure"):  # not if a program has replaced it
                before.callback(_set_errors, stream, stream.errors)
                _set_errors(stream, ESCAPED)
        yield


def _set_errors(stream: Any, errors: str | None) -> None:
    # It flushes first. Python itself reports what cannot be written when it ends.
    with suppress(OSError, ValueError):
        stream.reconfigure(errors=errors)


@contextmanager
def reader_may_leave() -> Generator[None]:
    """End the block, without an error, when the reader of stdout closes it (``| head``)."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        # Python would complain again as it closes its stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def ctrl_c(stop: threading.Event) -> Generator[None]:
    """Have SIGINT set *stop*; a second one raises KeyboardInterrupt."""
    asked = False

    def on_sigint(_number: int, _frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        # On another thread: what this interrupts may hold the lock of the event, in a wait for it.
        _thread.start_new_thread(stop.set, ())

    before = signal.signal(signal.SIGINT, on_sigint)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def output_to(path: Path) -> Generator[None]:
    """Have descriptors 1 and 2, and so what this process and its workers print, go to *path*."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [os.dup(1), os.dup(2)]
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, fd in zip((1, 2), kept, strict=True):
            os.dup2(fd, number)
            os.close(fd)
