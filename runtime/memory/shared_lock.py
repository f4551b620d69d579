"""Named locks between processes, which the kernel releases when their holder ends.

Guarantees: one holder per name among all threads of all processes that share the lock file; a
holder that ends without `release` (SIGKILL at any instruction, exit, exec, end of its thread) is
followed by the next waiter, which gets its record; waiters get the lock in the order in which
they came, to the millisecond. All state is in one anonymous file: nothing is left behind.

How: the file is a table of names and holders' records. Locks are byte ranges far behind it, which
need no memory (``F_OFD_SETLK``). Each acquisition opens the file anew and locks through that open
file description, so threads exclude each other as processes do. The first byte of a name's range is
the lock, the others are its queue: a waiter read-locks the byte of the millisecond in which it
came, and takes the lock together with every byte before its own, which succeeds only if the lock is
free and no earlier waiter is left. A process that ends leaves the queue with its description; one
that is stopped in it is passed over.

The kernel has no wait with a deadline for such a lock, so waiters poll.
"""

from __future__ import annotations

import fcntl
import os
import struct
import threading
import time
from dataclasses import dataclass

from phalanx.runtime.linux import descriptors
from phalanx.supervision import (
    LockNotHeld,
    LockTimeout,
    RuntimeFault,
    SpecError,
    WouldDeadlock,
    check_seconds,
)

MOST_LOCKS = 1023
"""Names that the locks of one group can have."""

_SLOT = 64  # bytes of a name in the table: its digest, then its holder's record
_DIGEST = 16
_RANGE = 1 << 40  # bytes of one lock's range; the range of number 0 guards the table
_QUEUE = 1 << 31  # bytes of its queue: its milliseconds repeat after 24 days
_FLOCK = struct.Struct("hhqqi4x")  # type, whence, start, length, pid
# rank, incarnation, since in ns, pid or 0, when it was released or the holder found dead in ns or 0
_RECORD = struct.Struct("qqqqq")
_OUT_OF_TURN_AFTER = 50_000_000  # ns that a lock must have been free to be taken out of turn
_POLL = (0.0002, 0.001)  # seconds between attempts, at first and at most


@dataclass(frozen=True, slots=True)
class LockHolder:
    """The present or last holder of a shared lock.

    Attributes:
        since: When it got it, in seconds on this machine's monotonic clock.
    """

    rank: int
    incarnation: int
    pid: int
    since: float

    def __str__(self) -> str:
        return f"rank {self.rank} #{self.incarnation} (pid {self.pid})"


def create_lock_file() -> int:
    """Return the descriptor of a new file of locks, which is the caller's to close."""
    return os.memfd_create("phalanx-locks")


def close_lock_file(file: int) -> None:
    """Close a file of locks; this thread, like one that ends, releases those of it that it has."""
    for key in [key for key in _held() if key[0] == file]:
        _held().pop(key).close()
    os.close(file)


