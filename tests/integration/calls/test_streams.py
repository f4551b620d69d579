"""Streams: a worker's generator, item by item."""

from __future__ import annotations

import asyncio
import gc
import math
import sys
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.options import Make
from tests.support.processes import wait_until
from tests.support.workers import Echo, wait_for

from phalanx.actors import Executor, Limits, ReplyStream, WorkerActor
from phalanx.supervision import (
    CallTimeout,
    ExecutorClosed,
    NotPicklable,
    SpecError,
    StreamNotTaken,
)

pytestmark = pytest.mark.both_transports
WAIT = 30.0


class Source(WorkerActor):
    """Yields, and knows how far it got."""

    def __init__(self) -> None:
        self.made = 0
        self.open = 0

    def count(self, number: int) -> Iterator[int]:
        self.open += 1
        try:
            for each in range(number):
                self.made += 1
                yield each
        finally:
            self.open -= 1

    def progress(self) -> tuple[int, int]:
        """Return how many items were made, and how many generators are not closed."""
        return self.made, self.open

    def blow_up(self, after: int) -> Iterator[int]:
        yield from range(after)
        raise KeyError("boom")

    def blow_up_on(self, rank: int) -> Iterator[int]:
        for each in range(10_000):
            if each == 3 and self.ctx.rank == rank:
                raise KeyError("boom")
            yield each

    def arrays(self, number: int, size: int) -> Iterator[Any]:
        for each in range(number):
            yield np.full(size, each + self.ctx.rank, dtype=np.uint8)

    def gated(self, gate: str) -> Iterator[str]:
        yield "before"
        wait_for(gate)
        yield "after"

    def endless(self, gate: str) -> Iterator[str]:
        yield "before"
        wait_for(gate)
        while True:
            yield "after"

    def unpicklable(self) -> Iterator[Any]:
        yield 1
        yield (each for each in "no")

    def listed(self) -> list[int]:
        return [1, 2, 3]

    def exhausted(self, error: Exception) -> list[int]:
        raise error

    def number(self) -> int:
        return 7


def assert_closed(executor: Executor[Any]) -> None:
    """No rank has a generator that is not closed, and one at least has made an item."""
    progress = executor.collective_rpc("progress", WAIT)
    assert any(made for made, _ in progress)
    assert not any(left for _, left in progress)


def test_items_come_in_order_with_their_rank_if_all_make_them_and_may_be_kept(make: Make) -> None:
    executor = make(Source, 3)

    assert list(executor.stream("count", WAIT, args=(1000,), rank=1)) == list(range(1000))
    assert executor.collective_rpc("progress", WAIT) == [(0, 0), (1000, 0), (0, 0)]
    pairs = list(executor.stream("count", WAIT, args=(100,), window=4))
    arrays = list(executor.stream("arrays", WAIT, args=(30, 1 << 20), window=3))

    assert (len(pairs), len(arrays)) == (300, 90)
    for rank in range(3):
        assert [item for of, item in pairs if of == rank] == list(range(100))
        large = [item for of, item in arrays if of == rank]
        assert len(large) == 30
        assert all((item == rank + number).all() for number, item in enumerate(large))

    with pytest.raises(KeyError):
        for _ in executor.stream("blow_up_on", WAIT, args=(1,)):
            pass
    assert executor.collective_rpc("number", WAIT) == [7, 7, 7]  # it has ended on all


def test_no_more_is_made_than_the_window_allows_and_a_close_is_an_error(make: Make) -> None:
    executor = make(Source, 1)
    stream = executor.stream("count", WAIT, args=(1000,), rank=0, window=4)

    taken = [next(stream) for _ in range(10)]
    stream.close()
    made, _ = executor.call("progress", WAIT, rank=0)

    assert taken == list(range(10))
    assert made <= 14

    stream = executor.stream("count", WAIT, args=(10**9,), rank=0, window=2)
    assert next(stream) == 0
    executor.close()
    with pytest.raises(ExecutorClosed):
        list(stream)


def test_a_rank_owes_a_stream_also_while_it_waits_for_its_consumer(make: Make) -> None:
    executor = make(Source, 1)

    with executor.stream("count", WAIT, args=(10,), rank=0, window=1):
        wait_until(lambda: (rank := executor.ranks[0]).method and not rank.running_for)
        assert executor.ranks[0].owed == 1


