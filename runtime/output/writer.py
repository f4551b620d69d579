"""Writes lines to a descriptor on a thread of its own.

- `Writer.write` never blocks, whatever the descriptor is (a terminal held by Ctrl-S, a pipe that is
  not read), and the descriptor's flags, which other processes share, stay as they are.
- Memory is bounded: a block that does not fit is dropped whole, and its lines are counted.
"""

from __future__ import annotations

import collections
import errno
import os
import select
import stat
import threading
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

_LIMIT: Final = 16 << 20  # bytes held for a reader that pauses; arbitrary, a big flood fits
_BATCH: Final = 1 << 16  # bytes written at once


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
        self._changed = threading.Condition()
        self._blocks: collections.deque[tuple[bytes, int]] = collections.deque()
        self._held = 0  # bytes, those that are being written included
        self._dropped = 0
        self._is_broken = False
        self._is_closed = False
        # A write to a pipe of at most PIPE_BUF is whole or not at all: our lines and those of other
        # writers to the same pipe do not cut each other in two.
        self._step = select.PIPE_BUF if stat.S_ISFIFO(os.fstat(fd).st_mode) else _BATCH
        self._thread = threading.Thread(target=self._run, name="phalanx-writer", daemon=True)
        self._thread.start()

    def write(self, block: bytes, lines: int) -> None:
        """Have *block* written, which holds *lines* whole lines."""
        with self._changed:
            if self._is_broken:
                return
            if self._held and self._held + len(block) > self._limit:
                self._dropped += lines
                return
            self._blocks.append((block, lines))
            self._held += len(block)
            self._changed.notify()

    def take_dropped(self) -> int:
        """Return how many lines have been dropped since the last time; 0 while any are held."""
        with self._changed:
            if self._held:
                return 0
            dropped, self._dropped = self._dropped, 0
            return dropped

    def close(self, deadline: float) -> None:
        """Write what is held until *deadline* (monotonic); the rest is lost."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self) -> None:
        while batch := self._next_batch():
            data = b"".join(block for block, _ in batch)
            try:
                self._write_all(data)
                self.is_full = False
            except OSError as error:
                self._fail(error, sum(lines for _, lines in batch))
            with self._changed:
                self._held -= len(data)
                is_idle = not self._held
            if is_idle:
                self._on_idle()
        os.close(self._fd)

    def _next_batch(self) -> list[tuple[bytes, int]]:
        """Wait for blocks; return none at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._blocks or self._is_closed)
            batch: list[tuple[bytes, int]] = []
            size = 0
            while self._blocks and size < _BATCH:
                batch.append(self._blocks.popleft())
                size += len(batch[-1][0])
            return batch

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

    def _fail(self, error: OSError, lines: int) -> None:
        with self._changed:
            # Only a full disk can get better.
            self.is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            if self.is_full:
                self._dropped += lines
            else:
                self._is_broken = True
                self._held -= sum(len(block) for block, _ in self._blocks)
                self._blocks.clear()
