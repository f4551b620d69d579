"""A descriptor that may stop taking bytes, written without ever waiting for it.

Guarantees: `write` never blocks, whatever the descriptor is (a terminal held by Ctrl-S, a pipe
nobody reads) and without making it non-blocking for the processes that share it; memory is
bounded, and what does not fit is dropped by whole blocks of lines and counted.

Left to others: saying that lines were dropped.
"""

from __future__ import annotations

import collections
import errno
import os
import select
import socket
import stat
import threading
import time
from typing import Final

_LIMIT: Final = 16 << 20  # bytes held for a reader that pauses; arbitrary, a big flood fits


class Sink:
    """One of the driver's output descriptors.

    Attributes:
        dropped: Lines thrown away and not yet told to anybody.
        is_full: Whether the disk had no room at the last attempt.
    """

    def __init__(self, fd: int, *, limit: int = _LIMIT) -> None:
        """Write to what *fd* is open on; *fd* belongs to the sink from now on."""
        self.dropped = 0
        self.is_full = False
        self._limit = limit
        self._blocks: collections.deque[tuple[memoryview, int]] = collections.deque()
        self._held = 0
        self._broken = False
        mode = os.fstat(fd).st_mode
        # A regular file never makes anybody wait, and epoll does not take one.
        self._waits = not stat.S_ISREG(mode)
        self._is_socket = stat.S_ISSOCK(mode)
        # Writes of at most PIPE_BUF are whole or not at all: our lines and what the driver itself
        # prints into the same pipe do not cut each other in two.
        self._step = select.PIPE_BUF if stat.S_ISFIFO(mode) else 1 << 16
        self._pump: threading.Thread | None = None
        self.fd = fd
        if self._waits and not self._is_socket:
            try:
                self.fd = _private(fd)
            except OSError:  # refused for what another user owns, such as a terminal after `su`
                self.fd, self._pump = _pumped(fd)
                self._step = select.PIPE_BUF  # what the pump takes and writes at a time

    @property
    def wants_to_write(self) -> bool:
        """Whether the descriptor must be watched for room."""
        return bool(self._blocks) and self._waits and not self._broken

    @property
    def is_empty(self) -> bool:
        """Whether everything has been written or given up."""
        return not self._blocks

    def write(self, block: bytes, lines: int) -> None:
        """Write *block*, which holds *lines* whole lines, now or when there is room."""
        if self._broken or (self._held + len(block) > self._limit and self._blocks):
            self.dropped += 0 if self._broken else lines
            return
        self._blocks.append((memoryview(block), lines))
        self._held += len(block)
        if len(self._blocks) == 1:
            self.flush()

    def flush(self) -> None:
        """Write what goes without waiting."""
        while self._blocks:
            block, lines = self._blocks[0]
            piece = _whole_lines(block, self._step)
            try:
                written = self._write(piece)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno == errno.EINTR:
                    continue
                # Nobody reads any more, or the disk is full: nothing we could do, and nobody here
                # to tell. Only a disk can get better.
                self.is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
                self._broken = not self.is_full
                self.dropped += 0 if self._broken else sum(lines for _, lines in self._blocks)
                self._blocks.clear()
                self._held = 0
                return
            self.is_full = False
            self._held -= written
            if written == len(block):
                self._blocks.popleft()
            else:
                self._blocks[0] = block[written:], lines

    def flush_until(self, deadline: float) -> None:
        """Write everything, waiting for room until *deadline* (monotonic)."""
        self.flush()
        poll = select.poll()
        if self.wants_to_write:
            poll.register(self.fd, select.POLLOUT)
        while self.wants_to_write and (left := deadline - time.monotonic()) > 0:
            poll.poll(left * 1000)
            self.flush()

    def close(self, deadline: float = 0.0) -> None:
        """Close the descriptor; what is held is lost, at *deadline* what is on its way too."""
        os.close(self.fd)
        if self._pump is not None:
            self._pump.join(max(0.0, deadline - time.monotonic()))

    def _write(self, piece: memoryview) -> int:
        if self._is_socket:
            with socket.socket(fileno=self.fd) as shared:
                try:
                    return shared.send(piece, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
                finally:
                    shared.detach()
        return os.write(self.fd, piece)


def _private(fd: int) -> int:
    """Return a non-blocking descriptor on what *fd* is open on, and close *fd*.

    O_NONBLOCK belongs to the open file, which the driver, its shell and others share; opening it
    anew gives one of our own.
    """
    flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    mine = os.open(f"/proc/self/fd/{fd}", flags)
    os.close(fd)
    return mine


def _pumped(fd: int) -> tuple[int, threading.Thread]:
    """Return a non-blocking pipe, and the thread that waits for *fd* with what comes through it.

    A terminal that is ready may have room for one byte, and a blocking write waits for the rest.
    """
    reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK | os.O_DIRECT)  # keeps writes apart
    os.set_blocking(reader, True)
    pump = threading.Thread(target=_copy, args=(reader, fd), name="phalanx-pump", daemon=True)
    pump.start()
    return writer, pump


def _copy(reader: int, fd: int) -> None:
    try:
        while piece := os.read(reader, select.PIPE_BUF):
            while piece:
                try:
                    piece = piece[os.write(fd, piece) :]
                except BlockingIOError:  # made non-blocking by a process that shares it
                    select.select([], [fd], [])
    except OSError:
        pass  # nothing reads what is written to it; the sink finds its pipe broken
    finally:
        os.close(reader)
        os.close(fd)


def _whole_lines(block: memoryview, step: int) -> memoryview:
    """Return the first of *block*: whole lines of at most *step* bytes together, at least one."""
    if len(block) <= step:
        return block
    end = bytes(block[:step]).rfind(b"\n") + 1
    return block[: end or step]
