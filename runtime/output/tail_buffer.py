"""Tail buffer: the last output of a worker, in memory that outlives it and the collector.

- A `Tail` is one memfd with a ring for each lane (stdout, stderr, log). The driver creates it, the
  collector writes it, and the driver reads it at any time, without asking either.
- A reader never returns bytes that were half written.

Each lane counts the bytes that it is going to hold (*reserved*, raised before a write) and those
that it holds (*committed*, raised after it). A reader notes *committed*, copies the ring, then
notes *reserved*: bytes up to the first are whole, and of those only the last *capacity* before the
second cannot have been overwritten meanwhile. A writer killed within a write leaves the two apart;
its successor goes on from *committed* and never lowers *reserved*.

Between two cores that reorder stores (ARM) a read may miss the newest bytes, unless
`OutputCollector.drain`, which ends in a system call on both sides, comes first.
"""

from __future__ import annotations

import mmap
import os
from typing import Final, Literal, Self, TypeAlias

from phalanx.runtime.linux import descriptors

Lane: TypeAlias = Literal["stdout", "stderr", "log"]
LANES: Final[tuple[Lane, ...]] = ("stdout", "stderr", "log")
_ATTEMPTS: Final = 5  # at a copy that a writer overtook; arbitrary, one is enough nearly always
_DATA: Final = 128  # the counters lie before it; the rest is padding


class Tail:
    """The rings of one incarnation.

    Attributes:
        fd: The memfd, owned by this object; hand out duplicates.
    """

    def __init__(self, fd: int) -> None:
        """Map what `create` made."""
        self.fd = fd
        size = os.fstat(fd).st_size
        self._capacity = (size - _DATA) // len(LANES)
        self._map = mmap.mmap(fd, size)
        # Not by struct: its pack_into clears the bytes before it fills them, so that a reader in
        # another process sees 0 for a moment, and for ever if the writer is killed right there.
        # Two counters per lane, each stored at once.
        self._view = memoryview(self._map)
        self._counters = self._view[:_DATA].cast("Q")

    @classmethod
    def create(cls, capacity: int) -> Self:
        """Return a tail that keeps the last *capacity* bytes of every lane."""
        fd = os.memfd_create("phalanx-tail", os.MFD_CLOEXEC)
        with descriptors.closed_on_error(fd):
            os.ftruncate(fd, _DATA + len(LANES) * capacity)  # pages cost nothing until touched
            return cls(fd)

    def write(self, lane: Lane, data: bytes) -> None:
        """Append *data* to *lane*. For one writer at a time."""
        reserved, committed, start = self._place(lane)
        end = self._counters[committed] + len(data)
        self._counters[reserved] = max(self._counters[reserved], end)
        kept = data[-self._capacity :]
        offset = (end - len(kept)) % self._capacity
        first = min(len(kept), self._capacity - offset)
        self._map[start + offset : start + offset + first] = kept[:first]
        self._map[start : start + len(kept) - first] = kept[first:]
        self._counters[committed] = end

    def read(self, lane: Lane) -> bytes:
        """Return the last bytes of *lane*, oldest first, from the first whole line on if it can."""
        begin, data = self._copy(lane)
        for _ in range(_ATTEMPTS):
            # Little is left where we slept while the writer ran past; a quiet ring is full.
            if not begin or len(data) >= self._capacity // 2:
                break
            begin, data = self._copy(lane)
        if begin:  # the oldest line has lost its head, unless it is the only one there is
            cut = data.find(b"\n") + 1
            data = data[cut:] if cut < len(data) else data
        return data

    def text(self, lane: Lane) -> str:
        """Return `read` as text; bytes that are none are shown as escapes."""
        return self.read(lane).decode("utf-8", "backslashreplace")

    def close(self) -> None:
        """Unmap it; it lives on where others have mapped it."""
        if not self._map.closed:
            self._counters.release()
            self._view.release()
            self._map.close()
            os.close(self.fd)

    def _copy(self, lane: Lane) -> tuple[int, bytes]:
        """Return whole bytes and how many were written before them."""
        reserved, committed, start = self._place(lane)
        end = self._counters[committed]
        ring = self._map[start : start + self._capacity]
        begin = max(0, self._counters[reserved] - self._capacity)
        offset = begin % self._capacity
        return begin, (ring[offset:] + ring[:offset])[: max(0, end - begin)]

    def _place(self, lane: Lane) -> tuple[int, int, int]:
        """Return which counters are *reserved* and *committed*, and where the ring begins."""
        index = LANES.index(lane)
        return 2 * index, 2 * index + 1, _DATA + index * self._capacity
