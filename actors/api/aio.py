"""`AsyncCalls`, `AsyncExecutor`: calls for asyncio: awaited, never blocking the event loop.

- The same calls with the same guarantees.
- Cancelling the task that awaits a call withdraws it, or voids its answer if it has been sent.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

from phalanx.actors.calls.call import check_timeout
from phalanx.actors.calls.futures import waker
from phalanx.supervision import CallTimeout

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from phalanx.actors.calls.streams import ReplyStream
    from phalanx.actors.spec.results import Outcome


async def outcome_of(group: Any, method: Any, seconds: Any, make: Callable[..., Any]) -> Any:
    """Return the outcome of the future that *make* returns; see `made`."""
    return await (await made(group, method, seconds, make))


async def made(group: Any, method: Any, seconds: Any, make: Callable[..., Any]) -> Any:
    """Return what *make* returns, once *group* has room for a call of *method*.

    *make* gets what is left of the *seconds* for the call as its *timeout*. It may exceed the
    queue's limit: other threads may have filled it again.

    Raises:
        CallTimeout: there was no room in time; nothing was sent.
    """
    loop = asyncio.get_running_loop()
    left, deadline = seconds, None
    leave: Callable[[], None] | None = None
    try:
        while True:
            arrived: asyncio.Future[None] = loop.create_future()
            if (ahead := group.when_room(waker(loop, arrived))) is None:
                return make(timeout=left)
            leave = ahead
            if deadline is None and isinstance(seconds, int | float):
                check_timeout(seconds)
                deadline = loop.time() + seconds
            try:
                async with asyncio.timeout_at(deadline):
                    await arrived
            except TimeoutError:
                raise not_sent(method, seconds) from None
            if deadline is not None:
                left = max(0.0, deadline - loop.time())
    except (Exception, asyncio.CancelledError):
        # Not where the garbage collector closes this, on any thread and under any lock.
        if leave is not None:
            leave()
        raise


def not_sent(method: Any, timeout: float | None) -> CallTimeout:
    """Return the error of a call of *method* that could not be sent in *timeout* seconds."""
    name = method if isinstance(method, str) else repr(method)
    return CallTimeout(name, (), timeout or 0.0, sent=False)


def _in_thread(name: str) -> Any:
    async def method(self: Any, *args: Any, **options: Any) -> Any:
        return await asyncio.to_thread(getattr(self._executor, name), *args, **options)

    return _named(method, name)


def _awaited(name: str) -> Any:
    async def awaited(
        self: Any,
        method: Any,
        timeout: Any = None,  # noqa: ASYNC109  # of the call
        *args: Any,
        **options: Any,
    ) -> Any:
        if name != "submit":  # it returns a future anyway
            options["non_block"] = True
        make = partial(_make, getattr(self._calls, name), method, *args, **options)
        return await outcome_of(self._group, method, timeout, make)

    return _named(awaited, name)


def _make(call: Any, method: Any, *args: Any, timeout: Any, **options: Any) -> Any:
    return call(method, timeout, *args, **options)


def _named(method: Any, name: str) -> Any:
    method.__name__, method.__qualname__ = name, f"AsyncExecutor.{name}"
    method.__doc__ = f"See `Executor.{name}`."
    return method


class AsyncCalls:
    """The calls of an executor: each method is its namesake's, to be awaited.

    Args:
        calls: The executor's call methods, none of which blocks.
    """

    def __init__(self, calls: Any) -> None:
        self._group = calls.group
        self._calls = calls

    collective_rpc = _awaited("collective_rpc")
    gather: Callable[..., Awaitable[list[Outcome]]] = _awaited("gather")
    scatter = _awaited("scatter")
    call = _awaited("call")
    submit = _awaited("submit")  # the value, not a future

    async def tell(
        self,
        method: Any,
        timeout: Any = None,  # noqa: ASYNC109  # as above
        *args: Any,
        **options: Any,
    ) -> None:
        """See `Executor.tell`."""
        make = partial(_make, self._calls.tell, method, *args, **options)
        await made(self._group, method, timeout, make)

    def stream(self, *args: Any, **options: Any) -> ReplyStream:
        """See `Executor.stream`; to be iterated with ``async for``, not awaited.

        Opened at once, also if too many calls are queued already.
        """
        stream: ReplyStream = self._calls.stream(*args, **options)
        return stream


class AsyncExecutor(AsyncCalls):
    """`Executor.aio`: the calls of *executor*, and what changes or checks it."""

    def __init__(self, executor: Any, calls: Any) -> None:
        super().__init__(calls)
        self._executor = executor

    check_health = _in_thread("check_health")
    checkpoint = _in_thread("checkpoint")
    drain = _in_thread("drain")
    restart = _in_thread("restart")
    resize = _in_thread("resize")
    close = _in_thread("close")
