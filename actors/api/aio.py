"""An executor's calls for asyncio: awaited, never blocking the event loop.

Guarantees: the same calls with the same contracts; cancelling the task that awaits withdraws the
call, or voids its answer if it has been sent.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import CancelledError
from functools import partial
from typing import TYPE_CHECKING, Any

from phalanx.actors.calls.streams import GIVEN_UP, ReplyStream

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from phalanx.actors.spec.results import Outcome

    from .calls import Dispatch
    from .executor import Executor


class AsyncExecutor:
    """`Executor.aio`: each method is its namesake's, to be awaited; a stream is iterated."""

    def __init__(self, executor: Executor[Any], at_once: Dispatch[Any]) -> None:
        self._executor = executor
        self._at_once = at_once  # the same calls, none of which waits for a place in the queue

    async def collective_rpc(self, *args: Any, **options: Any) -> Any:
        """See `Executor.collective_rpc`."""
        return await self._future("collective_rpc", args, options)

    async def gather(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,  # noqa: ASYNC109  # the call's own deadline
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Outcome]:
        """See `Executor.gather`."""
        outcomes: list[Outcome]
        outcomes = await self._future("gather", (method, timeout, args, kwargs), {})
        return outcomes

    async def scatter(self, *args: Any, **options: Any) -> Any:
        """See `Executor.scatter`."""
        return await self._future("scatter", args, options)

    async def call(self, *args: Any, **options: Any) -> Any:
        """See `Executor.call`."""
        return await self._future("call", args, options)

    def stream(self, *args: Any, **options: Any) -> ReplyStream:
        """See `Executor.stream`; to be iterated with ``async for``, not awaited.

        Where too many calls wait already it is opened when its first item is asked for.
        """
        if self._executor.has_room:
            return self._at_once.stream(*args, **options)
        return LateStream(partial(self._executor.stream, *args, **options))

    async def submit(self, *args: Any, **options: Any) -> Any:
        """See `Executor.submit`; returns the value, not a future."""
        return await _completed(await _made_elsewhere(self._executor.submit, args, options))

    async def tell(self, *args: Any, **options: Any) -> None:
        """See `Executor.tell`."""
        await asyncio.to_thread(self._executor.tell, *args, **options)

    async def check_health(self, timeout: float = 10.0) -> None:  # noqa: ASYNC109  # as above
        """See `Executor.check_health`."""
        await asyncio.to_thread(self._executor.check_health, timeout)

    async def drain(self, timeout: float | None = None) -> None:  # noqa: ASYNC109  # as above
        """See `Executor.drain`."""
        await asyncio.to_thread(self._executor.drain, timeout)

    async def restart(self, *args: Any, **options: Any) -> None:
        """See `Executor.restart`."""
        await asyncio.to_thread(self._executor.restart, *args, **options)

    async def resize(self, *args: Any, **options: Any) -> None:
        """See `Executor.resize`."""
        await asyncio.to_thread(self._executor.resize, *args, **options)

    async def close(self) -> None:
        """See `Executor.close`."""
        await asyncio.to_thread(self._executor.close)

    async def _future(self, name: str, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
        # On the loop's own thread where the call can go at once: a hop costs more than the call.
        # Where too many calls wait already, submitting would block the loop: then on another. Here
        # the call takes a place beyond the last where other threads have filled the queue just now.
        options = {**options, "non_block": True}
        if self._executor.has_room:
            return await _completed(getattr(self._at_once, name)(*args, **options))
        call = getattr(self._executor, name)
        return await _completed(await _made_elsewhere(call, args, options))


class LateStream(ReplyStream):
    """A stream that is opened by who takes its first item, for opening it may have to wait."""

    def __init__(self, opened: Callable[[], ReplyStream]) -> None:
        self._open = opened
        self._opening: asyncio.Future[ReplyStream] | None = None
        self._stream: ReplyStream | None = None
        self._ended = False
        self._given_up = False

    def __next__(self) -> Any:
        if self._ended:
            raise StopIteration
        if self._stream is None:
            self._stream = self._open()
        return next(self._stream)

    async def __anext__(self) -> Any:
        if self._stream is None and not self._ended:
            if self._opening is None:
                self._opening = asyncio.ensure_future(asyncio.to_thread(self._open))
                self._opening.add_done_callback(self._opened)
            try:
                await asyncio.shield(self._opening)  # what it opens is closed, not lost
            except (asyncio.CancelledError, GeneratorExit):
                self._given_up = True
                self.close()
                raise
        if self._given_up:
            raise CancelledError(GIVEN_UP)
        if self._ended or self._stream is None:
            raise StopAsyncIteration
        return await anext(self._stream)

    def close(self) -> None:
        """End the stream, which may never have been opened."""
        self._ended = True
        if self._stream is not None:
            self._stream.close()

    def __del__(self) -> None:
        """Leave the stream to its own finalizer."""

    def _opened(self, opening: asyncio.Future[ReplyStream]) -> None:
        self._opening = None
        if not opening.cancelled() and opening.exception() is None:
            self._stream = opening.result()
            if self._ended:  # meanwhile
                self._stream.close()


async def _completed(future: Any) -> Any:
    awaitable: Awaitable[Any] = (
        future if hasattr(future, "__await__") else asyncio.wrap_future(future)
    )
    return await awaitable


async def _made_elsewhere(
    call: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any]
) -> Any:
    """Return the future that *call* returns on another thread.

    Where nobody waits for it any more it is withdrawn.
    """
    made: list[Any] = []
    given_up = False

    def make() -> None:
        made.append(call(*args, **options))
        if given_up:
            made[0].cancel()

    try:
        await asyncio.to_thread(make)
    except asyncio.CancelledError:
        # The thread notes the call and then looks, here it is the other way round: so one of the
        # two finds what the other has left.
        given_up = True
        for each in made:
            each.cancel()
        raise
    return made[0]