def test_a_stream_closed_or_dropped_early_closes_its_generator(make: Make) -> None:
    executor = make(Source, 2)

    with executor.stream("count", WAIT, args=(10**9,)) as stream:
        next(stream)
    assert_closed(executor)
    for _ in executor.stream("count", WAIT, args=(10**9,)):
        break
    gc.collect()
    assert_closed(executor)
    assert list(stream) == []


def test_items_before_an_error_are_not_lost_and_the_rank_goes_on(make: Make) -> None:
    executor = make(Source, 1)
    stream = executor.stream("blow_up", WAIT, args=(5,), rank=0)

    assert [next(stream) for _ in range(5)] == [0, 1, 2, 3, 4]
    with pytest.raises(KeyError, match="boom") as caught:
        next(stream)
    assert any("rank 0" in note for note in caught.value.__notes__)
    with pytest.raises(StopIteration):
        next(stream)

    stream = executor.stream("unpicklable", WAIT, rank=0)
    assert next(stream) == 1
    with pytest.raises(NotPicklable, match="item 2"):
        next(stream)

    assert list(executor.stream("listed", WAIT, rank=0)) == [1, 2, 3]
    assert list(executor.stream("count", WAIT, args=(0,), rank=0)) == []
    with pytest.raises(TypeError, match="not iterable"):
        list(executor.stream("number", WAIT, rank=0))
    with pytest.raises(RuntimeError, match="exhausted raised StopIteration"):
        list(executor.stream("exhausted", WAIT, (StopIteration(),), rank=0))
    assert list(executor.stream("count", WAIT, (3,), rank=0, window=sys.maxsize)) == [0, 1, 2]
    assert executor.call("number", WAIT, rank=0) == 7


def test_a_deadline_ends_the_stream_in_the_worker_too(make: Make, gate: Path) -> None:
    executor = make(Source, 1)
    stream = executor.stream("gated", 0.2, args=(str(gate),), rank=0)

    assert next(stream) == "before"
    with pytest.raises(CallTimeout):
        next(stream)

    gate.touch()
    assert executor.call("number", WAIT, rank=0) == 7


def test_calls_behind_a_stream_keep_their_order(make: Make) -> None:
    executor = make(Source, 2)
    first = executor.stream("count", WAIT, args=(100,), window=3)
    between = executor.collective_rpc("progress", WAIT, non_block=True)
    second = executor.stream("count", WAIT, args=(100,), window=3)
    after = executor.collective_rpc("progress", WAIT, non_block=True)

    assert len(list(first)) == len(list(second)) == 200
    assert between.result(WAIT) == [(100, 0)] * 2
    assert after.result(WAIT) == [(200, 0)] * 2


def test_a_stream_is_awaited_item_by_item(make: Make) -> None:
    executor = make(Source, 2)

    async def take() -> tuple[list[int], int]:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0)

        ticking = asyncio.create_task(tick())
        items = [item async for item in executor.aio.stream("count", WAIT, args=(500,), rank=0)]
        ticking.cancel()
        return items, ticks

    items, ticks = asyncio.run(take())

    assert items == list(range(500))
    assert ticks > 1


def test_more_streams_than_there_are_places_are_taken_by_tasks_of_one_loop(make: Make) -> None:
    ex = make(Source, 1, limits=Limits(queue_depth=1))

    async def taken(count: int) -> list[int]:
        return [item async for item in ex.aio.stream("count", args=(count,), rank=0)]

    async def main() -> list[list[int]]:
        return await asyncio.wait_for(asyncio.gather(*map(taken, range(12))), WAIT)

    assert asyncio.run(main()) == [list(range(count)) for count in range(12)]


