"""`Pauses`: the threads for which new calls are queued until no call is in flight.

Guarded by the plane's lock, which the methods for callers take.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from phalanx.actors.signals.interrupts import uninterrupted

from .reader import Ticket

if TYPE_CHECKING:
    from .call import Call
    from .plane import CallPlane
    from .rank import RankTable
    from .reader import Reader


class Pauses:
    """The pauses of one group.

    Attributes:
        idle: Done once no rank owes an answer.
    """

    def __init__(self, plane: CallPlane, table: RankTable, reader: Reader) -> None:
        self._plane = plane
        self._table = table
        self._reader = reader
        self._threads: dict[int, bool] = {}  # whether dispatch is held for it yet
        self.idle: list[Ticket] = []

    def is_mine(self) -> bool:
        """Whether this thread has begun a pause."""
        return threading.get_ident() in self._threads

    def begin(self, deadline: float | None, *, every_call: bool = False) -> bool:
        """Queue new calls from now on; return True once no call is in flight, False at *deadline*.

        With *every_call* new calls are sent until all that were made before have ended, queued ones
        included. However it ends, `end` must follow on the same thread, in a ``finally``; or
        `keep`, if it was True. Between the two this thread may not wait for a call.
        """
        self._threads[threading.get_ident()] = False
        if every_call and not all(self._reader.wait(call, deadline) for call in self._made()):
            return False
        return self._reader.wait(self._hold(), deadline)

    @uninterrupted
    def end(self) -> None:
        """Send calls again; does nothing if this thread has not paused dispatch."""
        if self._threads.pop(threading.get_ident(), False):
            with self._plane.lock.asked():
                self._plane.holds -= 1
                self._plane.pump()
                self._reader.ensure()

    def keep(self) -> None:
        """Send no call again: the group is about to end."""
        self._threads.pop(threading.get_ident(), None)

    def notify_idle(self) -> None:
        """Fulfil the tickets in *idle* if no rank owes an answer. Under the lock."""
        if not self._table.owed:
            for ticket in self.idle:
                self._reader.fulfil(ticket)
            self.idle.clear()

    @uninterrupted
    def _made(self) -> list[Call]:
        with self._plane.lock.asked():
            return list(self._plane.unsettled())

    @uninterrupted
    def _hold(self) -> Ticket:
        ticket = Ticket()
        with self._plane.lock.asked():
            self._plane.holds += 1
            self._threads[threading.get_ident()] = True
            self.idle.append(ticket)
            self.notify_idle()
        return ticket
