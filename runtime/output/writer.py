"""Writes lines to a descriptor on a thread of its own.

- `Writer.write` never blocks, whatever the descriptor is (a terminal held by Ctrl-S, a pipe that is
  not read), and the descriptor's flags, which other processes share, stay as they are.
- Memory is bounded: a block that does not fit is dropped whole, and its lines are counted.
"""

from __future__ import annotations

import errno
import os
import queue
import select
import stat
import threading
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

_LIMIT: Final = 16 << 20  # bytes held for a reader that pauses; arbitrary, a big flood fits
_STEP: Final = 1 << 16  # bytes written at once


class Writer:
    """One output descriptor of the driver.

    Args:
        fd: Written and, at the end, closed.
        limit: Bytes that are held.
        on_idle: Called on the thread whenever nothing is held.

    Attributes:
        is_full: Whether the disk had no room at the last attempt.
    """

    def __init__(
        self, fd: int, *, limit: int = _LIMIT, on_idle: Callable[[], object] = bool
    ) -> None:
        self.is_full = False
        self._fd = fd
        self._limit = limit
        self._on_idle = on_idle
        self._lock = threading.Lock()
        self._blocks: queue.SimpleQueue[tuple[bytes, int] | None] = queue.SimpleQueue()
        self._held = 0  # bytes, those that are being written included
        self._dropped = 0
        self._is_broken = False
        # A write to a pipe of at most PIPE_BUF is whole or not at all: our lines and those of other
        # writers to the same pipe do not cut each other in two.
        self._step = select.PIPE_BUF if stat.S_ISFIFO(os.fstat(fd).st_mode) else _STEP
        self._thread = threading.Thread(target=self._run, name="phalanx-writer", daemon=True)
        self._thread.start()

    def write(self, block: bytes, lines: int) -> None:
        """Have *block* written, which holds *lines* whole lines."""
        with self._lock:
            if self._is_broken:
                return
            if self._held and self._held + len(block) > self._limit:
                self._dropped += lines
                return
            self._blocks.put((block, lines))
            self._held += len(block)

    def take_dropped(self) -> int:
        """Return how many lines have been dropped since the last time; 0 while any are held."""
        with self._lock:
            if self._held:
                return 0
            dropped, self._dropped = self._dropped, 0
            return dropped

    def close(self, deadline: float) -> None:
        """Write what is held until *deadline* (monotonic); the rest is lost."""
        self._blocks.put(None)
        self._thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self) -> None:
        while (held := self._blocks.get()) is not None:
            block, lines = held
            try:
                if not self._is_broken:
                    self._write_all(block)
                    self.is_full = False
            except OSError as error:
                # Only a full disk can get better.
                self.is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
                self._is_broken = not self.is_full
                with self._lock:
                    self._dropped += lines if self.is_full else 0
            with self._lock:
                self._held -= len(block)
                is_idle = not self._held
            if is_idle:
                self._on_idle()
        os.close(self._fd)

    def _write_all(self, data: bytes) -> None:
        at = 0
        while at < len(data):
            end = len(data)
            if end - at > self._step:  # whole lines, or a piece of one that is longer than a step
                end = data.rfind(b"\n", at, at + self._step) + 1 or at + self._step
            try:
                at += os.write(self._fd, memoryview(data)[at:end])
            except BlockingIOError:  # another process that shares it has set O_NONBLOCK
                select.select([], [self._fd], [])
