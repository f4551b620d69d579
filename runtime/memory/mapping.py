"""Mappings of shared bodies: one slot mapped copy-on-write, and counted back when it is freed.

The reading side of an arena: views that may be written in place and are given back by dying.

Guarantees: a message can be read for as long as anything refers to its view, and its place is
given back when nothing does. Writing to it changes nobody else's data: pages written to become
this process's own, and die with the view, so the next message in that place is seen as it was
written.

Left to others: when a place is used again (`arena`), what is mapped and what is copied (`views`).

Bodies in memory files, as who reads them sees them: mapped while they are few, else copied.

Guarantees: what is written to a view in place changes nobody else's data; however many views a
process keeps, they take a bounded number of descriptors and mappings (the mmap module keeps a
descriptor for each), so what is kept beyond that costs memory and nothing scarcer. A fork by
Python code finds the views of memory that is used again already made private, so a child's copy
stays what it was.

Left to others: which memory that is, and who is told that a view has died (`arena_reader`, `far`).

The views are counted for the whole process, because a table of descriptors is.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import resource
import threading
import weakref
from typing import TYPE_CHECKING

from phalanx.runtime.linux import descriptors

from .arena import PAGE, SLOTS
from .budget import no_room_to_read

if TYPE_CHECKING:
    from collections.abc import Callable


COPY_LIMIT = 128 * 1024
"""Bytes up to which a copy is quicker than a mapping with its page faults."""

MOST_MAPPED = 256
"""Views at once; each costs a descriptor and a mapping. Beyond that messages are copied."""

_SHARE = 4  # of a process's descriptors at most one in so many is taken; the rest are the user's

_PAGE = mmap.PAGESIZE
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, since Linux 5.14; the mmap module has no name for it


def mapped(
    file: int, start: int, size: int, on_end: Callable[[], None] | None = None
) -> memoryview | None:
    """Return a mapping of *size* bytes from *start*, which is on a page, of *file*.

    None where `copied` serves better, or there is no descriptor or mapping left: it needs neither.

    Args:
        on_end: Called once the view has died; not where there is none. None says that nobody ever
            writes to that memory again.
    """
    if size <= COPY_LIMIT or len(_mapped) >= _most():
        return None
    flags = mmap.PROT_READ | mmap.PROT_WRITE
    try:
        private = mmap.mmap(file, size, mmap.MAP_PRIVATE, flags, offset=start)
    except OSError:
        return None
    # The collector would announce the end of a view in a dead cycle before the `__del__`
    # methods in that cycle have run, which may read it. Unknown to the collector, it ends when
    # its last reference goes. It refers to nothing, so no cycle passes through it.
    _untrack(private)
    view = _Mapped(private, _end)
    view.on_end = on_end
    _mapped.add(view)
    return memoryview(private)


def copied(file: int, start: int, size: int) -> memoryview:
    """Return a copy of those bytes.

    Raises:
        MemoryError: this process has no room for it.
    """
    try:
        copy = memoryview(bytearray(size))
    except MemoryError:
        raise no_room_to_read(size) from None
    done = 0
    while done < size:
        done += os.preadv(file, [copy[done:]], start + done)
    return copy


def _most() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return min(MOST_MAPPED, soft // _SHARE)


class _Mapped(weakref.ref[mmap.mmap]):
    """A view that lives, and what to do when it has died."""

    __slots__ = ("on_end",)

    on_end: Callable[[], None] | None


def _end(view: weakref.ref[mmap.mmap]) -> None:
    assert isinstance(view, _Mapped)
    _mapped.discard(view)
    if view.on_end is not None:
        view.on_end()


_mapped: set[_Mapped] = set()
_untrack = ctypes.pythonapi.PyObject_GC_UnTrack
_untrack.argtypes = (ctypes.py_object,)
_untrack.restype = None


def _make_private() -> None:
    """Copy every page that may be written to again, so that a forked child depends on none."""
    for each in list(_mapped):
        view = each()
        if view is None or each.on_end is None:
            continue
        try:
            view.madvise(_POPULATE_WRITE)
        except OSError:
            for at in range(0, len(view), _PAGE):
                view[at] = view[at]


os.register_at_fork(before=_make_private)


class ArenaReader:
    """Reads one writer's messages.

    Args:
        fd: The writer's memory file; owned, and closed with this object.
        returned: This reader's counters, one word per slot.
    """

    def __init__(self, fd: int, returned: memoryview) -> None:
        self._fd = descriptors.own(fd)
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
        view = mapped(self._fd, start, size, functools.partial(self.give_back, slot))
        if view is not None:
            return view
        try:
            return copied(self._fd, start, size)
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
            descriptors.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        # Not closed with the worker it reads from: a message may still be unread then.
        # In a forked child the ledger has closed it, and its number may be somebody else's.
        if self._pid == os.getpid():
            self.close()
