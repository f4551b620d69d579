"""Locks that detect re-entry by a finalizer or a signal handler.

A finalizer runs on the thread on which the collector runs, a signal handler between any two steps
of the main thread. Either may interrupt a method of phalanx that holds a lock, and call phalanx: a
plain lock would wait for its own holder for ever.

A Ctrl-C is deferred while the main thread holds one of these locks (`is_holding`).
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import TYPE_CHECKING

from phalanx.supervision import WouldDeadlock

if TYPE_CHECKING:
    from collections.abc import Callable

    class _RLock:
        """The interpreter's class, which its stubs declare final and without the owner."""

        def acquire(self, blocking: bool = ..., timeout: float = ...) -> bool: ...
        def release(self) -> None: ...
        def __enter__(self) -> bool: ...
        def __exit__(self, *_: object) -> None: ...
        def _is_owned(self) -> bool: ...

else:
    from _thread import RLock as _RLock


class AskableLock(_RLock):
    """One whose holder can ask whether it is; a user's code may run under it."""

    __slots__ = ()

    def is_mine(self) -> bool:
        """Whether this thread has it."""
        return self._is_owned()  # as `threading.Condition` does

    if not TYPE_CHECKING:
        is_mine = _RLock._is_owned  # noqa: SLF001  # at no cost of its own


class ReentrantLock(AskableLock):
    """A lock for methods that may be called in the middle of themselves."""

    def __init__(self) -> None:
        super().__init__()
        _all.add(weakref.ref(self, _all.discard))


class OwnedLock:
    """A lock whose holder gets an error if it takes it again.

    Taken by ``with lock.asked():``, since between the return of an `__enter__` in Python and the
    body of its ``with`` an exception may strike, and the lock would stay held.

    Args:
        inner: Each returns whether this thread has one of the locks that are taken under this one.
            A thread that was interrupted under such a lock may not take this one: its holder may
            wait for that lock.

    Attributes:
        is_mine: Returns whether this thread has it.
        unasked: The same lock without the check, for callers that have made it (`is_inside`): the
            hot path, at two thirds of the cost.
    """

    __slots__ = ("_inner", "is_mine", "unasked")

    def __init__(self, *inner: Callable[[], bool]) -> None:
        self.unasked = ReentrantLock()
        self.is_mine = self.unasked.is_mine
        self._inner = inner

    def is_inside(self) -> bool:
        """Whether this thread may not take it."""
        if self.is_mine():
            return True
        for each in self._inner:  # noqa: SIM110  # any() takes three times as long
            if each():
                return True
        return False

    def asked(self) -> ReentrantLock:
        """Return the lock, for a ``with``.

        Raises:
            WouldDeadlock: this thread has it, or one of those that are taken under it.
        """
        if self.is_inside():
            raise called_from_inside("this call")
        return self.unasked


_all: set[weakref.ref[ReentrantLock]] = set()


def is_holding() -> bool:
    """Return whether this thread is under any `ReentrantLock` or `OwnedLock`. Takes none itself."""
    for each in list(_all):  # in one step: other threads make locks
        lock = each()
        if lock is not None and lock.is_mine():
            return True
    return False


class _Occupied:
    """The threads that other threads wait for: they build a group, serve one, or run the loop.

    As a context manager it adds the calling thread. A finalizer or signal handler that interrupts
    such a thread must not wait: it may wait for what the interrupted code is about to do.
    """

    def __init__(self) -> None:
        self._threads: set[int] = set()
        # In a forked child there are none: its threads may get the same numbers.
        os.register_at_fork(after_in_child=self._threads.clear)

    def is_mine(self) -> bool:
        """Whether the calling thread is one of them."""
        return threading.get_ident() in self._threads

    def __enter__(self) -> None:
        self._threads.add(threading.get_ident())

    def __exit__(self, *_: object) -> None:
        self._threads.discard(threading.get_ident())


occupied = _Occupied()


def called_from_inside(what: str) -> WouldDeadlock:
    """Return the error of *what*, called by a finalizer or handler that interrupted our code."""
    return WouldDeadlock(
        f"{what}: called by a finalizer or signal handler that interrupted phalanx on this thread; "
        "make the call from another thread"
    )
