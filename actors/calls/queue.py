"""The calls of a group that wait for their turn.

Guarantees: calls leave in the order in which they came; what is sent again after a death stands
before what came later; no more than *depth* wait, besides those whose callers wait for them.

Left to others: whose turn it is (`sending`), what becomes of a call that is taken out
(`settling`). Everything here is under the plane's lock.
"""

from __future__ import annotations

import contextlib
from collections import deque
from typing import TYPE_CHECKING

from .call import Shape
from .reader import Ticket

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from .call import Call


class Turns:
    """The queues.

    Attributes:
        everyone: Calls for all ranks (COLLECTIVE and GATHER).
        alone: Calls for one named rank (SINGLE), by rank; without empty queues.
        pool: Calls for any idle rank.
        waiting: Submitters that wait for a place.
        size: The ranks that calls are made for.
        closed: Returns what new calls are refused with; None while they are accepted.
    """

    def __init__(self, size: int, depth: int) -> None:
        self.size = size
        self.everyone: deque[Call] = deque()
        self.alone: dict[int, deque[Call]] = {}
        self.pool: deque[Call] = deque()
        self._depth = depth
        self.waiting: deque[Ticket] = deque()
        self.closed: Callable[[], BaseException] | None = None

    def __len__(self) -> int:
        waiting = len(self.everyone) + len(self.pool)
        return waiting + sum(map(len, self.alone.values())) if self.alone else waiting

    def __iter__(self) -> Iterator[Call]:
        for queue in (self.everyone, self.pool, *self.alone.values()):
            yield from list(queue)

    @property
    def is_full(self) -> bool:
        """Whether the next one must wait for a place."""
        if self.alone or self.pool:
            return len(self) >= self._depth
        return len(self.everyone) >= self._depth

    def add(self, call: Call) -> None:
        """Put *call* last."""
        self._queue(call).append(call)

    def put_back(self, calls: Iterable[Call]) -> None:
        """Put *calls* first again, oldest before younger; they are as if never sent."""
        for call in sorted(calls, key=lambda each: each.seq, reverse=True):
            if call.shape is Shape.POOL:
                call.rank = None
            self._queue(call).appendleft(call)
            call.failed = None
            call.wire = 0
            call.answers.clear()

    def next_for(self, rank: int) -> Call:
        """Take out the first call for *rank* alone; there is one."""
        queue = self.alone[rank]
        call = queue.popleft()
        if not queue:
            del self.alone[rank]
        return call

    def remove(self, call: Call) -> None:
        """Take *call* out, wherever it is; it may have been taken already."""
        queue = self._queue(call)
        with contextlib.suppress(ValueError):
            queue.remove(call)
        if call.shape is Shape.SINGLE and not queue:
            assert call.rank is not None
            del self.alone[call.rank]

    def expect(self, size: int) -> list[Call]:
        """Have calls made for *size* ranks; take out and return those that need others."""
        self.size = size
        misfits = [call for call in self if not call.fits(size)]
        for call in misfits:
            self.remove(call)
        return misfits

    def clear(self) -> None:
        """Have nothing waiting."""
        self.everyone.clear()
        self.pool.clear()
        self.alone.clear()

    def _queue(self, call: Call) -> deque[Call]:
        shape = call.shape
        if shape is _COLLECTIVE or shape is Shape.GATHER:
            return self.everyone
        if shape is Shape.POOL:
            return self.pool
        assert call.rank is not None
        return self.alone.setdefault(call.rank, deque())

    # --- places -------------------------------------------------------------------------

    def ask_for_a_place(self) -> Ticket:
        """Return a ticket that is done once there are places again."""
        ticket = Ticket()
        self.waiting.append(ticket)
        return ticket

    def give_up(self, ticket: Ticket) -> None:
        """Wait for that place no longer."""
        with contextlib.suppress(ValueError):
            self.waiting.remove(ticket)

    def admit(self, wake: Callable[[Ticket], None], *, everyone: bool = False) -> None:
        """Let in those who wait for a place, once half of the places are free, or *everyone*.

        One at a time would have a caller that submits a row of calls sleep and wake for each.
        """
        room = self.waiting
        if not (everyone or len(self) <= self._depth // 2):
            return
        free = len(room) if everyone else self._depth - len(self)
        while room and free > 0:
            ticket = room.popleft()
            ticket.done = True
            wake(ticket)
            free -= 1


_COLLECTIVE = Shape.COLLECTIVE  # to look a member of an enum up takes as long as a call
