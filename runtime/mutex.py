"""A mutex in shared memory that the kernel takes from a holder who dies.

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
import os
import time

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
