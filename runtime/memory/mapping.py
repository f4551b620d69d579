"""Reading side of the arena, and the pair of arenas of the driver and one incarnation of a worker.

A message body is mapped copy-on-write, or copied, or decoded in place.

Guarantees: a body can be read for as long as there are references to its view, and its slot is then
returned. A write to a view in place changes no other process's data: the pages written
become private to this process and end with the view. All views that a process keeps take a
bounded number of descriptors (the mmap module keeps one for each) and mappings: the rest are
copied. A fork by Python code first makes the views of reusable memory private, so that the child's
copies stay.

The views are counted per process, because a table of descriptors is.

The driver has one arena per group, which every worker reads; each worker has one, which the
driver reads. One page per worker holds the return counters: the worker writes the first half,
the driver the second. All of it is anonymous memory that the worker inherits.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import resource
import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

from phalanx.runtime.linux import descriptors

from .arena import LIMIT, PAGE, SLOTS, Arena, Borrower, memory_file

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


COPY_LIMIT = 256 * 1024
"""Bytes up to which a copy is quicker than a mapping with its page faults."""

KEPT_MAPPED = 16 << 20
"""Bytes at the start of an arena, which are used first, that its reader keeps mapped."""

MOST_MAPPED = 256
"""Views at once, and at most a quarter of the descriptors that the process may have."""

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, since Linux 5.14; the mmap module has no name for it


def mapped(
    file: int, start: int, size: int, on_end: Callable[[], None] | None = None
) -> memoryview | None:
    """Return a mapping of *size* bytes from *start*, a multiple of the page size, of *file*.

    Returns None if `copied` is quicker, or there is no descriptor or mapping left.

    Args:
        on_end: Called once the view has died. None says that this memory is never written again.
    """
    if size <= COPY_LIMIT:
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if len(_mapped) >= min(MOST_MAPPED, soft // 4):
        return None
    flags = mmap.PROT_READ | mmap.PROT_WRITE
    try:
        private = mmap.mmap(file, size, mmap.MAP_PRIVATE, flags, offset=start)
    except OSError:
        return None
    # The collector would clear the weak reference to a view in a dead cycle before the `__del__`
    # methods of that cycle have run, which may read it. Untracked, it ends with its last reference.
    _untrack(private)
    view = _Mapped(private, _end)
    view.on_end = on_end
    _mapped.add(view)
    return memoryview(private)


def copied(file: int, start: int, size: int) -> memoryview:
    """Return a copy of those bytes; zeros behind the end of the file.

    Raises:
        MemoryError: this process has no room for it.
    """
    try:
        copy = memoryview(bytearray(size))
    except MemoryError:
        soft, _ = resource.getrlimit(resource.RLIMIT_AS)
        msg = f"no room in this process to read a message of {size} bytes"
        if soft != resource.RLIM_INFINITY:
            msg += f"; all it may have (`ulimit -v`) is {soft}"
        raise MemoryError(msg) from None
    done = 0
    while done < size and (got := os.preadv(file, [copy[done:]], start + done)):
        done += got
    return copy


class _Mapped(weakref.ref[mmap.mmap]):
    """A live view, and what to call when it has died."""

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
    """Copy every page that may be written again, so that a forked child does not share it."""
    for each in list(_mapped):
        view = each()
        if view is None or each.on_end is None:
            continue
        try:
            view.madvise(_POPULATE_WRITE)
        except OSError:
            for at in range(0, len(view), PAGE):
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
        self._kept: memoryview | None = None
        # Reentrant: a signal handler may drop a view while this very thread counts another.
        self._lock = threading.RLock()

    def open(self, slot: int, start: int, size: int) -> memoryview:
        """Return the message of *size* bytes; it is returned when the view has died.

        Raises:
            ValueError: there is no such place; nothing is returned.
            MemoryError: this process has no room for it.
        """
        if slot >= SLOTS or start % PAGE or start + size > self._size or not size:
            msg = f"slot {slot}, {size} bytes at {start}: no place in {self._size} bytes"
            raise ValueError(msg)
        view = mapped(self._fd, start, size, functools.partial(self.give_back, slot))
        if view is not None:
            return view
        try:
            near = self.in_place(start, size)
            return copied(self._fd, start, size) if near is None else memoryview(bytearray(near))
        finally:
            self.give_back(slot)

    def in_place(self, start: int, size: int) -> memoryview | None:
        """Return those bytes where they lie, read-only, to be given back after the last look.

        Returns None if they are not in the part that stays mapped, or that cannot be mapped.
        """
        if start + size > KEPT_MAPPED or self._pid != os.getpid():  # a forked child has no mapping
            return None
        if self._kept is None:
            try:
                shared = mmap.mmap(self._fd, min(KEPT_MAPPED, self._size), prot=mmap.PROT_READ)
            except OSError:
                return None
            shared.madvise(mmap.MADV_DONTFORK)
            self._kept = memoryview(shared)
        return self._kept[start : start + size]

    def give_back(self, slot: int) -> None:
        """Count the message in *slot* as no longer read."""
        # A forked child's copies are its own (`_make_private`).
        if slot < SLOTS and self._pid == os.getpid():
            with self._lock:
                pass  # a release and an acquisition: the last look precedes the count on ARM64 too
            with self._lock:
                self._returned[slot] += 1

    def close(self) -> None:
        """Close the descriptor; views live on."""
        self._kept = None
        if self._fd >= 0:
            descriptors.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        # Not closed with the worker: a message of it may still be unread.
        # In a forked child the registry has closed it, and its number may be in use again.
        if self._pid == os.getpid():
            self.close()


@dataclass(slots=True)
class DriverExchange:
    """The driver's side, for one incarnation of one worker.

    Attributes:
        borrower: The worker, as a reader of the driver's arena.
        reader: Reads the worker's arena; None once it is dead.
    """

    borrower: Borrower
    reader: ArenaReader | None
    _arena: Arena
    _results: int
    _returns: int

    @classmethod
    def create(cls, arena: Arena) -> DriverExchange:
        """Return a new one between *arena* and a worker that is not there yet."""
        returns = os.memfd_create("phalanx-returns", os.MFD_CLOEXEC)
        with descriptors.closed_on_error(returns):
            os.ftruncate(returns, PAGE)
            theirs, ours = _halves(returns)
            results = memory_file(LIMIT)
        return cls(
            Borrower(theirs), ArenaReader(results, ours), arena, results, descriptors.own(returns)
        )

    @classmethod
    def inherit(cls, arena: Arena, results: int, returns: int) -> DriverExchange:
        """Return the driver's side of an exchange that another process made for *arena*."""
        theirs, ours = _halves(returns)
        reader = ArenaReader(results, ours)
        return cls(Borrower(theirs), reader, arena, results, descriptors.own(returns))

    def fds(self) -> dict[str, int]:
        """Return the descriptors that the worker inherits, by name."""
        return {"arena": self._arena.fd, "results": self._results, "returns": self._returns}

    def close(self) -> None:
        """Release what a dead worker held. Its messages stay readable: each has the reader."""
        self.borrower.forget()
        self.reader = None
        if self._returns >= 0:
            descriptors.close(self._returns)
            self._returns = -1


@dataclass(frozen=True, slots=True)
class WorkerExchange:
    """The worker's side.

    Attributes:
        arena: Its own, for answers.
        borrower: The driver, as a reader of that.
        reader: Reads the driver's arena.
    """

    arena: Arena
    borrower: Borrower
    reader: ArenaReader

    @classmethod
    def inherit(cls, fds: Mapping[str, int]) -> WorkerExchange:
        """Return the side of the worker that was given *fds*."""
        ours, theirs = _halves(fds["returns"])
        os.close(fds["returns"])
        return cls(Arena(fds["results"]), Borrower(theirs), ArenaReader(fds["arena"], ours))


def _halves(fd: int) -> tuple[memoryview, memoryview]:
    words = memoryview(mmap.mmap(fd, PAGE)).cast("Q")
    return words[:SLOTS], words[SLOTS:]
