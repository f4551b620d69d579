"""What streams have brought, until somebody takes it.

Guarantees: an item is kept only for a stream that is open; taking it lets its rank make another;
a stream that has ended, however, has told its workers, and whoever waits for it.

Left to others: the stream as its taker sees it (`streams`). Everything here is under the plane's
lock, but for `abandon`.
"""

from __future__ import annotations

import math
import time
from collections import deque
from functools import partial
from typing import TYPE_CHECKING

from phalanx.runtime import Kind

from .reading import Ticket

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from phalanx.runtime import Frame, Hub

    from .calls import Call
    from .incoming import Incoming
    from .reading import Reading
    from .seat import Seats
    from .sending import Sending


_PAUSE = 1.0  # seconds that a look may come late before it counts as a pause of this process


class Taking:
    """The streams of one group.

    Args:
        on_late: Told of a stream whose items may have waited for too long, under no lock; it asks
            `is_overdue`.
    """

    def __init__(
        self,
        hub: Hub,
        seats: Seats,
        reading: Reading,
        sending: Sending,
        on_late: Callable[[Call], None],
    ) -> None:
        self._hub = hub
        self._seats = seats
        self._reading = reading
        self._sending = sending
        self._on_late = on_late
        self._abandoned: deque[Call] = deque()  # streams whose taker was collected

    def keep(self, call: Call, rank: int, frame: Frame) -> None:
        """Keep an item of *call* for its taker."""
        stream = call.stream
        if stream is None:
            frame.drop()  # no worker of ours sends one here
            return
        if not stream.items:
            stream.since = time.monotonic()
        stream.items.append((rank, frame))
        if stream.timer is None and stream.ticket is None:
            self._look_later(call)
        self._tell_taker(call)

    def is_overdue(self, call: Call) -> bool:
        """Whether items of *call* wait for their taker for too long; else looks again when due."""
        stream = call.stream
        if call.done or stream is None or stream.timer is None:
            return False
        now = time.monotonic()
        if now - stream.timer.at > _PAUSE:
            stream.since = now  # its taker was paused like this thread
        stream.timer = None
        if not stream.items:
            return False
        if now - stream.since >= stream.take_within:
            return True
        self._look_later(call)
        return False

    def take(
        self, call: Call, wake: Callable[[], None] | None
    ) -> tuple[int, Frame] | Ticket | None:
        """Return the next item and its rank, None after the last, or a ticket: see `Plane.take`."""
        stream = call.stream
        assert stream is not None
        if stream.items:
            rank, frame = stream.items.popleft()
            stream.since = time.monotonic()
            more = stream.grant(rank)
            seat = self._seats.at(rank)
            if more is not None and seat is not None and seat.sent.get(call.wire) is call:
                self._sending.say(seat, Kind.MORE, call.wire, more)
            return rank, frame
        if call.done:
            return None
        stream.ticket = Ticket()
        self._watch(stream, wake)
        self._reading.see_to_it()
        return stream.ticket

    def end(self, call: Call) -> None:
        """Tell the taker that nothing more comes, and the workers that nothing more is wanted."""
        assert call.stream is not None
        begun = call.stream.granted if len(call.asked) > 1 else 0
        for seat in self._seats:
            if not seat.ended and seat.sent.get(call.wire) is call:
                self._sending.say(seat, Kind.CLOSE, call.wire, begun)
        if call.stream.timer is not None:
            call.stream.timer.cancel()
        self._tell_taker(call)

    def abandon(self, call: Call) -> None:
        """Note that nobody takes *call*'s items any more; `abandoned` returns it. Takes no lock."""
        self._abandoned.append(call)

    @property
    def has_abandoned(self) -> bool:
        """Whether there are streams that nobody takes any more, and that have not been ended."""
        return bool(self._abandoned)

    def abandoned(self) -> Iterator[Call]:
        """Return those, once."""
        while self._abandoned:
            yield self._abandoned.popleft()

    def _look_later(self, call: Call) -> None:
        stream = call.stream
        assert stream is not None
        if stream.take_within < math.inf:
            due = stream.since + stream.take_within
            stream.timer = self._hub.call_at(due, partial(self._on_late, call))

    def _tell_taker(self, call: Call) -> None:
        stream = call.stream
        assert stream is not None
        ticket, stream.ticket = stream.ticket, None
        wake = stream.wake
        self._watch(stream, None)
        if ticket is not None:
            ticket.done = True
            self._reading.wake(ticket)
        if wake is not None:
            wake()

    def _watch(self, stream: Incoming, wake: Callable[[], None] | None) -> None:
        self._reading.watched += (wake is not None) - (stream.wake is not None)
        stream.wake = wake
