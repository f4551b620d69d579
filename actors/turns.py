"""The calls of a group that wait for their turn.

Guarantees: calls leave in the order in which they came; what is sent again after a death stands
before what came later; no more than *depth* wait, besides those whose callers wait for them.

Left to others: whose turn it is (`plane`), what becomes of a call that is taken out (`settling`).
Everything here is under the plane's lock.
"""

from __future__ import annotations

import contextlib
from collections import deque
from typing import TYPE_CHECKING

from .calls import Call, Shape
from .reading import Ticket

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


class Turns:
    """The queues.

    Attributes:
        everyone: Calls for all ranks (COLLECTIVE and GATHER).
        alone: Calls for one named rank (SINGLE), by rank.
        pool: Calls for any idle rank.
    """

    def __init__(self, size: int, depth: int) -> None:
        self.everyone: deque[Call] = deque()
        self.alone: list[deque[Call]] = [deque() for _ in range(size)]
        self.pool: deque[Call] = deque()
        self._depth = depth
        self._room: deque[Ticket] = deque()  # submitters that wait for a place

    def __len__(self) -> int:
        return len(self.everyone) + len(self.pool) + sum(map(len, self.alone))

    def __iter__(self) -> Iterator[Call]:
        for queue in (self.everyone, self.pool, *self.alone):
            yield from list(queue)

    @property
    def is_full(self) -> bool:
        """Whether the next one must wait for a place."""
        return len(self) >= self._depth

    def add(self, call: Call) -> None:
        """Put *call* last."""
        self._queue(call).append(call)

    def put_back(self, calls: Iterable[Call]) -> None:
        """Put *calls* first again, oldest before younger; they are as if never sent."""
        for call in sorted(calls, key=lambda each: each.seq, reverse=True):
            self._queue(call).appendleft(call)
            call.failed = None
            call.wire = 0
            call.answers.clear()
            if call.shape is Shape.POOL:
                call.rank = None

    def remove(self, call: Call) -> None:
        """Take *call* out, wherever it is; it may have been taken already."""
        with contextlib.suppress(ValueError, IndexError):
            self._queue(call).remove(call)

    def resize(self, size: int) -> list[Call]:
        """Have queues for *size* ranks; take out and return calls for ranks that are no more."""
        lost = [call for queue in self.alone[size:] for call in queue]
        self.alone = (self.alone + [deque[Call]() for _ in range(size)])[:size]
        return lost

    def clear(self) -> None:
        """Have nothing waiting."""
        for queue in (self.everyone, self.pool, *self.alone):
            queue.clear()

    def _queue(self, call: Call) -> deque[Call]:
        match call.shape:
            case Shape.COLLECTIVE | Shape.GATHER:
                return self.everyone
            case Shape.SINGLE:
                assert call.rank is not None
                return self.alone[call.rank]
            case Shape.POOL:
                return self.pool

    # --- places -------------------------------------------------------------------------

    def ask_for_a_place(self) -> Ticket:
        """Return a ticket that is done once a place is free."""
        ticket = Ticket()
        self._room.append(ticket)
        return ticket

    def give_up(self, ticket: Ticket) -> None:
        """Wait for that place no longer."""
        with contextlib.suppress(ValueError):
            self._room.remove(ticket)

    def admit(self, wake: Callable[[Ticket], None], *, everyone: bool = False) -> None:
        """Let in as many as there are places for, or *everyone*."""
        room = self._room
        free = len(room) if everyone else self._depth - len(self) if room else 0
        while room and free > 0:
            ticket = room.popleft()
            ticket.done = True
            wake(ticket)
            free -= 1
