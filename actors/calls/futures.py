"""Future of a call, and the wake-up of an asyncio loop.

The future of a call that was made with ``non_block=True``.

Guarantees: it is a `concurrent.futures.Future` in every respect (`wait`, `as_completed`,
`asyncio.wrap_future` take it) and can be awaited; it completes without anybody waiting; its
callbacks run on a thread of their own, where a blocking call raises instead of hanging; waiting
for it with a timeout leaves the call alone.

What wakes a task of asyncio from any thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from concurrent.futures import CancelledError, Future
from typing import TYPE_CHECKING, Any, cast

from phalanx.actors.signals.process_exit import living
from phalanx.runtime import AskableLock, called_from_inside, occupied
from phalanx.supervision import ExecutorClosed, WorkerDied, WouldDeadlock

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from .call import Call
    from .callbacks import Callbacks
    from .plane import Plane


def waker(loop: asyncio.AbstractEventLoop, arrived: asyncio.Future[None]) -> Callable[[], None]:
    """Return what has *arrived* done on any thread; it does nothing once *loop* is closed."""

    def tell() -> None:
        if not arrived.done():
            arrived.set_result(None)

    def wake() -> None:
        # Asked first, it might be closed in between; and the error would strike whoever settles.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(tell)

    return wake


class _Machinery:
    """An attribute of the base class: a condition, lists of waiters and callbacks.

    All of them are made when something first asks for one. Most futures are only asked for their
    result, and to make all that takes as long as the rest of the call.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, future: CallFuture | None, _owner: type | None = None) -> Any:
        if future is None:
            return self
        future.become_whole()
        return future.__dict__[self._name]