def test_a_stream_that_waits_for_a_place_may_be_given_up(make: Make, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    ex = make(Source, 1, limits=Limits(queue_depth=1))
    full = [
        ex.call(lambda _, path: wait_for(path), args=(str(gate),), non_block=True, rank=0)
        for _ in range(2)
    ]
    assert not ex.has_room

    async def main() -> None:
        never, late = (ex.aio.stream("count", args=(3,), rank=0) for _ in range(2))
        await never.aclose()
        assert [item async for item in never] == []
        task = asyncio.ensure_future(anext(late))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(task, 0.05)
        gate.touch()
        with pytest.raises(CancelledError, match="closed"):
            await anext(late)

    asyncio.run(main())  # waits for the thread that opens the stream

    assert [future.result(WAIT) for future in full] == [None, None]
    assert ex.call("listed", WAIT, rank=0) == [1, 2, 3]
    wait_until(lambda: (ex.status().in_flight, ex.status().waiting) == (0, 0))


def test_a_cancelled_taker_frees_the_rank_though_a_cycle_holds_the_stream(
    make: Make, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    ex = make(Source, 1)
    streams: list[ReplyStream] = []  # what a cycle of tracebacks does in a server

    async def respond() -> AsyncIterator[str]:
        streams.append(ex.aio.stream("endless", args=(str(gate),), rank=0))
        async for item in streams[0]:
            yield item

    async def main() -> None:
        response = respond()
        assert await anext(response) == "before"
        with pytest.raises(TimeoutError):  # the client goes away
            await asyncio.wait_for(anext(response), 0.05)
        gate.touch()
        assert await ex.aio.call("number", WAIT, rank=0) == 7
        with pytest.raises(CancelledError, match="closed"):
            [item async for item in streams[0]]

    asyncio.run(main())


def test_an_async_generator_left_in_the_middle_frees_the_rank(make: Make) -> None:
    ex = make(Source, 1)

    async def respond() -> AsyncGenerator[int, None]:
        async for item in ex.aio.stream("count", args=(10**9,), rank=0, window=2):
            yield item

    async def client(taking: asyncio.Event) -> None:
        async for _ in respond():
            taking.set()
            await asyncio.sleep(0)

    async def main(how: str) -> int:
        if how == "cancelled":
            taking = asyncio.Event()
            task = asyncio.ensure_future(client(taking))
            await taking.wait()
            task.cancel()
        else:
            response = respond()
            await anext(response)
            if how == "closed":
                await response.aclose()
            del response
        return await ex.aio.call("number", WAIT, rank=0)  # type: ignore[no-any-return]

    for how in ("dropped", "closed", "cancelled"):
        assert asyncio.run(main(how)) == 7


def test_a_stream_that_nobody_takes_is_closed_and_its_late_taker_told(make: Make) -> None:
    ex = make(Source, 2)
    stream = ex.stream("count", args=(10**9,), window=4, take_within=0.2)
    next(stream)

    assert ex.collective_rpc("number", WAIT) == [7, 7]
    rest: list[tuple[int, int]] = []
    with pytest.raises(StreamNotTaken, match="take_within"):
        rest.extend(stream)
    assert {rank for rank, _ in rest} == {0, 1}
    assert_closed(ex)


def test_the_one_item_that_a_left_event_loop_waited_for_has_the_limit(
    make: Make, gate: Path
) -> None:
    ex = make(Source, 1)
    stream = ex.stream("gated", args=(str(gate),), rank=0, window=1, take_within=0.2)
    assert next(stream) == "before"
    loop = asyncio.new_event_loop()
    taker = loop.create_task(stream.__anext__())
    loop.run_until_complete(asyncio.sleep(0))
    gate.touch()

    assert ex.call("number", WAIT, rank=0) == 7
    assert loop.run_until_complete(taker) == "after"
    with pytest.raises(StreamNotTaken):
        next(stream)
    loop.close()


def test_a_stream_that_is_being_taken_has_no_limit(make: Make, gate: Path) -> None:
    ex = make(Source, 1)
    stream = ex.stream("gated", args=(str(gate),), rank=0, take_within=0.05)
    assert next(stream) == "before"
    opener = threading.Timer(0.3, gate.touch)
    opener.start()

    assert next(stream) == "after"
    opener.join()


def test_a_stream_works_inline_and_a_limit_for_its_taker_makes_sense(make: Make) -> None:
    executor = make(Source, 1, launch="inline")

    assert list(executor.stream("count", args=(3,), rank=0)) == [0, 1, 2]
    assert list(executor.stream("count", args=(2,))) == [(0, 0), (0, 1)]
    with executor.stream("count", args=(9,), rank=0) as stream:
        next(stream)
    assert executor.call("progress", rank=0)[1] == 0
    with pytest.raises(NotPicklable):
        executor.stream("count", args=(threading.Lock(),), rank=0)
    failing = make(Echo, 1, launch="inline").stream("fail", rank=0)
    with pytest.raises(ValueError, match="boom"):
        next(failing)
    limit: Any
    for limit in (0, -1, "soon", math.nan):
        with pytest.raises(SpecError, match="take_within"):
            executor.stream("count", args=(1,), rank=0, take_within=limit)
    stream = executor.stream("count", args=(9,), rank=0)
    next(stream)
    executor.close()
    with pytest.raises(ExecutorClosed):
        next(stream)
