"""Streams: the items of a worker's generator, from the reader to the caller's iterator.

- Items arrive in the order in which their rank made them; at most *window* items per rank are made
  before they are taken.
- After the items comes the outcome: the end, the worker's exception, `WorkerDied`, `CallTimeout`,
  `StreamNotTaken` or `ExecutorClosed`. A stream that was cut short never looks complete.
- Closing a stream early, or dropping it, closes the generator in every worker.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections import deque
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Any, Self

from phalanx.actors.signals.interrupts import uninterrupted
from phalanx.runtime import Kind
from phalanx.supervision import StreamNotTaken

from .futures import waker
from .reader import Ticket

if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx.runtime import Frame, Timer

    from .call import Call
    from .callbacks import CallbackThread
    from .plane import CallPlane
    from .rank import RankTable
    from .reader import Reader
    from .sender import Sender


_GIVEN_UP = "the stream was closed: its consumer was cancelled, or has been collected"
_MOST = 1 << 30  # items that a rank is allowed at once: their count takes 32 bits on its way
_PAUSE = 1.0  # seconds that a timer may be late before it counts as a pause of this process


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
    """

    __slots__ = (
        *("granted", "items", "since", "take_within", "taken", "ticket", "timer", "window"),
    )

    def __init__(self, window: int, take_within: float) -> None:
        self.window = self.granted = min(window, _MOST)
        self.take_within = take_within
        self.since = 0.0
        self.timer: Timer | None = None
        self.items: deque[tuple[int, Frame]] = deque()
        self.taken: dict[int, int] = {}
        self.ticket: Ticket | None = None

    def grant(self, rank: int) -> int | None:
        """Count an item of *rank* as taken; return how many may be made in all, if that changes.

        It changes once per half a window: for each item, it would double the packets.
        """
        taken = self.taken[rank] = self.taken.get(rank, 0) + 1
        if taken % max(1, self.window // 2):
            return None
        self.granted = max(self.granted, taken + self.window)
        return taken + self.window


class Streams:
    """The open streams of one group. Guarded by the plane's lock, which callers' methods take."""

    def __init__(self, plane: CallPlane, table: RankTable, sender: Sender, reader: Reader) -> None:
        self._plane = plane
        self._table = table
        self._sender = sender
        self._reader = reader
        reader.on_wake = self._end_abandoned
        self._abandoned: deque[Call] = deque()  # their consumers were cancelled or collected

    # --- consumers ------------------------------------------------------------------------

    @uninterrupted
    def take(
        self, call: Call, wake: Callable[[], None] | None = None
    ) -> tuple[int, Frame] | Ticket | None:
        """Return the next item of *call*'s stream and its rank, or None after the last.

        If none is there yet, returns a ticket that is done when there is news; or *wake* is called
        then, on the thread that reads it.
        """
        self._plane.check_process(call)
        inbox = call.stream
        assert inbox is not None
        with self._plane.lock.asked():
            if inbox.items:
                rank, frame = inbox.items.popleft()
                inbox.since = self._plane.clock()
                more = inbox.grant(rank)
                slot = self._table.at(rank)
                if more is not None and slot is not None and slot.sent.get(call.wire) is call:
                    self._sender.say(slot, Kind.MORE, call.wire, more)
                return rank, frame
            if call.done:
                return None
            ticket = Ticket(wake)
            self._expect(inbox, ticket)
            self._reader.ensure()
            return ticket

    @uninterrupted
    def abandon(self, call: Call) -> None:
        """End *call*'s stream and drop its items."""
        if os.getpid() == self._plane.pid:  # a forked child's copy ends nothing
            self._plane.abandon(call)
            with self._plane.lock.asked():
                assert call.stream is not None
                call.stream.items.clear()

    def abandon_later(self, call: Call) -> None:
        """End *call*'s stream soon; takes no lock, so a finalizer may call it anywhere."""
        if not call.done and os.getpid() == self._plane.pid:  # as above
            self._abandoned.append(call)
            self._reader.wake()

    @uninterrupted
    def _end_abandoned(self) -> None:
        """End the streams of `abandon_later`; on the thread that reads, without the lock."""
        if self._abandoned:
            with self._plane.lock.asked():
                while self._abandoned:
                    self._plane.withdraw(self._abandoned.popleft(), CancelledError(_GIVEN_UP))
                self._plane.pump()

    # --- the plane --------------------------------------------------------------------------

    def keep(self, call: Call, rank: int, frame: Frame) -> None:
        """Keep an item of *call* for its consumer."""
        inbox = call.stream
        if inbox is None:
            frame.drop()  # no worker of ours sends one here
            return
        if not inbox.items:
            inbox.since = self._plane.clock()
        inbox.items.append((rank, frame))
        # Its consumer may have been interrupted in its wait: a later item looks, if one can come.
        if inbox.timer is None and (inbox.ticket is None or inbox.window == 1):
            self._check_later(call, inbox)
        self._expect(inbox, None)

    def end(self, call: Call, inbox: StreamInbox) -> None:
        """Close the generators of *call*, which is settled, and notify its consumer."""
        begun = inbox.granted if len(call.asked) > 1 else 0
        for slot in self._table:
            if not slot.ended and slot.sent.get(call.wire) is call:
                self._sender.say(slot, Kind.CLOSE, call.wire, begun)
        if inbox.timer is not None:
            inbox.timer.cancel()
        self._expect(inbox, None)

    def _expect(self, inbox: StreamInbox, ticket: Ticket | None) -> None:
        """Have *ticket* fulfilled at the next news, and the former one now."""
        former, inbox.ticket = inbox.ticket, ticket
        if ticket is not None and ticket.wake is not None:
            self._reader.watched += 1
        if former is not None:
            self._reader.watched -= former.wake is not None
            self._reader.fulfil(former)

    def _check_later(self, call: Call, inbox: StreamInbox) -> None:
        if inbox.take_within < math.inf:
            due = inbox.since + inbox.take_within
            inbox.timer = self._plane.loop.call_at(due, lambda: self._check(call, inbox))

    def _check(self, call: Call, inbox: StreamInbox) -> None:
        """Close *call*'s stream if its items have not been taken in time."""
        with self._plane.lock.asked():
            if call.done or inbox.timer is None:
                return
            now = self._plane.clock()
            if now - inbox.timer.at > _PAUSE:
                inbox.since = now  # its consumer was paused like this thread
            inbox.timer = None
            if not inbox.items:
                return
            if now - inbox.since < inbox.take_within:
                self._check_later(call, inbox)
                return
            msg = (
                f"no item of the stream of {call.name} was taken for {inbox.take_within:g} s; it "
                "kept its ranks from serving, and was closed: close streams (`with`), or set "
                "take_within"
            )
            self._plane.withdraw(call, StreamNotTaken(msg))
            self._plane.pump()
        event, seconds = "phalanx.stream_not_taken", inbox.take_within
        self._plane.log.warning(event, rank=call.rank, method=call.name, seconds=seconds)


class ReplyStream:
    """The items of one stream, to be iterated once, with ``for`` or ``async for``.

    The items of a stream of every rank are (rank, item), as they come. Also a context manager,
    which closes it. Used by one thread or task at a time.
    """

    _ended = True  # until it has been constructed

    def __init__(self, call: Call, plane: CallPlane, callbacks: CallbackThread) -> None:
        self._call = call
        self._plane = plane
        self._callbacks = callbacks
        self._ended = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        """Return the next item.

        Raises:
            Exception: the error that the stream ended with, once.
        """
        while not self._ended:
            got = self._plane.streams.take(self._call)
            if got is None:
                self._finish()
            elif isinstance(got, Ticket):
                self._callbacks.check_may_wait(f"waiting for {self._call.name}")
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
            got = self._plane.streams.take(self._call, waker(loop, arrived))
            if got is None:
                self._finish()
            elif isinstance(got, Ticket):
                try:
                    await arrived
                except BaseException:
                    # The task was cancelled: a server's, say, whose client has gone. The stream may
                    # be part of a cycle, and its rank would wait for the garbage collector.
                    # Not `abandon`: a coroutine is closed by the collector too, on any thread.
                    self._plane.streams.abandon_later(self._call)
                    raise
            else:
                return self._decoded(*got)
        raise StopAsyncIteration

    def close(self) -> None:
        """End the stream: its generator is closed in every worker. Idempotent; does not wait."""
        if not self._ended:
            self._ended = True
            self._plane.streams.abandon(self._call)

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
        if not self._ended:
            # Collected on any thread, perhaps one that holds the plane's lock.
            self._plane.streams.abandon_later(self._call)

    def _finish(self) -> None:
        self._ended = True
        if self._call.span is not None:
            self._call.span.end(self._call)
        try:
            self._call.result()
        except (StopIteration, StopAsyncIteration) as error:  # the stream would look complete
            raise RuntimeError(f"{self._call.name} raised {type(error).__name__}") from error

    def _decoded(self, rank: int, frame: Frame) -> Any:
        item = frame.value()
        if self._call.probe is not None:
            item = self._call.probe.take(rank, item)
        return item if self._call.rank is not None else (rank, item)
