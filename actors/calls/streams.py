"""Streams of items: the iterator of the caller, and the credit and end of each stream in the plane.

The taking end of a stream: what a worker's generator yields, one item after the other.

Guarantees: items arrive in the order in which their rank made them; at most *window* items per
rank are made ahead of who takes them; after the items comes the outcome, which is the end, the
worker's exception, `WorkerDied`, `CallTimeout` or `ExecutorClosed`: a stream that was cut short
never looks complete. Closing it early, or dropping it, closes the generator in the worker.

Left to others: sending and reading (`plane`), the generator (`runtime.streams`).

What has arrived of a stream and not been taken: between whoever reads and whoever takes.

Left to others: reading it (`arriving`), taking it (`taking`), iterating over it (`streams`).

What streams have brought, until somebody takes it.

Guarantees: an item is kept only for a stream that is open; taking it lets its rank make another;
a stream that has ended, however, has told its workers, and whoever waits for it.

Left to others: the stream as its taker sees it (`streams`). Everything here is under the plane's
lock, but for `abandon`.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from phalanx.runtime import Kind
from phalanx.supervision import WouldDeadlock

from .futures import waker
from .reader import Ticket

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from phalanx.runtime import Frame, Hub, Timer

    from .call import Call
    from .callbacks import Callbacks
    from .plane import Plane
    from .rank import Seats
    from .reader import Reading
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


class Incoming:
    """What has arrived of one stream and not been taken. Guarded by the plane's lock.

    Attributes:
        granted: How many items some rank may have made by now.
        take_within: Seconds that an item may wait for its taker; infinity for no limit.
        taken: How many items have been taken, by rank.
        since: When the last was taken, or the oldest of those that wait arrived.
        timer: Looks whether they wait for too long; None while none is known to wait.
    """

    __slots__ = (
        "granted",
        "items",
        "since",
        "take_within",
        "taken",
        "ticket",
        "timer",
        "wake",
        "window",
    )

    def __init__(self, window: int, take_within: float) -> None:
        self.window = self.granted = window
        self.take_within = take_within
        self.since = 0.0
        self.timer: Timer | None = None
        self.items: deque[tuple[int, Frame]] = deque()
        self.taken: dict[int, int] = {}
        self.ticket: Ticket | None = None
        self.wake: Callable[[], None] | None = None

    def grant(self, rank: int) -> int | None:
        """Count an item of *rank* as taken; return how many may be made in all, if that is news.

        Said once per half a window: once per item would double the packets.
        """
        taken = self.taken[rank] = self.taken.get(rank, 0) + 1
        if taken % max(1, self.window // 2):
            return None
        self.granted = max(self.granted, taken + self.window)
        return taken + self.window


GIVEN_UP = "the stream was closed: its taker was cancelled, or has gone"


class ReplyStream:
    """The items of one stream, to be iterated once, with ``for`` or ``async for``.

    Of a stream of every rank the items are (rank, item), as they come. Also a context manager,
    which closes it. Taken by one thread or task at a time.
    """

    def __init__(self, call: Call, plane: Plane, callbacks: Callbacks) -> None:
        self._call = call
        self._plane = plane
        self._callbacks = callbacks
        self._pid = os.getpid()
        self._ended = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        """Return the next item.

        Raises:
            Exception: how the stream ended, if not well; once.
        """
        while not self._ended:
            got = self._plane.take(self._call)
            if got is None:
                self._finish()
            elif isinstance(got, Ticket):
                if self._callbacks.is_current():
                    msg = f"waiting for {self._call.name} in a callback: no callback may wait"
                    raise WouldDeadlock(msg)
                self._plane.check_may_enter(f"waiting for {self._call.name}", waits=True)
                self._plane.wait_for(got)
            else:
                return self._decoded(*got)
        raise StopIteration

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        """Return the next item, without blocking the event loop."""
        loop = asyncio.get_running_loop()
        while not self._ended:
            arrived: asyncio.Future[None] = loop.create_future()
            got = self._plane.take(self._call, waker(loop, arrived))
            if got is None:
                self._finish()
            elif isinstance(got, Ticket):
                try:
                    await arrived
                except BaseException:
                    # Its task was cancelled: a server's, say, whose client has gone. What holds
                    # the stream may be part of a cycle, and its rank would wait for the collector.
                    # Not `abandon`: a coroutine is closed by the collector too, on any thread.
                    self._plane.abandon_later(self._call)
                    raise
            else:
                return self._decoded(*got)
        raise StopAsyncIteration

    def close(self) -> None:
        """End the stream: its generator is closed in every worker. Idempotent; does not wait."""
        if not self._ended:
            self._ended = True
            self._plane.abandon(self._call)

    async def aclose(self) -> None:
        """See `close`."""
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not self._ended and self._pid == os.getpid():  # a forked child's copy ends nothing
            # Collected on any thread, perhaps one that holds the plane's lock.
            self._plane.abandon_later(self._call)

    def _finish(self) -> None:
        self._ended = True
        if self._call.span is not None:
            self._call.span.end(self._call)
        self._call.result()

    def _decoded(self, rank: int, frame: Frame) -> Any:
        item = frame.value()
        if self._call.tap is not None:
            item = self._call.tap.take(rank, item)
        return item if self._call.rank is not None else (rank, item)


class InlineStream(ReplyStream):
    """A stream of the rank in the caller's own process."""

    def __init__(self, items: Iterator[Any]) -> None:
        self._items = items
        self._ended = False

    def __next__(self) -> Any:
        return next(self._items)

    async def __anext__(self) -> Any:
        try:
            return next(self._items)
        except StopIteration:
            raise StopAsyncIteration from None

    def close(self) -> None:
        """Close the generator."""
        self._ended = True
        close = getattr(self._items, "close", None)
        if close is not None:
            close()

    def __del__(self) -> None:
        """Leave the generator to its own finalizer."""