class SharedLock:
    """A lock shared by the workers of a group: a context manager, or `acquire` and `release`.

    ``with`` yields None, or the `LockHolder` that died inside: what it was changing may be half
    done, and is this holder's to repair. The next holder does not get that notice again.

    Args:
        file: The descriptor of the lock file; it must stay open.
        timeout: Seconds that ``with`` waits; None waits without limit.
    """

    def __init__(
        self, file: int, name: str, rank: int, incarnation: int, timeout: float | None
    ) -> None:
        if not isinstance(name, str) or not name:  # pyright: ignore[reportUnnecessaryIsInstance] # a user's
            raise SpecError("name", name, "give the lock a name that is not empty")
        _check_timeout(timeout)
        number = _number(file, name)
        self.name = name
        self._file = file
        self._record_at = (number - 1) * _SLOT + _DIGEST
        self._at = number * _RANGE
        self._key = (file, number)
        self._rank = rank
        self._incarnation = incarnation
        self._timeout = timeout

    def acquire(self, timeout: float | None = None) -> LockHolder | None:
        """Take it; return None, or the holder that died with it.

        Args:
            timeout: Seconds to wait, 0 not to wait at all; None waits without limit.

        Raises:
            LockTimeout: another holder had it all the while; the error names it.
            WouldDeadlock: this thread has it already.
            OSError: this process has no descriptor left.
        """
        _check_timeout(timeout)
        held = _held()
        if self._key in held:
            msg = f"lock {self.name!r} is held by this thread already; it is not reentrant"
            raise WouldDeadlock(msg)
        description = _Description(self._file)
        with descriptors.closed_on_error(description):
            self._wait(description, timeout)
            died = self.holder()  # None if that died on its way in or out: nothing was cut short
            record = (self._rank, self._incarnation, time.monotonic_ns(), os.getpid(), 0)
            os.pwrite(self._file, _RECORD.pack(*record), self._record_at)
        held[self._key] = description
        return died

    def release(self) -> None:
        """Let it go.

        Raises:
            LockNotHeld: this thread does not have it.
        """
        description = _held().pop(self._key, None)
        if description is None:
            raise LockNotHeld(f"lock {self.name!r} is not held by this thread")
        os.pwrite(self._file, _RECORD.pack(0, 0, 0, 0, time.monotonic_ns()), self._record_at)
        description.close()

    def holder(self) -> LockHolder | None:
        """Return the holder of this moment, or the one that died with it; None if it is free."""
        rank, incarnation, since, pid, _ = self._record()
        return LockHolder(rank, incarnation, pid, since / 1e9) if pid else None

    def __enter__(self) -> LockHolder | None:
        return self.acquire(self._timeout)

    def __exit__(self, *_: object) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"<SharedLock {self.name!r}: {self.holder() or 'free'}>"

    def _record(self) -> tuple[int, ...]:
        record = os.pread(self._file, _RECORD.size, self._record_at)
        return _RECORD.unpack(record.ljust(_RECORD.size, b"\0"))

    def _wait(self, description: _Description, timeout: float | None) -> None:
        """Wait in the queue, then lock."""
        start = time.monotonic()
        queue = self._at + 1
        place = queue + int(start * 1000) % _QUEUE
        queued = False
        pause, longest = _POLL
        while not (
            description.lock(fcntl.F_WRLCK, self._at, place)
            or (
                self._is_anybodys()
                and description.lock(fcntl.F_WRLCK, self._at, queue)
                # Still: it may have been released since, and be the first one's in the queue.
                and (self._stays_anybodys() or not description.lock(fcntl.F_UNLCK, self._at, queue))
            )
        ):
            left = longest
            if timeout is not None and (left := start + timeout - time.monotonic()) <= 0:
                holder = self.holder()
                raise LockTimeout(self.name, timeout, "" if holder is None else str(holder))
            queued = queued or description.lock(fcntl.F_RDLCK, place, place + 1)
            time.sleep(min(pause, left))
            pause = min(2 * pause, longest)
        description.lock(fcntl.F_UNLCK, queue, queue + _QUEUE)

    def _is_anybodys(self) -> bool:
        """Return whether the first in the queue seems to be stopped.

        True also while there is a holder: then the lock is not to be had.
        """
        _, _, _, pid, released = self._record()
        is_held = bool(pid) and not released
        return is_held or time.monotonic_ns() - released >= _OUT_OF_TURN_AFTER

    def _stays_anybodys(self) -> bool:
        """Return the same once this thread has it: one whose holder has died is free from now."""
        *holder, released = self._record()
        if holder[-1] and not released:
            os.pwrite(self._file, _RECORD.pack(*holder, time.monotonic_ns()), self._record_at)
        return self._is_anybodys()


class _Description:
    """An open file description of the lock file. The kernel unlocks what it holds at its end.

    It ends with its last reference, hence with the thread that has it, and with the process. A
    forked child closes its copy (`descriptors`).
    """

    def __init__(self, file: int) -> None:
        self._pid = 0  # if there is no descriptor left
        self._fd = descriptors.own(os.open(f"/proc/self/fd/{file}", os.O_RDWR))
        self._pid = os.getpid()

    def lock(self, kind: int, start: int, end: int) -> bool:
        """Lock or unlock those bytes; return False if another description has some of them."""
        request = _FLOCK.pack(kind, os.SEEK_SET, start, end - start, 0)
        try:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, request)
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        """Unlock everything, also if a fork by C code has a copy, and close."""
        self.lock(fcntl.F_UNLCK, 0, 0)
        self._pid = 0
        descriptors.close(self._fd)

    def __del__(self) -> None:
        if self._pid == os.getpid():
            descriptors.close(self._fd)


def _number(file: int, name: str) -> int:
    """Return the number of *name*, at least 1, entering it into the table if it is new.

    Raises:
        RuntimeFault: there are too many names.
    """
    import hashlib  # noqa: PLC0415  # takes longer to import than most workers need for a lock

    digest = hashlib.blake2b(name.encode(errors="surrogatepass"), digest_size=_DIGEST).digest()
    names = _names(file)
    if digest not in names:
        description = _Description(file)
        try:
            while not description.lock(fcntl.F_WRLCK, 0, 1):
                time.sleep(_POLL[0])
            names = _names(file)
            if digest not in names:
                if len(names) == MOST_LOCKS:
                    msg = f"lock {name!r}: the group has {MOST_LOCKS} other locks; share some"
                    raise RuntimeFault(msg)
                os.pwrite(file, digest, len(names) * _SLOT)
                names.append(digest)
        finally:
            description.close()
    return names.index(digest) + 1


def _names(file: int) -> list[bytes]:
    table = os.pread(file, MOST_LOCKS * _SLOT, 0)
    return [table[at : at + _DIGEST] for at in range(0, len(table), _SLOT)]


def _check_timeout(timeout: object) -> None:
    if timeout is not None:
        check_seconds("timeout", timeout, finite=False)


class _Held(threading.local):
    """The locks that this thread holds. It dies with the thread, and they with it."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.locks: dict[tuple[int, int], _Description] = {}


_mine = _Held()


def _held() -> dict[tuple[int, int], _Description]:
    if _mine.pid != os.getpid():  # a forked child has its parent's notes and none of its locks
        _mine.pid = os.getpid()
        _mine.locks = {}
    return _mine.locks
