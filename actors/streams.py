"""The taking end of a stream: what a worker's generator yields, one item after the other.

Guarantees: items arrive in the order in which their rank made them; at most *window* items per
rank are made ahead of who takes them; after the items comes the outcome, which is the end, the
worker's exception, `WorkerDied`, `CallTimeout` or `ExecutorClosed`: a stream that was cut short
never looks complete. Closing it early, or dropping it, closes the generator in the worker.

Left to others: sending and reading (`plane`), the generator (`runtime.streams`).
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any, Self

from phalanx.supervision import WouldDeadlock

from .reading import Ticket
from .waking import waker

if TYPE_CHECKING:
    from collections.abc import Iterator

    from phalanx.runtime import Frame

    from .callbacks import Callbacks
    from .calls import Call
    from .plane import Plane


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
