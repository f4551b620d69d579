"""Streams: the items of a worker's generator, from the reader to the caller's iterator.

- Items arrive in the order in which their rank made them; at most *window* items per rank are made
  before they are taken.
- After the items comes the outcome: the end, the worker's exception, `WorkerDied`, `CallTimeout`,
  `StreamNotTaken` or `ExecutorClosed`. A stream that was cut short never looks complete.
- Closing a stream early, or dropping it, closes the generator in every worker.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from typing import TYPE_CHECKING, Any, Self

from phalanx.supervision import WouldDeadlock

from .futures import waker
from .reader import Ticket

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from phalanx.runtime import Frame

    from .call import Call
    from .callbacks import CallbackThread
    from .plane import CallPlane
    from .reader import Timer


class StreamInbox:
    """The items of one stream that have arrived, and its flow-control credit.

    Guarded by the plane's lock.

    Attributes:
        window: How many items a rank may make before they are taken.
        take_within: Seconds that an item may wait to be taken; infinity for no limit.
        granted: How many items some rank may have made by now.
        taken: How many items have been taken, by rank.
        since: When the last was taken, or the oldest of those that wait arrived.
        timer: Looks whether they wait for too long; None while none is known to wait.
        ticket: Done when there is news for the consumer; None if it does not wait.
        wake: Called then, for a consumer in an asyncio loop.
    """

    __slots__ = (
        *("granted", "items", "since", "take_within", "taken", "ticket", "timer", "wake"),
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
        """Count an item of *rank* as taken; return how many may be made in all, if that changes.

        It changes once per half a window: for each item, it would double the packets.
        """
        taken = self.taken[rank] = self.taken.get(rank, 0) + 1
        if taken % max(1, self.window // 2):
            return None
        self.granted = max(self.granted, taken + self.window)
        return taken + self.window


GIVEN_UP = "the stream was closed: its consumer was cancelled, or has been collected"


class ReplyStream:
    """The items of one stream, to be iterated once, with ``for`` or ``async for``.

    The items of a stream of every rank are (rank, item), as they come. Also a context manager,
    which closes it. Used by one thread or task at a time.
    """

    def __init__(self, call: Call, plane: CallPlane, callbacks: CallbackThread) -> None:
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
            Exception: the error that the stream ended with, once.
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
                self._plane.wait(got, None)  # the call's deadline ends it
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
                    # The task was cancelled: a server's, say, whose client has gone. The stream may
                    # be part of a cycle, and its rank would wait for the garbage collector.
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
            self._plane.abandon_stream(self._call)

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
