"""The locks that the workers of one group share, by name.

Guarantees: one holder per name among all threads of all workers of the group, whichever
incarnation or spare they are, and the children they fork; a holder that ends (SIGKILL at any
instruction, the end of the program in good order, another program in its place) or a thread that
ends without letting go is followed by the next in line, who is told whose work was cut short; a
holder that lets go and asks again at once does not pass those who wait. Everything lies in one
anonymous memory file: nothing is left behind, and nothing is made until a worker asks for a lock.

How it is fair: whoever wants a lock first passes a turnstile, another mutex, and holds it until it
has the lock. So at most one waits at the lock itself, and who has just let go waits behind. Who is
stopped in the turnstile is passed by: a lock that has been free for a moment is anybody's.

Left to others: dying and mutual exclusion (`mutex`, which is the kernel's word on both).
"""

from __future__ import annotations

import os
import sys
import threading
import time
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from phalanx.supervision import LockNotHeld, LockTimeout, RuntimeFault, SpecError, WouldDeadlock

from . import ledger
from .lock_memory import LockMemory
from .mutex import SIZE, Mutex

if TYPE_CHECKING:
    from types import TracebackType

MOST_LOCKS = 1023
"""Names that the locks of one group can have."""

_SLOT = 256
_DIGEST = 16
_REGISTRY = 0  # the first slot: its mutex guards the names, its count says how many there are
_KEY = 2 * SIZE  # where in a slot its name's digest lies; in the registry the number of names
_HOLDER = (_KEY + _DIGEST) // 8  # in words: rank, incarnation, since when in ns, pid
_LEFT = _HOLDER + 4  # and when the last one let go, in ns
_PATIENCE = 0.05  # seconds; whoever waits at a free lock and runs has it after microseconds


@dataclass(frozen=True, slots=True)
class LockHolder:
    """Who has, or had, a shared lock.

    Attributes:
        since: When it got it, in seconds on this machine's monotonic clock.
    """

    rank: int
    incarnation: int
    pid: int
    since: float

    def __str__(self) -> str:
        return f"rank {self.rank} #{self.incarnation} (pid {self.pid})"