class CallFuture(Future[Any]):
    """What becomes of one call."""

    _condition: Any = _Machinery("_condition")
    _state: Any = _Machinery("_state")
    _waiters: Any = _Machinery("_waiters")
    _done_callbacks: Any = _Machinery("_done_callbacks")
    _result: Any = _Machinery("_result")
    _exception: Any = _Machinery("_exception")

    def __init__(
        self, call: Call, plane: Plane, callbacks: Callbacks, decode: Callable[[Call], Any]
    ) -> None:
        # The base class is not called: see `_Machinery`.
        self._call = call
        self._plane = plane
        self._callbacks = callbacks
        self._decode = decode
        self._decoding = AskableLock()
        self._decoded = False
        self._whole = False
        self._value: Any = None
        self._error: BaseException | None = None
        if not call.done:
            call.future = self  # last: the call has been sent, and may be settled at any moment

    def become_whole(self) -> None:
        """Make what `concurrent.futures` needs, and see that it hears of the outcome.

        Takes no lock of the plane's: `concurrent.futures.wait` gets here with the conditions of
        other futures in its hands, for which whoever settles calls may be waiting under that lock.
        """
        self._check_not_inside()
        with self._decoding:
            if not self._whole:
                super().__init__()
                self.set_running_or_notify_cancel()
                self._whole = True
        # Settling sets *done* and then looks whether the future is whole; here it is the other way
        # round. So one of the two sees the other, or both do, and the second finds it finished.
        if self._call.done:
            self._finish()

    def result(self, timeout: float | None = None) -> Any:
        """Return the call's value, or raise its error.

        Raises:
            TimeoutError: *timeout* seconds passed; the call goes on.
            WouldDeadlock: from a done-callback of a call that is not done.
            WorkerDied: a rank died in it, or the group gave up, after too many deaths, before it
                was answered.
            ExecutorClosed: the executor was closed first, or its group had ended already; or this
                is a child forked from its driver.
        """
        if not self._decoded:
            self._wait(timeout)
        error = self._error
        if error is None:
            return self._value
        try:
            raise error
        finally:
            del self, error  # the traceback that is made here refers to this frame

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the call's error, or None; waits like `result`.

        Raises:
            CancelledError: the call was cancelled.
        """
        if not self._decoded:
            self._wait(timeout)
        if self.cancelled():
            raise CancelledError
        return self._error

    def cancel(self) -> bool:
        """Withdraw the call, or void its answer if it has been sent; False if it is done."""
        return self._plane.cancel(self._call)

    def cancelled(self) -> bool:
        """Whether `cancel` came before the outcome."""
        return self._call.done and isinstance(self._call.error, CancelledError)

    @property
    def failed_rank(self) -> int | None:
        """The rank whose exception, or death, is the outcome; None for any other."""
        if self._call.failed is not None:
            return self._call.failed[1]
        reports = self._call.reports if isinstance(self._call.error, WorkerDied) else ()
        return reports[-1].rank if reports else None

    def running(self) -> bool:
        """Whether the call has been sent and not been settled."""
        return not self._call.done and self._call.wire != 0

    def done(self) -> bool:
        """Whether the call has an outcome."""
        return self._call.done

    def add_done_callback(self, fn: Callable[[Future[Any]], object]) -> None:
        """Run ``fn(self)`` on the callback thread once the call is done."""
        super().add_done_callback(lambda _: self._callbacks.run(fn, self))
        self._plane.when_settled(self._call, _wanted)

    def __await__(self) -> Generator[Any, None, Any]:
        """Wait without blocking the event loop; cancelling the waiter cancels the call."""
        loop = asyncio.get_running_loop()
        arrived: asyncio.Future[None] = loop.create_future()
        wake = waker(loop, arrived)
        self._plane.when_settled(self._call, lambda _: wake())
        try:
            yield from arrived
        except asyncio.CancelledError:
            self.cancel()
            raise
        if self.cancelled():
            raise asyncio.CancelledError
        return self.result(0)

    def __repr__(self) -> str:
        state = "done" if self.done() else "running" if self.running() else "waiting"
        return f"<CallFuture of {self._call.name} (call {self._call.seq}): {state}>"

    def _wait(self, timeout: float | None) -> None:
        call = self._call
        if not call.done:
            if os.getpid() != self._plane.pid:  # here nobody would ever bring the answer
                msg = f"{call.name} was called by the parent process, which has the answer"
                raise ExecutorClosed(msg)
            if self._callbacks.is_current():
                msg = f"waiting for {call.name} in a callback: no callback may wait for a call"
                raise WouldDeadlock(msg)
            self._plane.check_may_enter(f"waiting for {call.name}", waits=True)
            deadline = None if timeout is None else time.monotonic() + timeout
            if not self._plane.wait(call, deadline):
                msg = f"{call.name} is not done after {timeout:.3g} s; the call goes on"
                raise TimeoutError(msg)
        if call.error is not None and isinstance(call.error, ExecutorClosed):
            living.stay_until_the_end()
        if call.span is not None:
            call.span.end(call)
        # Decoded here, by whoever wants it, and kept for the next one who asks. Not under the
        # future's own condition: whoever settles calls takes that, and must not wait for this.
        self._check_not_inside()
        with self._decoding:
            if self._decoded:
                return
            try:
                self._value = self._decode(call)
            except BaseException as error:  # noqa: BLE001  # it is the call's outcome
                self._error = error
            self._decoded = True

    def _check_not_inside(self) -> None:
        if self._decoding.is_mine():
            raise called_from_inside(f"asking for the outcome of {self._call.name}")

    @property
    def is_whole(self) -> bool:
        """Whether something of `concurrent.futures` may wait for it."""
        return self._whole

    def finish(self) -> None:
        """Tell who waits through `concurrent.futures` that the call is done; now, or soon.

        Under the plane's lock, where nothing may be waited for: who has the condition may have been
        interrupted there, by a finalizer that wants to make a call. Nor on a user's thread: that
        may have been interrupted in `concurrent.futures.wait`, whose locks this takes.
        """
        condition = self._condition
        if not occupied.is_mine():
            self._callbacks.run(self._finish)
        elif not condition._is_owned() and condition.acquire(blocking=False):  # noqa: SLF001
            try:
                self._finish()
            finally:
                condition.release()
        else:
            self._callbacks.run(self._finish)

    def _finish(self) -> None:
        failed = self._call.error is not None or self._call.failed is not None
        cancelled = self.cancelled()
        with self._condition:
            if self._state in _ENDED:
                return
            self._state = "CANCELLED_AND_NOTIFIED" if cancelled else "FINISHED"
            for waiter in self._waiters:
                if cancelled:  # no exception, for who waits for the first one
                    waiter.add_cancelled(self)
                elif failed:
                    waiter.add_exception(self)
                else:
                    waiter.add_result(self)
            self._condition.notify_all()
        base = cast("Any", super())
        base._invoke_callbacks()  # noqa: SLF001  # what `set_result` ends with


_ENDED = ("FINISHED", "CANCELLED_AND_NOTIFIED")  # as `concurrent.futures` names them


def _wanted(_: Call) -> None:
    """Stand for somebody who wants to hear of a call at once, and is told otherwise."""
