"""Memory that large messages are written into once and read from by any number of processes.

Guarantees: a message's place is used again only when its sender has let go of it and every reader
that was lent it has given it back or is dead, so no reader ever sees another message's bytes;
memory is reserved before it is written, so a full machine is an error here and never a SIGBUS;
the file never shrinks, so a reader's mapping cannot be cut off; what lies idle is given back to
the kernel by `trim`. A reader that keeps its view for ever costs its own place and blocks nobody:
the next message goes elsewhere.

How a reader gives back: each reader has a page that only it writes, one counter per slot (the
number of a place in use). The writer counts what it lent, the reader what it gave back; equal
counters mean that nothing is held. No message says so and nobody is woken. Nothing is repaired
after a death either: the writer forgets the reader, page and all.

Ordering: a reader unmaps a place before it counts it back. The unmapping ends every read through
that mapping on x86-64 and ARM64 alike, before the counter is stored.

Left to others: reading (`arena_reader`), which memory belongs to whom (`arena_exchange`), when to
trim (whoever owns the arena), and messages that find no place here (`frames`).
"""

from __future__ import annotations

import bisect
import ctypes
import fcntl
import mmap
import os
import resource
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

ARENA_LONGEST = 10.0
"""Seconds between looks at an arena of which readers keep something. So long may lie idle what they
let go of, where nothing else is sent; it was a minute once, though a look takes microseconds."""

# Bytes copied at once: both sides of a piece fit into a processor's own cache, which took two
# thirds of the time of a megabyte; and the interpreter can serve other threads in between.
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
        """The reader is dead: it holds nothing any more."""
        self._returned = memoryview(b"")  # unmaps the page


@dataclass(eq=False, slots=True)
class Extent:
    """The place of one message. Found and taken back under its arena's lock.

    Attributes:
        start: Where it begins, in bytes; on a page.
        pages: How many it takes.
        kept: Whether the sender may still send it.
    """

    arena: Arena
    slot: int
    start: int
    pages: int
    kept: bool = True
    borrowers: list[Borrower] = field(default_factory=list[Borrower])

    def lend(self, borrower: Borrower) -> None:
        """Count it as read by *borrower*, which is about to be sent it."""
        self.arena.lend(self, borrower)

    def let_go(self) -> None:
        """The sender is done with it; its readers may not be."""
        self.arena.let_go(self)

    def write(self, parts: Sequence[memoryview], offsets: Sequence[int]) -> None:
        """Copy *parts* to *offsets* within it."""
        view = self.arena.window
        for part, offset in zip(parts, offsets, strict=True):
            at = self.start + offset
            for done in range(0, part.nbytes, _STEP):
                piece = part[done : done + _STEP]
                view[at + done : at + done + piece.nbytes] = piece


