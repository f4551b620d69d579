"""Moments in which nothing is in flight: new calls are kept back until those that were sent ended.

Guarantees: between a `wait_idle` that returned True and its `resume` nothing new is sent, but for
what was made for that moment; who waits in vain, or is interrupted, keeps nobody back. A finalizer
or signal handler that interrupts who keeps calls back may not wait for one.

Left to others: what the moment is used for (`rank_group`, `core`). The lock is the plane's.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from .interrupts import uninterrupted
from .latch import Latch

if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx.runtime import OwnedLock

    from .calls import Call
    from .reading import Reading
    from .seat import Seats
    from .sending import Sending
    from .settling import Settling


class Holding:
    """Keeps back the new calls of one group."""

    def __init__(
        self,
        lock: OwnedLock,
        *,
        seats: Seats,
        reading: Reading,
        sending: Sending,
        settling: Settling,
    ) -> None:
        self._lock = lock
        self._seats = seats
        self._reading = reading
        self._sending = sending
        self._settling = settling
        self._holds: dict[int, _Hold] = {}  # by the thread that keeps calls back, or is about to

    @property
    def count(self) -> int:
        """How many keep new calls back just now."""
        return self._sending.holds

    def is_mine(self) -> bool:
        """Whether this thread keeps calls back, so that it would wait for itself."""
        return threading.get_ident() in self._holds

    def wait_idle(self, deadline: float | None, *, every_call: bool = False) -> bool:
        """Keep new calls back; return True once every call that was sent has been answered.

        With *every_call* all that were made so far have ended before that, those too that wait for
        their turn or for a restart. Returns False at *deadline*. However it ends, `resume` must
        follow on the same thread, in a ``finally`` around this; or `leave_idle`, if it was True.
        """
        hold = _Hold()
        self._holds[threading.get_ident()] = hold
        if every_call and not self._wait_for_all(deadline):
            return False
        self._take(hold)
        if not hold.wait(deadline):
            return False
        self._stop_watching(hold)
        return True

    @uninterrupted
    def resume(self) -> None:
        """Let calls go again; does nothing where this thread keeps none back."""
        hold = self._holds.pop(threading.get_ident(), None)
        if hold is None:
            return
        self._stop_watching(hold)
        if hold.is_taken:
            with self._lock.asked():
                self._sending.holds -= 1
                self._sending.pump()
                self._reading.see_to_it()

    def leave_idle(self) -> None:
        """Let no call go again: this is the end."""
        self._holds.pop(threading.get_ident(), None)

    @uninterrupted
    def _take(self, hold: _Hold) -> None:
        with self._lock.asked():
            hold.is_taken = hold.is_watched = True
            self._sending.holds += 1
            self._reading.watched += 1
            self._seats.when_idle(hold)
            self._reading.see_to_it()

    @uninterrupted
    def _stop_watching(self, hold: _Hold) -> None:
        with self._lock.asked():
            if hold.is_watched:
                hold.is_watched = False
                self._reading.watched -= 1

    def _wait_for_all(self, deadline: float | None) -> bool:
        """Return True once every call made so far has ended, False at *deadline*."""
        done = Latch()
        left: set[Call] = set()

        def end(call: Call) -> None:
            left.discard(call)
            if not left:
                done.set()

        if not self._watch_all(left, end):
            return True
        ok = False
        try:
            ok = done.wait(deadline)
        finally:
            if not ok:
                self._unwatch(left, end)
        return ok

    @uninterrupted
    def _watch_all(self, left: set[Call], end: Callable[[Call], None]) -> bool:
        with self._lock.asked():
            left.update(self._settling.calls())
            for call in tuple(left):
                self._settling.watch(call, end)
            self._reading.see_to_it()
            return bool(left)

    @uninterrupted
    def _unwatch(self, left: set[Call], end: Callable[[Call], None]) -> None:
        with self._lock.asked():
            for call in tuple(left):
                self._settling.unwatch(call, end)


class _Hold(Latch):
    """What one thread has of it; a Ctrl-C may strike as soon as it has taken or given back some.

    Attributes:
        is_taken: Whether calls are kept back for it.
        is_watched: Whether answers are read at once for it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_taken = False
        self.is_watched = False
