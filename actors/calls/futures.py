"""`CallFuture`: the future of a call made with ``non_block=True``.

- It is a `concurrent.futures.Future` (`wait`, `as_completed` and `asyncio.wrap_future` take it) and
  can be awaited. It completes without a thread that waits for it.
- The callback thread runs its callbacks, and wakes threads that wait through `concurrent.futures`;
  a callback that blocks delays both. There a blocking call raises instead of hanging.
"""

from __future__ import annotations

import asyncio
import contextlib
from concurrent.futures import CancelledError, Future
from typing import TYPE_CHECKING, Any, cast

from phalanx.actors.signals.driver_exit import open_executors
from phalanx.runtime import AskableLock, called_from_inside
from phalanx.supervision import ExecutorClosed, WorkerDied

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from .call import Call
    from .callbacks import CallbackThread
    from .plane import CallPlane


def waker(loop: asyncio.AbstractEventLoop, arrived: asyncio.Future[None]) -> Callable[[], None]:
    """Return a function that completes *arrived* from any thread, unless *loop* is closed."""

    def complete() -> None:
        if not arrived.done():
            arrived.set_result(None)

    def wake() -> None:
        # A test of `is_closed` could be out of date; the error would strike the settling thread.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(complete)

    return wake


class _Lazy:
    """An attribute of the base class: its condition, its lists of waiters and callbacks.

    All are made when one is first used. Most futures are only asked for their result, and making
    them takes as long as the rest of the call. (A `__getattr__` would slow down every attribute.)
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, future: CallFuture, _owner: type) -> Any:
        future.become_whole()
        return future.__dict__[self._name]


class CallFuture(Future[Any]):
    """The future of one call.

    Attributes:
        is_whole: Whether a thread may wait for it through `concurrent.futures`.
    """

    def __init__(self, call: Call, plane: CallPlane, callbacks: CallbackThread) -> None:
        # The base class is not called: see `_Lazy`.
        self._call = call
        self._plane = plane
        self._callbacks = callbacks
        self._decoding = AskableLock()
        self._decoded = False
        self.is_whole = False
        self._value: Any = None
        self._error: BaseException | None = None
        if not call.done:
            call.future = self  # last: the call has been sent, and may be settled at any moment

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
            CancelledError: the call was cancelled or abandoned.
        """
        if not self._decoded:
            self._wait(timeout)
        if self.cancelled():
            raise CancelledError
        return self._error

    def cancel(self) -> bool:
        """Withdraw the call if it has not been sent to its ranks; False if it has, or is done."""
        return self._plane.abandon(self._call, unsent_only=True) or self.cancelled()

    def abandon(self) -> bool:
        """Cancel the call even if it is running; False if it is done.

        The ranks go on with a call that they have begun; what they answer is void.
        """
        return self._plane.abandon(self._call)

    def cancelled(self) -> bool:
        """Whether `cancel` or `abandon` came before the outcome."""
        return self._call.done and isinstance(self._call.error, CancelledError)

    @property
    def failed_rank(self) -> int | None:
        """The rank whose exception, or death, is the outcome; None for any other."""
        call = self._call
        if call.error is None:
            return None if call.failed is None else call.failed[1]
        reports = call.reports if isinstance(call.error, WorkerDied) else ()
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
        self._plane.when_settled(self._call, lambda _: None)  # its answers are read at once

    def __await__(self) -> Generator[Any, None, Any]:
        """Wait without blocking the event loop; cancelling the task abandons the call."""
        loop = asyncio.get_running_loop()
        arrived: asyncio.Future[None] = loop.create_future()
        wake = waker(loop, arrived)
        self._plane.when_settled(self._call, lambda _: wake())
        try:
            yield from arrived
        except asyncio.CancelledError:
            self.abandon()
            raise
        if self.cancelled():
            raise asyncio.CancelledError
        return self.result(0)

    def __repr__(self) -> str:
        state = "done" if self.done() else "running" if self.running() else "waiting"
        return f"<CallFuture of {self._call.name} (call {self._call.seq}): {state}>"

    def _wait(self, timeout: float | None) -> None:
        call, plane = self._call, self._plane
        plane.check_process(call)
        if not call.done:
            self._callbacks.check_may_wait(f"waiting for {call.name}")
            plane.check_may_enter(f"waiting for {call.name}", waits=True)
            if not plane.wait(call, None if timeout is None else plane.clock() + timeout):
                msg = f"{call.name} is not done after {timeout:.3g} s; the call goes on"
                raise TimeoutError(msg)
        if call.error is not None and isinstance(call.error, ExecutorClosed):
            open_executors.stay_until_the_end()
        if call.span is not None:
            call.span.end(call)
        # Not under the future's own condition: the thread that settles calls takes that, and must
        # not wait for a decoder.
        self._check_not_decoding()
        with self._decoding:
            if self._decoded:
                return
            try:
                self._value = call.result()
            except BaseException as error:  # noqa: BLE001  # it is the call's outcome
                self._error = error
            self._decoded = True

    def _get_snapshot(self) -> tuple[bool, bool, Any, BaseException | None]:
        """Return the outcome as `asyncio.wrap_future` takes it over, since Python 3.14."""
        if self.cancelled():
            return True, True, None, None
        is_done = self.done()
        error = self.exception() if is_done else None
        return is_done, False, self._value, error

    def _check_not_decoding(self) -> None:
        if self._decoding.is_mine():
            raise called_from_inside(f"asking for the outcome of {self._call.name}")

    # --- concurrent.futures ---------------------------------------------------------------

    def become_whole(self) -> None:
        """Make the base class's attributes, and have it notified of the outcome.

        Takes no lock of the plane's: `concurrent.futures.wait` calls it with the conditions of
        other futures held, for which the thread that settles calls may wait under that lock.
        """
        self._check_not_decoding()
        with self._decoding:
            if not self.is_whole:
                super().__init__()
                self.set_running_or_notify_cancel()
                self.is_whole = True
        # Settling sets *done* and then looks whether the future is whole; here it is the other way
        # round. So one of the two sees the other, or both do, and the second finds it finished.
        if self._call.done:
            self._finish()

    def finish(self) -> None:
        """Notify the threads that wait through `concurrent.futures`, soon.

        On the thread of the callbacks: under the plane's lock nothing may be waited for, and that
        takes locks whose holder may be in a finalizer or signal handler that wants to make a call.
        """
        self._callbacks.run(self._finish)

    def _finish(self) -> None:
        failed = self._call.error is not None or self._call.failed is not None
        cancelled = self.cancelled()
        with self._condition:
            if self._state in _ENDED:
                return
            self._state = "CANCELLED_AND_NOTIFIED" if cancelled else "FINISHED"
            for waiter in self._waiters:
                if cancelled:  # no exception, for FIRST_EXCEPTION
                    waiter.add_cancelled(self)
                elif failed:
                    waiter.add_exception(self)
                else:
                    waiter.add_result(self)
            self._condition.notify_all()
        base = cast("Any", super())
        base._invoke_callbacks()  # noqa: SLF001  # as `set_result` ends


for _name in vars(Future()):
    setattr(CallFuture, _name, _Lazy(_name))

_ENDED = ("FINISHED", "CANCELLED_AND_NOTIFIED")  # as `concurrent.futures` names them
