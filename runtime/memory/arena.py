"""Shared-memory allocator for large message bodies: one writer, many readers.

Guarantees: the slot of a message is reused only when its sender has released it and every
reader that was lent it has returned it or is dead; memory is reserved before it is written, so a
full machine is an error here and not a SIGBUS; the file never shrinks; idle memory goes back to the
kernel (`trim_if_idle`). A view that is never released pins its own slot only.

How a reader returns a slot: it has a page that only it writes, with one counter per slot. The
writer counts loans, the reader returns; equal counters mean that the reader holds nothing.
Nothing is repaired after a death: the writer drops the reader with its page.

Ordering: a reader unmaps a slot before it counts it back. The unmapping ends every read through
that mapping on x86-64 and ARM64 alike, before the counter is stored. For a slot that stays mapped a
lock that is released and taken between the last read and the count does the same.
"""

from __future__ import annotations

import bisect
import ctypes
import fcntl
import mmap
import os
import resource
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from phalanx.runtime.linux import descriptors
from phalanx.runtime.threads.reentrant_lock import OwnedLock

from .budget import reserve

if TYPE_CHECKING:
    from collections.abc import Sequence

PAGE = mmap.PAGESIZE
SLOTS = 256
"""Messages that one arena can hold at once. Beyond that they travel in files of their own."""

LIMIT = 1 << 30
"""Bytes that one arena can hold. It is address space: only what is in use is backed by memory."""

ARENA_IDLE = 2.0
"""Seconds without a message after which an arena is trimmed."""

_LONGEST_WAIT = 10.0  # seconds between two trims of an arena of which readers keep something
# Bytes copied at once: source and destination fit in L2 (33 % faster at 1 MiB), and the interpreter
# can serve other threads between blocks.
_STEP = 1 << 18
_KEEP_SIZE_AND_PUNCH_HOLE = 1 | 2
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


class Borrower:
    """One reader, as the writer sees it.

    Args:
        returned: The reader's counters, one word per slot; written by the reader only.
    """

    def __init__(self, returned: memoryview) -> None:
        self._returned = returned
        self._lent = [0] * SLOTS

    def lend(self, slot: int) -> None:
        """Count a message in *slot* as lent once more."""
        self._lent[slot] += 1

    def take_back(self, slot: int) -> None:
        """Count a message in *slot* as lent once less: it was never sent."""
        self._lent[slot] -= 1

    def holds(self, slot: int) -> bool:
        """Whether the reader still has what it was lent in *slot*."""
        returned = self._returned
        return bool(returned) and returned[slot] != self._lent[slot]

    def forget(self) -> None:
        """Note that the reader is dead and holds nothing."""
        self._returned = memoryview(b"")  # unmaps the page


@dataclass(eq=False, slots=True)
class Extent:
    """The place of one message. Found and taken back under its arena's lock.

    Attributes:
        start: Offset in bytes, a multiple of the page size.
        kept: Whether the sender may still send it.
        window: All of the arena, which may be closed meanwhile.
    """

    slot: int
    start: int
    pages: int
    kept: bool = True
    borrowers: list[Borrower] = field(default_factory=list[Borrower])
    window: memoryview = field(default=memoryview(b""), repr=False)

    def lend(self, borrower: Borrower) -> None:
        """Count it as read by *borrower*, which is about to be sent it; one thread at a time."""
        # Without the arena's lock: a place that is kept is not swept.
        borrower.lend(self.slot)
        if borrower not in self.borrowers:
            self.borrowers.append(borrower)

    def let_go(self) -> None:
        """Note that the sender is done with it; its readers may not be."""
        self.kept = False

    def write(self, parts: Sequence[memoryview], offsets: Sequence[int]) -> None:
        """Copy *parts* to *offsets* within it."""
        view = self.window
        for part, offset in zip(parts, offsets, strict=True):
            at = self.start + offset
            for done in range(0, part.nbytes, _STEP):
                piece = part[done : done + _STEP]
                view[at + done : at + done + piece.nbytes] = piece


