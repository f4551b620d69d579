"""The reading side of an arena: views that may be written in place and are given back by dying.

Guarantees: a message can be read for as long as anything refers to its view, and its place is
given back when nothing does. Writing to it changes nobody else's data: pages written to become
this process's own, and die with the view, so the next message in that place is seen as it was
written. A fork by Python code finds every view already made private, so a child's copy stays
what it was.

Left to others: when a place is used again (`arena`).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import weakref

from . import ledger
from .arena import PAGE, SLOTS
from .memory import no_room_to_read

COPY_LIMIT = 128 * 1024
"""Bytes up to which a copy is quicker than a mapping with its page faults."""

MOST_MAPPED = 256
"""Views at once; each costs a descriptor and a mapping. Beyond that messages are copied."""

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, since Linux 5.14; the mmap module has no name for it


class ArenaReader:
    """Reads one writer's messages.

    Args:
        fd: The writer's memory file; owned, and closed with this object.
        returned: This reader's counters, one word per slot.
    """

    def __init__(self, fd: int, returned: memoryview) -> None:
        self._fd = ledger.own(fd)
        self._size = os.fstat(fd).st_size
        self._returned = returned
        self._pid = os.getpid()
        # Reentrant: a signal handler may drop a view while this very thread counts another.
        self._lock = threading.RLock()

    def open(self, slot: int, start: int, size: int) -> memoryview:
        """Return the message of *size* bytes; it is given back when the view has died.

        Raises:
            ValueError: there is no such place; nothing is given back.
            MemoryError: this process has no room for it.
        """
        if slot >= SLOTS or start % PAGE or start + size > self._size or not size:
            msg = f"slot {slot}, {size} bytes at {start}: no place in {self._size} bytes"
            raise ValueError(msg)
        if size > COPY_LIMIT and len(_mapped) < MOST_MAPPED:
            try:
                return self._map(slot, start, size)
            except OSError:
                pass  # no descriptor or mapping left: a copy needs neither
        try:
            return self._copy(start, size)
        finally:
            self.give_back(slot)

    def give_back(self, slot: int) -> None:
        """Count the message in *slot* as no longer read."""
        # A forked child's copies are not lent: they are its own (`_make_private`).
        if slot < SLOTS and self._pid == os.getpid():
            with self._lock:
                self._returned[slot] += 1

    def close(self) -> None:
        """Give the descriptor back; views live on."""
        if self._fd >= 0:
            ledger.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        # Not closed with the worker it reads from: a message may still be unread then.
        # In a forked child the ledger has closed it, and its number may be somebody else's.
        if self._pid == os.getpid():
            self.close()

    def _map(self, slot: int, start: int, size: int) -> memoryview:
        length = -(-size // PAGE) * PAGE
        flags = mmap.PROT_READ | mmap.PROT_WRITE
        private = mmap.mmap(self._fd, length, mmap.MAP_PRIVATE, flags, offset=start)
        # The collector would announce the end of a view in a dead cycle before the `__del__`
        # methods in that cycle have run, which may read it. Unknown to the collector, it ends when
        # its last reference goes. It refers to nothing, so no cycle passes through it.
        _untrack(private)
        lent = _Lent(private, _end)
        lent.reader = self
        lent.slot = slot
        _mapped.add(lent)
        return memoryview(private)[:size]

    def _copy(self, start: int, size: int) -> memoryview:
        try:
            copy = memoryview(bytearray(size))
        except MemoryError:
            raise no_room_to_read(size) from None
        done = 0
        while done < size:
            done += os.preadv(self._fd, [copy[done:]], start + done)
        return copy


class _Lent(weakref.ref[mmap.mmap]):
    """A view that lives, and what to give back when it has died."""

    __slots__ = ("reader", "slot")

    reader: ArenaReader
    slot: int


def _end(lent: weakref.ref[mmap.mmap]) -> None:
    assert isinstance(lent, _Lent)
    _mapped.discard(lent)
    lent.reader.give_back(lent.slot)


_mapped: set[_Lent] = set()
_untrack = ctypes.pythonapi.PyObject_GC_UnTrack
_untrack.argtypes = (ctypes.py_object,)
_untrack.restype = None


def _make_private() -> None:
    """Copy every page of every view, so that a forked child depends on no place in any arena."""
    for lent in list(_mapped):
        view = lent()
        if view is None:
            continue
        try:
            view.madvise(_POPULATE_WRITE)
        except OSError:
            for at in range(0, len(view), PAGE):
                view[at] = view[at]


os.register_at_fork(before=_make_private)
