"""Reader of the stdout, stderr and log socket of one worker, line by line.

- Nothing blocks. One read takes a bounded amount, so that a noisy worker does not starve others;
  `WorkerReader.drain` takes the bytes that were there when it was called, however many follow.
- Every byte comes out exactly once, in order; a line is never held back once it is complete, and
  one past the limit comes out in pieces.
"""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Final, TypeAlias

from .tail_buffer import LANES, Lane, Tail

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from phalanx.runtime.observe.events import WorkerLabels


class LineSplitter:
    """Splits one stream at newlines, and lines longer than *limit* bytes into pieces."""

    def __init__(self, limit: int = 65536) -> None:
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
        line = bytes(self._partial)
        self._partial.clear()
        return [line] if line else []


Take: TypeAlias = "Callable[[WorkerReader, Lane, list[bytes]], None]"
ALL_RECORDS: Final = 100_000  # more than any socket buffer holds
_CHUNK: Final = 1 << 16
_PIPE: Final = 1 << 20  # more than a pipe holds, unless a privileged process enlarges it
_RECORDS: Final = 64  # per read of a log channel; the loop comes back for more


class WorkerReader:
    """The pipes and the log channel of one incarnation.

    Attributes:
        labels: Of the worker; replaced when more is known.
        lanes: The open descriptors, by number.
    """

    def __init__(
        self,
        labels: WorkerLabels,
        fds: Sequence[int],
        take: Take,
        unwatch: Callable[[int], object],
    ) -> None:
        """Read from *fds* (tail, stdout, stderr, log), which belong to this object from now on.

        Args:
            take: Called with the lines and records that are complete.
            unwatch: Called before a descriptor is closed: epoll goes on watching what other
                processes hold.
        """
        self.labels = labels
        tail, *lanes = fds
        self.lanes: dict[int, Lane] = dict(zip(lanes, LANES, strict=True))
        self._tail = Tail(tail)
        self._take = take
        self._unwatch = unwatch
        self._splitters = {lane: LineSplitter() for lane in LANES}

    def read(self, fd: int, *, everything: bool = False) -> None:
        """Read *fd* once, a bounded amount or *everything* there is; close it at end of file."""
        lane = self.lanes[fd]
        if lane == "log":
            alive = self._read_log(fd, ALL_RECORDS if everything else _RECORDS)
        else:
            alive = self._read_pipe(fd, _PIPE if everything else _CHUNK)
        if everything:
            self._flush(lane)
        if not alive:
            self._end(fd)

    def drain(self) -> None:
        """Take what was written so far, begun lines too, and close what is at its end."""
        for fd in list(self.lanes):
            self.read(fd, everything=True)

    def close(self) -> None:
        """Take the output so far, and close every descriptor and the tail."""
        self.drain()
        for fd in list(self.lanes):
            self._end(fd)
        self._tail.close()

    def _end(self, fd: int) -> None:
        self._flush(self.lanes.pop(fd))
        self._unwatch(fd)
        os.close(fd)

    def _read_pipe(self, fd: int, size: int) -> bool:
        try:
            data = os.read(fd, size)
        except BlockingIOError:
            return True
        lane = self.lanes[fd]
        self._tail.write(lane, data)
        if lines := self._splitters[lane].feed(data):
            self._take(self, lane, lines)
        return bool(data)

    def _read_log(self, fd: int, limit: int) -> bool:
        records, alive = read_records(fd, limit)
        if records:
            self._tail.write("log", b"".join(record + b"\n" for record in records))
            self._take(self, "log", records)
        return alive

    def _flush(self, lane: Lane) -> None:
        if lines := self._splitters[lane].flush():
            self._take(self, lane, lines)


def read_records(fd: int, limit: int = ALL_RECORDS) -> tuple[list[bytes], bool]:
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
