"""The pair of arenas through which the driver and one incarnation of a worker exchange messages.

The driver has one arena per group, which every worker reads; each worker has one of its own,
which the driver reads. One page per worker holds the return counters: the worker writes the first
half, the driver the second. All of it is anonymous memory that the worker inherits.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from phalanx.runtime.linux import descriptors

from .arena import LIMIT, PAGE, SLOTS, Arena, Borrower, memory_file
from .mapping import ArenaReader

if TYPE_CHECKING:
    from collections.abc import Mapping


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
        try:
            os.ftruncate(returns, PAGE)
            theirs, ours = _halves(returns)
            results = memory_file(LIMIT)
        except BaseException:
            os.close(returns)
            raise
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
