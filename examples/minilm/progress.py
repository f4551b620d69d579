"""A progress bar on stderr: rich's where rich is installed, a plain one where it is not.

Guarantees: stdout stays clean; notes appear above the bar; a stream that is no terminal gets one
line at the end of each part instead of a bar.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Generator
    from typing import TextIO

    from rich.progress import Progress, TaskID


class Bar(Protocol):
    """How far something is."""

    def advance(self, count: int) -> None:
        """Go *count* further."""
        ...

    def note(self, text: str) -> None:
        """Say something without disturbing the bar; from any thread."""
        ...


@contextlib.contextmanager
def progress(label: str, total: int, stream: TextIO | None = None) -> Generator[Bar, None, None]:
    """Show a bar up to *total* on *stream* (stderr) while the block runs."""
    out = sys.stderr if stream is None else stream
    if out.isatty() and find_spec("rich"):
        with _rich_bar(label, total, out) as bar:
            yield bar
        return
    plain = PlainBar(label, total, out)
    try:
        yield plain
    finally:
        plain.end()


@contextlib.contextmanager
def _rich_bar(label: str, total: int, stream: TextIO) -> Generator[Bar, None, None]:
    from rich.console import Console  # noqa: PLC0415  # optional
    from rich.progress import MofNCompleteColumn, Progress  # noqa: PLC0415  # optional

    columns = (*Progress.get_default_columns(), MofNCompleteColumn())
    with Progress(*columns, console=Console(file=stream)) as shown:
        yield _RichBar(shown, shown.add_task(label, total=total))


class _RichBar:
    def __init__(self, shown: Progress, task: TaskID) -> None:
        self._shown = shown
        self._task = task

    def advance(self, count: int) -> None:
        self._shown.advance(self._task, count)

    def note(self, text: str) -> None:
        self._shown.console.print(text, highlight=False)


class PlainBar:
    """A bar of characters, redrawn in place on a terminal."""

    WIDTH = 32

    def __init__(self, label: str, total: int, stream: TextIO) -> None:
        self._label = label
        self._total = total
        self._stream = stream
        self._lock = threading.Lock()
        self._done = 0
        self._began = time.monotonic()

    def advance(self, count: int) -> None:
        """Go *count* further."""
        with self._lock:
            self._done += count
            self._draw()

    def note(self, text: str) -> None:
        """Write *text* on a line of its own."""
        with self._lock:
            wipe = "\r\x1b[K" if self._stream.isatty() else ""
            self._stream.write(f"{wipe}{text}\n")
            self._draw()

    def end(self) -> None:
        """Leave the last state on a line of its own."""
        with self._lock:
            took = time.monotonic() - self._began
            text = f"{self._label}: {self._done} of {self._total} in {took:.1f} s"
            self._stream.write(f"\r\x1b[K{text}\n" if self._stream.isatty() else f"{text}\n")
            self._stream.flush()

    def _draw(self) -> None:
        if not self._stream.isatty():
            return
        filled = self.WIDTH * self._done // max(1, self._total)
        bar = "#" * filled + "." * (self.WIDTH - filled)
        self._stream.write(f"\r\x1b[K{self._label} [{bar}] {self._done}/{self._total}")
        self._stream.flush()
