"""`AsyncCalls`, `AsyncExecutor`: calls for asyncio: awaited, never blocking the event loop.

- The same calls with the same guarantees.
- Cancelling the task that awaits a call withdraws it, or voids its answer if it has been sent.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from phalanx.actors.calls.futures import waker

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from phalanx.actors.calls.streams import ReplyStream
    from phalanx.actors.spec.results import Outcome


async def outcome_of(group: Any, make: Callable[[], Any]) -> Any:
    """Return the outcome of the future that *make* returns, once the queue of *group* has room.

    *make* may exceed the queue's limit: other threads may have filled it again.
    """
    await _room(group)
    return await make()


async def _room(group: Any) -> None:
    loop = asyncio.get_running_loop()
    while True:
        arrived: asyncio.Future[None] = loop.create_future()
        if group.has_room(waker(loop, arrived)):
            return
        await arrived


def _awaited(name: str, *, in_thread: bool = False) -> Any:
    async def method(self: Any, *args: Any, **options: Any) -> Any:
        if in_thread:
            return await asyncio.to_thread(getattr(self._executor, name), *args, **options)
        call = getattr(self._calls, name)
        if name != "submit":  # it returns a future anyway
            options["non_block"] = True
        return await outcome_of(self._group, lambda: call(*args, **options))

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

    async def tell(self, *args: Any, **options: Any) -> None:
        """See `Executor.tell`."""
        await _room(self._group)
        self._calls.tell(*args, **options)

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

    check_health = _awaited("check_health", in_thread=True)
    checkpoint = _awaited("checkpoint", in_thread=True)
    drain = _awaited("drain", in_thread=True)
    restart = _awaited("restart", in_thread=True)
    resize = _awaited("resize", in_thread=True)
    close = _awaited("close", in_thread=True)
