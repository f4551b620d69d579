"""Moments in which nothing is in flight: new calls are kept back until those that were sent ended.

Guarantees: between a `wait_idle` that returned True and its `resume` nothing new is sent, but for
what was made for that moment; who waits in vain, or is interrupted, keeps nobody back.

Left to others: what the moment is used for (`rank_group`, `core`). The lock is the plane's.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from .interrupts import uninterrupted

if TYPE_CHECKING:
    from phalanx.runtime import OwnedLock

    from .calls import Call
    from .reading import Reading
    from .seat import Seats
    from .sending import Sending
    from .settling import Settling
    from .turns import Turns


class Holding:
    """Keeps back the new calls of one group."""

    def __init__(
        self,
        lock: OwnedLock,
        *,
        seats: Seats,
        turns: Turns,
        reading: Reading,
        sending: Sending,
        settling: Settling,
    ) -> None:
        self._lock = lock
        self._seats = seats
        self._turns = turns
        self._reading = reading
        self._sending = sending
        self._settling = settling

    @property
    def count(self) -> int:
        """How many keep new calls back just now."""
        return self._sending.holds

    def wait_idle(self, deadline: float | None, *, waiting: bool = False) -> bool:
        """Keep new calls back; return True once every call that was sent has been answered.

        With *waiting* those that wait for their turn just now are sent and answered before that,
        unless somebody else keeps them back. Returns False at *deadline*; else `resume` must
        follow.
        """
        done = threading.Event()
        if waiting:
            self._tell_when_had_their_turn(done)
            if not done.wait(_until(deadline)):
                return False
            done.clear()
        ok = False
        self._hold_for(done)
        try:
            ok = done.wait(_until(deadline))
        finally:
            self._stop_holding_for(ok=ok)
        return ok

    @uninterrupted
    def resume(self) -> None:
        """Let calls go again."""
        with self._lock:
            self._sending.holds -= 1
            self._sending.pump()

    @uninterrupted
    def _hold_for(self, done: threading.Event) -> None:
        with self._lock:
            self._sending.holds += 1
            self._reading.watched += 1
            self._seats.when_idle(done)
            self._reading.see_to_it()

    @uninterrupted
    def _stop_holding_for(self, *, ok: bool) -> None:
        with self._lock:
            self._reading.watched -= 1
        if not ok:  # Ctrl-C too: a hold that nobody lifts would stop the group for good
            self.resume()

    @uninterrupted
    def _tell_when_had_their_turn(self, done: threading.Event) -> None:
        """Set *done* once all calls that wait just now have ended."""
        left: set[Call] = set()

        def end(call: Call) -> None:
            left.discard(call)
            if not left:
                done.set()

        with self._lock:
            if not self._sending.holds:
                left.update(self._turns)
            if not left:
                done.set()
                return
            for call in tuple(left):
                self._settling.watch(call, end)
            self._reading.see_to_it()


def _until(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())