class LockTable:
    """The memory of one group's locks, in one process."""

    def __init__(self, fd: int) -> None:
        self.memory = LockMemory(fd, (MOST_LOCKS + 1) * _SLOT)
        self._bytes, self._words = self.memory.bytes, self.memory.words
        self._slots: dict[str, int] = {}
        self._lock = threading.Lock()

    @staticmethod
    def create() -> int:
        """Return a new memory file of locks, which is the caller's to close."""
        fd = os.memfd_create("phalanx-locks", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, (MOST_LOCKS + 1) * _SLOT)
            LockTable(fd).mutex(_REGISTRY).create()
        except BaseException:
            os.close(fd)
            raise
        return ledger.own(fd)

    def mutex(self, slot: int, *, turnstile: bool = False) -> Mutex:
        """Return the mutex of *slot*."""
        return Mutex(self.memory.address + slot * _SLOT + (SIZE if turnstile else 0), self)

    def slot(self, name: str) -> int:
        """Return the slot of *name*, which is its own from now on.

        Raises:
            RuntimeFault: there are too many names.
        """
        with self._lock:
            found = self._slots.get(name)
            if found is None:
                found = self._slots[name] = self._register(name)
        return found

    def holder(self, slot: int) -> LockHolder | None:
        """Return who holds *slot*, as it says itself."""
        words = self._words
        at = slot * _SLOT // 8 + _HOLDER
        pid = words[at + 3]
        if not pid:
            return None
        return LockHolder(words[at], words[at + 1], pid, words[at + 2] / 1e9)

    def enter(self, slot: int, rank: int, incarnation: int) -> None:
        """Note that this process holds *slot*; the pid comes last: until then nobody is noted."""
        words = self._words
        at = slot * _SLOT // 8 + _HOLDER
        words[at] = rank
        words[at + 1] = incarnation
        words[at + 2] = time.monotonic_ns()
        words[at + 3] = os.getpid()

    def leave(self, slot: int) -> None:
        """Note that what was to be done under *slot* is done."""
        words = self._words
        at = slot * _SLOT // 8
        words[at + _LEFT] = time.monotonic_ns()
        words[at + _HOLDER + 3] = 0

    def is_anybodys(self, slot: int) -> bool:
        """Return whether trying *slot* passes nobody by who would take it were it free.

        True also where somebody is noted: that one has it, or died with it.
        """
        words = self._words
        at = slot * _SLOT // 8
        free_for = time.monotonic_ns() - words[at + _LEFT]
        return bool(words[at + _HOLDER + 3]) or free_for >= _PATIENCE * 1e9

    def _register(self, name: str) -> int:
        import hashlib  # noqa: PLC0415  # takes longer to import than most workers need for a lock

        key = hashlib.blake2b(name.encode(), digest_size=_DIGEST).digest()
        registry = self.mutex(_REGISTRY)
        registry.lock(None)  # a death in here leaves a slot uncounted: it is made anew
        try:
            count = self._words[_KEY // 8]
            for slot in range(1, count + 1):
                at = slot * _SLOT + _KEY
                if self._bytes[at : at + _DIGEST].tobytes() == key:
                    return slot
            if count >= MOST_LOCKS:
                msg = f"lock {name!r}: the group has {MOST_LOCKS} other locks already; share some"
                raise RuntimeFault(msg)
            slot = count + 1
            at = slot * _SLOT
            self._bytes[at : at + _SLOT] = bytes(_SLOT)
            self.mutex(slot).create()
            self.mutex(slot, turnstile=True).create()
            self._bytes[at + _KEY : at + _KEY + _DIGEST] = key
            self._words[_KEY // 8] = slot
            return slot
        finally:
            registry.unlock()


class SharedLock:
    """A lock shared by the workers of a group: a context manager, or `acquire` and `release`.

    ``with`` yields None, or the `LockHolder` that died inside: what it was changing may be half
    done, and is this holder's to repair. The holder after that is told nothing any more.

    Args:
        timeout: Seconds that ``with`` waits; None waits without limit.
    """

    def __init__(
        self, table: LockTable, name: str, rank: int, incarnation: int, timeout: float | None
    ) -> None:
        if not isinstance(name, str) or not name:  # pyright: ignore[reportUnnecessaryIsInstance] # a user's
            raise SpecError("name", name, "give the lock a name that is not empty")
        _check_timeout(timeout)
        self.name = name
        self._table = table
        self._slot = table.slot(name)
        self._key = (table, self._slot)
        self._rank = rank
        self._incarnation = incarnation
        self._timeout = timeout

    def acquire(self, timeout: float | None = None) -> LockHolder | None:
        """Take it; return None, or who died holding it.

        Args:
            timeout: Seconds to wait, 0 not to wait at all; None waits without limit.

        Raises:
            LockTimeout: somebody else had it all the while; it says who.
            WouldDeadlock: this thread has it already.
        """
        _check_timeout(timeout)
        held = _held()
        if self._key in held:
            msg = f"lock {self.name!r} is held by this thread already; it is not reentrant"
            raise WouldDeadlock(msg)
        if threading.get_native_id() != os.getpid():
            _watch_exec()
        memory = self._table.memory
        memory.keep(self._slot)  # before: whatever is raised in here, this thread may hold it
        died = self._take(None if timeout is None else time.monotonic() + timeout)
        if died is None:
            memory.let_go(self._slot)
            raise self._late(timeout)
        # Where nobody is noted it died on its way in or out, and nothing was cut short.
        before = self._table.holder(self._slot) if died else None
        self._table.enter(self._slot, self._rank, self._incarnation)
        held[self._key] = self.name
        return before

    def release(self) -> None:
        """Let it go.

        Raises:
            LockNotHeld: this thread does not have it.
        """
        held = _held()
        if self._key not in held:
            msg = f"lock {self.name!r} is not held by this thread"
            raise LockNotHeld(msg)
        del held[self._key]
        self._table.leave(self._slot)
        self._table.mutex(self._slot).unlock()
        self._table.memory.let_go(self._slot)

    def holder(self) -> LockHolder | None:
        """Return who has it just now, or died with it; None for nobody."""
        return self._table.holder(self._slot)

    def __enter__(self) -> LockHolder | None:
        return self.acquire(self._timeout)

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"<SharedLock {self.name!r}: {self.holder() or 'free'}>"

    def _take(self, deadline: float | None) -> bool | None:
        """Return whether its last holder died with it, or None at *deadline*."""
        table, slot = self._table, self._slot
        lock = table.mutex(slot)
        turnstile = table.mutex(slot, turnstile=True)
        while True:
            soon = time.monotonic() + _PATIENCE
            if turnstile.lock(soon if deadline is None else min(soon, deadline)) is not None:
                break
            # Who is in there may be stopped, and would keep a free lock from all.
            if table.is_anybodys(slot) and (died := lock.lock(0.0)) is not None:
                return died
            if deadline is not None and time.monotonic() >= deadline:
                return None
        try:
            return lock.lock(deadline)
        finally:
            turnstile.unlock()

    def _late(self, timeout: float | None) -> LockTimeout:
        assert timeout is not None
        holder = self.holder()
        return LockTimeout(self.name, timeout, "" if holder is None else str(holder))


def _check_timeout(timeout: object) -> None:
    number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
    if timeout is not None and not (number and timeout >= 0):  # type: ignore[operator]  # a number
        raise SpecError("timeout", timeout, "give seconds >= 0, or None for no limit")


class _Held(threading.local):
    """The locks that this thread holds, and their names. It dies with the thread, as they do."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.locks: dict[tuple[LockTable, int], str] = {}


_mine = _Held()


def _held() -> dict[tuple[LockTable, int], str]:
    if _mine.pid != os.getpid():  # a forked child has its parent's notes and none of its locks
        _mine.pid = os.getpid()
        _mine.locks = {}
    return _mine.locks


@cache
def _watch_exec() -> None:
    """Refuse `os.exec*` in a thread, other than the main one, that holds a lock.

    That thread takes the main thread's number before the kernel looks for what it holds, which is
    noted under its own: the lock would be nobody's for ever.
    """
    sys.addaudithook(_refuse_exec)


def _refuse_exec(event: str, _arguments: object) -> None:
    if event != "os.exec" or threading.get_native_id() == os.getpid() or not (held := _held()):
        return
    names = ", ".join(map(repr, held.values()))
    msg = f"os.exec in a thread that holds lock {names}: let go of it, or exec in the main thread"
    raise WouldDeadlock(msg)
