"""Reader of the stdout, stderr and log socket of one worker, line by line.

- Nothing blocks. One read takes a bounded amount, so that a noisy worker does not starve others;
  `WorkerReader.drain` takes all that was there when it was called, however fast more is written.
- Every byte comes out exactly once, in order; a line is never held back once it is complete, and
  one past the limit comes out in pieces.
"""

from __future__ import annotations

import array
import fcntl
import os
import socket
import termios
from typing import TYPE_CHECKING, Final, TypeAlias

from .tail_buffer import LANES, Lane, Tail

if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx.runtime.observe.labels import WorkerLabels


MAX_LINE: Final = 65536


class LineSplitter:
    """Splits one stream at newlines."""

    def __init__(self, limit: int = MAX_LINE) -> None:
        self._limit = limit
        self._partial = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that *data* completes, without their newlines."""
        *lines, rest = data.split(b"\n")
        if lines:
            lines[0] = bytes(self._partial) + lines[0]
            self._partial.clear()
        self._partial += rest
        while len(self._partial) > self._limit:
            lines.append(bytes(self._partial[: self._limit]))
            del self._partial[: self._limit]
        return lines

    def flush(self) -> list[bytes]:
        """Return the line that was begun and not ended, if there is one."""
        if not self._partial:
            return []
        line = bytes(self._partial)
        self._partial.clear()
        return [line]


Take: TypeAlias = "Callable[[WorkerReader, Lane, list[bytes]], None]"
_CHUNK: Final = 1 << 16
_RECORDS: Final = 64  # per read of a log channel; the loop comes back for more
_ALL_RECORDS: Final = 100_000  # more than any socket buffer holds


class WorkerReader:
    """The pipes and the log channel of one incarnation.

    Attributes:
        labels: Of the worker; replaced when more is known.
        lanes: The open descriptors, by number.
    """

    def __init__(self, labels: WorkerLabels, tail: Tail, fds: tuple[int, int, int]) -> None:
        """Read from *fds* (stdout, stderr, log), which belong to this object from now on."""
        self.labels = labels
        self.lanes: dict[int, Lane] = dict(zip(fds, LANES, strict=True))
        self._tail = tail
        self._splitters = {lane: LineSplitter() for lane in LANES}

    def read(self, fd: int, take: Take) -> bool:
        """Read *fd* once and hand what is complete to *take*; return False at end of file."""
        lane = self.lanes[fd]
        if lane == "log":
            alive = self._read_log(fd, take, _RECORDS)
        else:
            alive = self._read_pipe(fd, take) >= 0
        if not alive:
            self._flush(lane, take)
        return alive

    def drain(self, take: Take) -> list[int]:
        """Pass what was written so far to *take*, begun lines too; return what is at its end."""
        ended: list[int] = []
        for fd, lane in list(self.lanes.items()):
            if lane == "log":
                alive = self._read_log(fd, take, _ALL_RECORDS)
            else:
                there = _bytes_in(fd)
                got = self._read_pipe(fd, take)
                while 0 < got < there:
                    there -= got
                    got = self._read_pipe(fd, take)
                alive = got >= 0
            self._flush(lane, take)
            if not alive:
                ended.append(fd)
        return ended

    def end(self, fd: int) -> None:
        """Close *fd*. Unregister it first: epoll goes on watching what other processes hold."""
        del self.lanes[fd]
        os.close(fd)

    def close(self) -> None:
        """Let go of every descriptor and of the tail."""
        for fd in self.lanes:
            os.close(fd)
        self.lanes.clear()
        self._tail.close()

    def _read_pipe(self, fd: int, take: Take) -> int:
        """Return how many bytes were read, 0 where there were none, -1 at end of file."""
        try:
            data = os.read(fd, _CHUNK)
        except BlockingIOError:
            return 0
        if not data:
            return -1
        lane = self.lanes[fd]
        self._tail.write(lane, [data])
        lines = self._splitters[lane].feed(data)
        if lines:
            take(self, lane, lines)
        return len(data)

    def _read_log(self, fd: int, take: Take, limit: int) -> bool:
        records, alive = read_records(fd, limit)
        if records:
            self._tail.write("log", [record + b"\n" for record in records])
            take(self, "log", records)
        return alive

    def _flush(self, lane: Lane, take: Take) -> None:
        lines = self._splitters[lane].flush()
        if lines:
            take(self, lane, lines)


def read_records(fd: int, limit: int) -> tuple[list[bytes], bool]:
    """Return at most *limit* records waiting on the SEQPACKET socket *fd*, and whether it lives."""
    records: list[bytes] = []
    with socket.socket(fileno=fd) as channel:
        try:
            while len(records) < limit:
                record = channel.recv(_CHUNK * 4, socket.MSG_DONTWAIT)
                if not record:
                    return records, False
                records.append(record)
        except (BlockingIOError, ConnectionResetError):
            pass
        finally:
            channel.detach()
    return records, True


def _bytes_in(fd: int) -> int:
    count = array.array("i", [0])
    fcntl.ioctl(fd, termios.FIONREAD, count)
    return count[0]
