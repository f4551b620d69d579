"""`CallQueue`: the calls of a group that have not been sent, and the choice of the next one.

- Calls are sent in the order in which they were made. A call that is sent again after a death goes
  before those made later.
- A call leaves once all of its ranks have room, so it has a slot on each before its first byte.
- At most *depth* calls wait, besides those whose callers wait for their outcome.

Pure; guarded by the plane's lock.
"""

from __future__ import annotations

import contextlib
from collections import deque
from typing import TYPE_CHECKING

from .call import COLLECTIVE, GATHER, POOL, SINGLE
from .reader import Ticket

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from phalanx.actors.spec.layout import Layout

    from .call import Call
    from .rank import RankSlot, RankTable

    Turn = tuple[Call, Sequence[RankSlot]]


class CallQueue:
    """The queues of one group.

    Args:
        layout: Of the ranks that calls are made for.
        depth: Calls that may wait, and calls that one rank may have been sent and not answered.

    Attributes:
        everyone: Calls for all ranks (COLLECTIVE and GATHER).
        alone: Calls for one named rank (SINGLE), by rank; without empty queues.
        pool: Calls for any idle rank.
        turn: The call that has been taken last, and its slots, until it is sent; else None.
        blocked: Tickets of the callers that wait for a place.
        closed: Returns the error of new calls; None while they are accepted.
    """

    def __init__(self, layout: Layout, depth: int) -> None:
        self._set(layout)
        self.everyone: deque[Call] = deque()
        self.alone: dict[int, deque[Call]] = {}
        self.pool: deque[Call] = deque()
        self.turn: Turn | None = None
        self.blocked: deque[Ticket] = deque()
        self.closed: Callable[[], BaseException] | None = None
        self._depth = depth

    def __len__(self) -> int:
        waiting = len(self.everyone) + len(self.pool)
        return waiting + sum(map(len, self.alone.values())) if self.alone else waiting

    def __iter__(self) -> Iterator[Call]:
        for queue in (self.everyone, self.pool, *self.alone.values()):
            yield from list(queue)

    @property
    def is_full(self) -> bool:
        """Whether the next caller must wait for a place."""
        if self.alone or self.pool:
            return len(self) >= self._depth
        return len(self.everyone) >= self._depth

    def add(self, call: Call) -> None:
        """Append *call*; put one that is sent in a pause first."""
        if call.of_output:
            call.follow(self._output_rank)
        if call.under_hold:
            self._queue(call).appendleft(call)
        elif call.shape is COLLECTIVE:
            self.everyone.append(call)
        else:
            self._queue(call).append(call)

    def put_back(self, calls: Iterable[Call]) -> None:
        """Put *calls* first again, in the order in which they were made, as if never sent."""
        for call in sorted(calls, key=lambda each: each.seq, reverse=True):
            if call.shape is POOL:
                call.rank = None
            call.failed = None
            call.wire = 0
            call.answers.clear()
            self._queue(call).appendleft(call)  # last: one in a queue has no number

    def remove(self, call: Call) -> None:
        """Remove *call*, which may have been taken already."""
        queue = self._queue(call)
        with contextlib.suppress(ValueError):
            queue.remove(call)
        if call.shape is SINGLE and not queue:
            assert call.rank is not None
            del self.alone[call.rank]

    def expect(self, layout: Layout) -> list[Call]:
        """Take calls for *layout* from now on; remove and return those that do not fit."""
        self._set(layout)
        misfits: list[Call] = []
        for call in self:
            if call.of_output:
                call.follow(self._output_rank)
            if not call.fits(self.size):
                self.remove(call)
                misfits.append(call)
        return misfits

    def _set(self, layout: Layout) -> None:
        self.size, self._output_rank = layout.world_size, layout.output_rank

    def clear(self) -> None:
        """Remove every call."""
        self.everyone.clear()
        self.pool.clear()
        self.alone.clear()

    # --- the next call ------------------------------------------------------------------

    def take(self, table: RankTable, *, is_open: bool, paused: bool) -> Turn | None:
        """Remove and return the call whose turn it is, and its slots; None if none may leave.

        It is noted as `turn`, and no call stands between that and its removal: an exception is
        thrown in before the call has been taken, or after.

        Args:
            table: The slots of the group.
            is_open: Whether collective calls may leave.
            paused: Whether only calls made for a pause may leave.
        """
        everyone = self.everyone
        first = None
        if everyone and is_open:
            first = everyone[0]
            slots = table.all
            depth = self._depth
            for slot in slots:
                if len(slot.sent) >= depth or slot.ended or slot.channel.backed_up:
                    break
            else:
                if slots and (first.under_hold or not paused):
                    # An earlier call for one rank takes the room there first.
                    if self.alone and not paused:
                        turn = self._take_alone(table, before=first.seq)
                        if turn is not None:
                            return turn
                    self.turn = turn = first, slots
                    del everyone[0]
                    return turn
        if paused:
            return None
        # Calls of one rank overtake collective ones only while those wait for a restart.
        if self.alone:
            turn = self._take_alone(table, before=None if first is None else first.seq)
            if turn is not None:
                return turn
        pool = self.pool
        if pool and first is None:
            for slot in table:
                if not slot.ended and not slot.sent:
                    self.turn = turn = pool[0], (slot,)
                    del pool[0]
                    return turn
        return None

    def _take_alone(self, table: RankTable, *, before: int | None) -> Turn | None:
        """Remove and return a call for one rank, made *before* that one."""
        for rank, queue in self.alone.items():
            slot = table.at(rank)
            if slot is None or not slot.has_room(self._depth):
                continue
            if before is None or queue[0].seq <= before:
                self.turn = turn = queue[0], (slot,)
                del queue[0]
                if not queue:
                    del self.alone[rank]
                return turn
        return None

    def _queue(self, call: Call) -> deque[Call]:
        shape = call.shape
        if shape is COLLECTIVE or shape is GATHER:
            return self.everyone
        if shape is POOL:
            return self.pool
        assert call.rank is not None
        return self.alone.setdefault(call.rank, deque())

    # --- admission ----------------------------------------------------------------------

    def block(self, wake: Callable[[], None] | None = None) -> Ticket:
        """Return a ticket that is done once there are places again; *wake* is called then."""
        ticket = Ticket(wake)
        self.blocked.append(ticket)
        return ticket

    def unblock(self, ticket: Ticket) -> None:
        """Withdraw *ticket*."""
        with contextlib.suppress(ValueError):
            self.blocked.remove(ticket)

    def admit(self, fulfil: Callable[[Ticket], None], *, everyone: bool = False) -> None:
        """Admit blocked callers once half of the places are free, or *everyone*.

        One at a time would have a caller that makes calls in a row sleep and wake for each.
        """
        free = len(self.blocked) if everyone else self._depth - len(self)
        if everyone or free >= self._depth - self._depth // 2:
            while free > 0 and self.blocked:
                ticket = self.blocked[0]
                if not ticket.done:
                    fulfil(ticket)
                    free -= 1
                del self.blocked[0]  # after it: an exception thrown in between would lose it
