"""The future of a call that was made with ``non_block=True``.

Guarantees: it is a `concurrent.futures.Future` in every respect (`wait`, `as_completed`,
`asyncio.wrap_future` take it) and can be awaited; it completes without anybody waiting; its
callbacks run on a thread of their own, where a blocking call raises instead of hanging; waiting
for it with a timeout leaves the call alone.
"""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import CancelledError, Future
from typing import TYPE_CHECKING, Any

from phalanx.supervision import ExecutorClosed, WouldDeadlock

from .termination import living

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from .callbacks import Callbacks
    from .calls import Call
    from .plane import Plane


class CallFuture(Future[Any]):
    """What becomes of one call."""

    def __init__(
        self, call: Call, plane: Plane, callbacks: Callbacks, decode: Callable[[Call], Any]
    ) -> None:
        super().__init__()
        self._call = call
        self._plane = plane
        self._callbacks = callbacks
        self._decode = decode
        self._decoded = False
        self._decoding = threading.Lock()
        self.set_running_or_notify_cancel()
        plane.when_settled(call, self._settled)

    def result(self, timeout: float | None = None) -> Any:
        """Return the call's value, or raise its error.

        Raises:
            TimeoutError: *timeout* seconds passed; the call goes on.
            WouldDeadlock: from a done-callback of a call that is not done.
        """
        self._wait(timeout)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the call's error, or None; waits like `result`."""
        self._wait(timeout)
        return super().exception(0)

    def cancel(self) -> bool:
        """Withdraw the call, or void its answer if it has been sent; False if it is done."""
        return self._plane.cancel(self._call)

    def cancelled(self) -> bool:
        """Whether `cancel` came before the outcome."""
        return self._call.done and isinstance(self._call.error, CancelledError)

    def running(self) -> bool:
        """Whether the call has been sent and not been settled."""
        return not self._call.done and self._call.wire != 0

    def done(self) -> bool:
        """Whether the call has an outcome."""
        return self._call.done

    def add_done_callback(self, fn: Callable[[Future[Any]], object]) -> None:
        """Run ``fn(self)`` on the callback thread once the call is done."""
        super().add_done_callback(lambda _: self._callbacks.run(fn, self))

    def __await__(self) -> Generator[Any, None, Any]:
        """Wait without blocking the event loop; cancelling the waiter cancels the call."""
        loop = asyncio.get_running_loop()
        arrived: asyncio.Future[None] = loop.create_future()

        def tell() -> None:
            if not arrived.done():
                arrived.set_result(None)

        def settled(_: Call) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(tell)

        self._plane.when_settled(self._call, settled)
        try:
            yield from arrived
        except asyncio.CancelledError:
            self.cancel()
            raise
        if self.cancelled():
            raise asyncio.CancelledError
        return self.result(0)

    def _wait(self, timeout: float | None) -> None:
        call = self._call
        if not call.done:
            if self._callbacks.is_current():
                msg = f"waiting for {call.name} in a callback: no callback may wait for a call"
                raise WouldDeadlock(msg)
            deadline = None if timeout is None else time.monotonic() + timeout
            if not self._plane.wait(call, deadline):
                msg = f"{call.name} is not done after {timeout:.3g} s; the call goes on"
                raise TimeoutError(msg)
        if isinstance(call.error, ExecutorClosed):
            living.stay_until_the_end()
        # Decoded here, by whoever wants it, and kept for the next one who asks. Not under the
        # future's own lock: whoever settles calls takes that, and must not wait for this.
        with self._decoding:
            if self._decoded:
                return
            try:
                value = self._decode(call)
            except BaseException as error:  # noqa: BLE001  # it is the call's outcome
                self._exception = error
            else:
                self._result = value
            self._state = "FINISHED"
            self._decoded = True

    def _settled(self, _: Call) -> None:
        """Wake who waits through `concurrent.futures`; runs on the thread that settles the call."""
        with self._condition:
            self._state = "FINISHED"
            for waiter in self._waiters:
                waiter.add_result(self)
            self._condition.notify_all()
        self._invoke_callbacks()  # type: ignore[attr-defined]  # what set_result ends with