class Arena:
    """One writer's memory. Its methods may be called from any thread.

    Attributes:
        fd: The memory file; readers get it at their start.
        is_warm: Whether any of it is backed by memory.
        is_held: Returns whether the calling thread has its lock.
    """

    def __init__(self, fd: int) -> None:
        self.fd = descriptors.own(fd)
        self.is_warm = False
        self._trim_at = 0.0
        self._wait = ARENA_IDLE
        self._lock = OwnedLock()
        self.is_held = self._lock.is_mine
        self._window: memoryview | None = None
        self._size = os.fstat(fd).st_size // PAGE
        self._backed = bytearray(self._size)  # one byte per page: 1 if it is backed by memory
        self._used: list[Extent] = []  # by start
        self._slots = list(range(SLOTS))

    @classmethod
    def create(cls, limit: int = LIMIT) -> Arena:
        """Return an arena of at most *limit* bytes; it costs nothing until it is used."""
        return cls(memory_file(limit))

    @property
    def window(self) -> memoryview:
        """All of it, for writing."""
        window = self._window
        if window is None:
            with self._lock.asked():
                if self.fd < 0:  # of -1 mmap would make memory of nobody's
                    raise ValueError("the arena is closed")
                shared = mmap.mmap(self.fd, self._size * PAGE)
                shared.madvise(mmap.MADV_DONTFORK)
                window = self._window = memoryview(shared)
        return window

    def place(self, size: int) -> Extent | None:
        """Return a place for *size* bytes, backed by memory, or None if there is none."""
        if self._lock.is_mine():
            return None  # a finalizer's message, which interrupts another search for a place
        pages = -(-size // PAGE)
        try:
            return self._place(pages)
        except (OSError, ValueError):
            self.trim()  # idle memory elsewhere may be what is missing here
        try:
            return self._place(pages)
        except (OSError, ValueError):
            return None

    def _place(self, pages: int) -> Extent | None:
        """Return a place of so many *pages*, None if there is no gap.

        Raises:
            OSError, ValueError: there is no memory for it.
        """
        with self._lock.asked():
            self._sweep()
            start = self._gap(pages) if self._slots and self.fd >= 0 else None
            if start is None:
                return None
            extent = Extent(self._slots.pop(), start * PAGE, pages)
            bisect.insort(self._used, extent, key=lambda each: each.start)
            self.is_warm = True
            self._wait = ARENA_IDLE
            self._trim_at = time.monotonic() + ARENA_IDLE
            missing = 0
            if self._backed.find(0, start, start + pages) >= 0:  # faster than to count them
                missing = pages - self._backed.count(1, start, start + pages)
        file = -1
        try:
            if missing:
                with self._lock.asked():
                    file = os.dup(self.fd)  # meanwhile it may be closed, and its number another's
                reserve(file, start * PAGE, pages * PAGE, missing=missing * PAGE)
            extent.window = self.window  # a process short of address space cannot map it
        except (OSError, ValueError):
            with self._lock.asked():
                self._empty(start, start + pages)  # also what had been reserved of it
            extent.let_go()
            raise
        finally:
            if file >= 0:
                os.close(file)
        if missing:
            with self._lock.asked():
                self.is_warm = True
                self._backed[start : start + pages] = b"\1" * pages
        return extent

    def trim_if_idle(self, now: float) -> float | None:
        """Trim if no message was placed for `ARENA_IDLE` seconds.

        Returns the seconds until the next trim is due, more each time while readers keep something;
        None if no memory is left.
        """
        if self.is_warm and now >= self._trim_at:
            self.trim()
            self._wait = min(2 * self._wait, _LONGEST_WAIT)
            self._trim_at = now + self._wait
        return max(0.0, self._trim_at - now) if self.is_warm else None

    def trim(self) -> None:
        """Give the memory back that no message needs."""
        with self._lock.asked():
            if self.fd < 0:
                return
            self._sweep()
            at = 0
            for extent in self._used:
                self._punch(at, extent.start // PAGE)
                at = extent.start // PAGE + extent.pages
            self._punch(at, self._size)
            self.is_warm = self._backed.find(1) >= 0

    def close(self) -> None:
        """Close the file; readers keep what they have mapped."""
        with self._lock.asked():
            if self.fd >= 0:
                self._window, self._used = None, []
                descriptors.close(self.fd)
                self.fd = -1

    # --- under the lock -------------------------------------------------------------------

    def _sweep(self) -> None:
        """Free the places that neither their senders nor readers hold."""
        used: list[Extent] = []
        for extent in self._used:
            if extent.kept or any(each.holds(extent.slot) for each in extent.borrowers):
                used.append(extent)
            else:
                self._slots.append(extent.slot)
        self._used = used

    def _gap(self, pages: int) -> int | None:
        """Return the lowest page with room for *pages*: low pages are backed by memory."""
        at = 0
        for extent in self._used:
            if extent.start // PAGE - at >= pages:
                return at
            at = extent.start // PAGE + extent.pages
        return at if self._size - at >= pages else None

    def _punch(self, start: int, end: int) -> None:
        start = self._backed.find(1, start, end)
        if start >= 0:
            self._empty(start, self._backed.rfind(1, start, end) + 1)

    def _empty(self, start: int, end: int) -> None:
        """Give the memory of those pages back."""
        size = (end - start) * PAGE
        if _libc.fallocate(self.fd, _KEEP_SIZE_AND_PUNCH_HOLE, start * PAGE, size) == 0:
            self._backed[start:end] = bytes(end - start)


def memory_file(limit: int) -> int:
    """Return a new, empty memory file of *limit* bytes, or of RLIMIT_FSIZE if that is less.

    It can neither shrink nor grow.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if soft != resource.RLIM_INFINITY:
        limit = min(limit, soft // PAGE * PAGE)
    fd = os.memfd_create("phalanx-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with descriptors.closed_on_error(fd):
        os.ftruncate(fd, limit)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return fd
