"""Named locks between processes, which the kernel releases when their holder dies.

The locks that the workers of one group share, by name.

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

Memory that processes share and the kernel reads last of all: that of their locks.

Guarantees: it is unmapped when nothing refers to it any more, and not while anybody is noted as
using it: then, if need be, only by the end of the process. It keeps no descriptor.

Why: what a thread holds is noted in memory of the process, which the kernel reads as the thread
ends, after all that the interpreter frees at its own end; and which the C library writes to
whenever the same thread locks something else.

Left to others: what lies in it (`locks`).

A mutex in shared memory that the kernel takes from a holder who dies.

Guarantees: whatever ends the thread or process that holds it, at whatever instruction, the next
one to lock it gets it, and is told; a wait ends at its deadline, and lets signal handlers run
meanwhile. Threads of one process exclude each other as processes do.

How: every thread has a list of the robust mutexes it holds, and of the one it is about to lock or
unlock, which the kernel walks when the thread ends. That is why the lock itself is the C library's
and not one of ours: between taking a lock in memory and noting who has it there would be an
instruction at which to die.

Left to others: which memory it lies in, and what is repaired after a death (`locks`).

Source: ``pthread_mutexattr_setrobust(3)``; "robust futexes" in the kernel's documentation.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
import threading
import time
import weakref
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from phalanx.runtime.linux import descriptors
from phalanx.supervision import LockNotHeld, LockTimeout, RuntimeFault, SpecError, WouldDeadlock

if TYPE_CHECKING:
    from types import TracebackType


SIZE = 64
"""Bytes that one takes: no C library's is larger than 48, and none shares a line with the next."""

_PROCESS_SHARED = 1
_ROBUST = 1
_ERROR_CHECK = 2
_SLICE = 0.1  # seconds in C before Python may run a signal handler
_AGAIN = 0.001  # seconds between attempts where none can be limited by the right clock

_libc = ctypes.CDLL(None)
_on_monotonic = hasattr(_libc, "pthread_mutex_clocklock")  # glibc has it since 2.30


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Mutex:
    """One mutex at *address*, which *owner* keeps mapped."""

    def __init__(self, address: int, owner: object) -> None:
        self._at = ctypes.c_void_p(address)
        self._owner = owner

    def create(self) -> None:
        """Make the memory a mutex that nobody holds; nobody else may use it yet."""
        attributes = ctypes.create_string_buffer(SIZE)
        _check(_libc.pthread_mutexattr_init(attributes))
        _check(_libc.pthread_mutexattr_setpshared(attributes, _PROCESS_SHARED))
        _check(_libc.pthread_mutexattr_setrobust(attributes, _ROBUST))
        _check(_libc.pthread_mutexattr_settype(attributes, _ERROR_CHECK))
        _check(_libc.pthread_mutex_init(self._at, attributes))

    def lock(self, deadline: float | None) -> bool | None:
        """Take it; return whether its last holder died with it, or None at *deadline*.

        Raises:
            OSError: this thread has it already (EDEADLK).
        """
        while True:
            now = time.monotonic()
            wait = _SLICE if deadline is None else min(_SLICE, max(0.0, deadline - now))
            result = _lock(self._at, wait)
            match result:
                case 0:
                    return False
                case errno.EOWNERDEAD:
                    # At once: were it unlocked before, nobody could ever lock it again.
                    _check(_libc.pthread_mutex_consistent(self._at))
                    return True
                case errno.ETIMEDOUT:
                    if deadline is not None and time.monotonic() >= deadline:
                        return None
                case _:
                    _check(result)

    def unlock(self) -> None:
        """Let it go.

        Raises:
            OSError: this thread does not have it (EPERM).
        """
        _check(_libc.pthread_mutex_unlock(self._at))


def _lock(at: ctypes.c_void_p, wait: float) -> int:
    result: int = _libc.pthread_mutex_trylock(at)
    if result != errno.EBUSY or wait <= 0:
        return errno.ETIMEDOUT if result == errno.EBUSY else result
    clock = time.CLOCK_MONOTONIC
    until = time.clock_gettime_ns(clock) + int(wait * 1e9)
    if _on_monotonic:
        end = ctypes.byref(_Time(until // 10**9, until % 10**9))
        return int(_libc.pthread_mutex_clocklock(at, clock, end))
    # What there is else waits by the wall clock: for hours, were that set back. So it waits not.
    past = ctypes.byref(_Time(0, 0))
    while True:
        result = _libc.pthread_mutex_timedlock(at, past)
        if result != errno.ETIMEDOUT or time.clock_gettime_ns(clock) >= until:
            return result
        time.sleep(_AGAIN)


def _check(code: int) -> None:
    if code:
        raise OSError(code, os.strerror(code))


_libc_mmap = ctypes.CDLL(None, use_errno=True)
_libc_mmap.mmap.restype = ctypes.c_void_p
_libc_mmap.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t),
    *(ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long),
)
_libc_mmap.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_FAILED = ctypes.c_void_p(-1).value


class LockMemory:
    """The first *size* bytes of the file *fd*, mapped and shared; *fd* may be closed then.

    Attributes:
        address: Where it lies in this process.
        words: It as words, for what must be written whole: a kill may come between two stores.
    """

    def __init__(self, fd: int, size: int) -> None:
        # By hand: the module mmap keeps a descriptor of its own for each.
        address = _libc_mmap.mmap(
            None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0
        )
        if address == _FAILED:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        self.address: int = address
        weakref.finalize(self, _libc_mmap.munmap, address, size).atexit = False
        self.bytes = memoryview((ctypes.c_char * size).from_address(address)).cast("B")
        self.words = self.bytes.cast("Q")

    def keep(self, what: int) -> None:
        """Note that this thread uses *what* in it."""
        _kept.add((threading.get_ident(), self, what))

    def let_go(self, what: int) -> None:
        """Note that this thread uses *what* no more."""
        _kept.discard((threading.get_ident(), self, what))


_kept: set[tuple[int, LockMemory, int]] = set()
# The interpreter frees what modules refer to before its process ends. One reference too many keeps
# this set, and every memory in it, from that.
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_kept))


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
        return descriptors.own(fd)

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
