"""The reading side of an arena: views that may be written in place and are given back by dying.

Guarantees: a message can be read for as long as anything refers to its view, and its place is
given back when nothing does. Writing to it changes nobody else's data: pages written to become
this process's own, and die with the view, so the next message in that place is seen as it was
written.

Left to others: when a place is used again (`arena`), what is mapped and what is copied (`views`).
"""

from __future__ import annotations

import functools
import os
import threading

from . import ledger
from .arena import PAGE, SLOTS
from .views import copied, mapped


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
            ledger.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        # Not closed with the worker it reads from: a message may still be unread then.
        # In a forked child the ledger has closed it, and its number may be somebody else's.
        if self._pid == os.getpid():
            self.close()