class Arena:
    """One writer's memory. Its methods may be called from any thread.

    Attributes:
        fd: The memory file; readers get it at their start.
        placed: How many messages have found a place so far.
        is_warm: Whether memory stands behind any of it.
        is_held: Returns whether who else wants a place waits until this thread goes on.
    """

    def __init__(self, fd: int) -> None:
        self.fd = descriptors.own(fd)
        self.placed = 0
        self.is_warm = False
        self._lock = OwnedLock()
        self.is_held = self._lock.is_mine
        self._window: memoryview | None = None
        self._size = os.fstat(fd).st_size // PAGE
        self._backed = bytearray(self._size)  # one byte per page: whether memory stands behind it
        self._used: list[Extent] = []  # by start
        self._slots = list(range(SLOTS))

    @classmethod
    def create(cls, limit: int = LIMIT) -> Arena:
        """Return an arena of at most *limit* bytes; it costs nothing until it is used."""
        return cls(memory_file(limit))

    @property
    def window(self) -> memoryview:
        """The whole of it, for writing."""
        window = self._window
        if window is None:
            shared = mmap.mmap(self.fd, self._size * PAGE)
            # A forked child of the user's has no business here.
            shared.madvise(mmap.MADV_DONTFORK)
            window = self._window = memoryview(shared)
        return window

    def place(self, size: int) -> Extent | None:
        """Return a place for *size* bytes with memory behind it, or None where there is none."""
        if self._lock.is_mine():
            return None  # a finalizer's message, in the middle of another's search for a place
        pages = -(-size // PAGE)
        try:
            return self._place(pages)
        except (OSError, ValueError):
            self.trim()  # what lies idle elsewhere may be what is missing here
        try:
            return self._place(pages)
        except (OSError, ValueError):
            return None

    def _place(self, pages: int) -> Extent | None:
        """Return a place of so many *pages*, None where there is no gap.

        Raises:
            OSError, ValueError: there is no memory for it.
        """
        with self._lock.asked():
            self._sweep()
            start = self._gap(pages) if self._slots and self.fd >= 0 else None
            if start is None:
                return None
            extent = Extent(self, self._slots.pop(), start * PAGE, pages)
            bisect.insort(self._used, extent, key=lambda each: each.start)
            self.placed += 1
            self.is_warm = True
            missing = 0
            if self._backed.find(0, start, start + pages) >= 0:  # to count them all takes longer
                missing = pages - self._backed.count(1, start, start + pages)
        try:
            if missing:
                reserve(self.fd, start * PAGE, pages * PAGE, missing=missing * PAGE)
            _ = self.window  # a process short of address space cannot map it
        except (OSError, ValueError):
            with self._lock.asked():
                self._empty(start, start + pages)  # what had been had of it, too
            extent.let_go()
            raise
        if missing:
            with self._lock.asked():
                self._backed[start : start + pages] = b"\1" * pages
        return extent

    def lend(self, extent: Extent, borrower: Borrower) -> None:
        """See `Extent.lend`."""
        # Without the lock: a place that is kept is not swept, and one thread at a time lends it.
        borrower.lend(extent.slot)
        if borrower not in extent.borrowers:
            extent.borrowers.append(borrower)

    def let_go(self, extent: Extent) -> None:
        """See `Extent.let_go`."""
        extent.kept = False

    def trim(self) -> None:
        """Give the memory back behind which no message lies."""
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

    @property
    def backed_bytes(self) -> int:
        """How much memory stands behind it."""
        return self._backed.count(1) * PAGE

    def close(self) -> None:
        """Give the file back; readers keep what they have mapped."""
        with self._lock.asked():
            if self.fd >= 0:
                self._window = None  # unmapped when the last writer lets go of it
                descriptors.close(self.fd)
                self.fd = -1

    # --- under the lock -------------------------------------------------------------------

    def _sweep(self) -> None:
        """Take back the places that nobody has any more."""
        used: list[Extent] = []
        for extent in self._used:
            if extent.kept or any(each.holds(extent.slot) for each in extent.borrowers):
                used.append(extent)
            else:
                self._slots.append(extent.slot)
        self._used = used

    def _gap(self, pages: int) -> int | None:
        """Return the lowest page with room for *pages*: low pages are those with memory."""
        at = 0
        for extent in self._used:
            if extent.start // PAGE - at >= pages:
                return at
            at = extent.start // PAGE + extent.pages
        return at if self._size - at >= pages else None

    def _punch(self, start: int, end: int) -> None:
        start = self._backed.find(1, start, end)
        if start < 0:
            return
        self._empty(start, self._backed.rfind(1, start, end) + 1)

    def _empty(self, start: int, end: int) -> None:
        """Have no memory behind those pages."""
        size = (end - start) * PAGE
        if _libc.fallocate(self.fd, _KEEP_SIZE_AND_PUNCH_HOLE, start * PAGE, size) == 0:
            self._backed[start:end] = bytes(end - start)


def memory_file(limit: int) -> int:
    """Return a new memory file of *limit* bytes, or of as many as this process may have in one.

    All of it is holes. It can neither shrink nor grow, so its size need be looked at only once.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if soft != resource.RLIM_INFINITY:
        limit = min(limit, soft // PAGE * PAGE)
    fd = os.memfd_create("phalanx-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, limit)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except BaseException:
        os.close(fd)
        raise
    return fd
