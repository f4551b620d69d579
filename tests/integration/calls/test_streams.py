"""Streams: a worker's generator, item by item."""

from __future__ import annotations

import asyncio
import gc
import math
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.options import Make
from tests.support.processes import wait_until
from tests.support.rank_faults import kill
from tests.support.workers import wait_for

from phalanx.actors import Executor, Limits, ReplyStream, WorkerActor
from phalanx.supervision import (
    CallTimeout,
    ExecutorClosed,
    NotPicklable,
    SpecError,
    StreamNotTaken,
    WorkerDied,
)

pytestmark = pytest.mark.both_transports
WAIT = 30.0


class Source(WorkerActor):
    """Yields, and notes in files how far it got."""

    def __init__(self) -> None:
        self.made = 0
        self.closed = 0

    def count(self, number: int) -> Iterator[int]:
        try:
            for each in range(number):
                self.made += 1
                yield each
        finally:
            self.closed += 1

    def progress(self) -> tuple[int, int]:
        return self.made, self.closed

    def noted(self, path: str) -> Iterator[int]:
        for each in range(1000):
            with open(path, "a") as file:
                file.write("x")
            yield each

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

    def number(self) -> int:
        return 7


def assert_closed(executor: Executor[Any]) -> None:
    """A rank that had made an item has closed its generator; one that never began has none."""
    progress = executor.collective_rpc("progress", WAIT)
    assert any(made for made, _ in progress)
    assert all(closed == (made > 0) for made, closed in progress)


def test_one_ranks_items_come_in_order_and_then_end(make: Make) -> None:
    executor = make(Source)

    assert list(executor.stream("count", WAIT, args=(1000,), rank=1)) == list(range(1000))
    assert executor.collective_rpc("progress", WAIT) == [(0, 0), (1000, 1)]


def test_every_ranks_items_come_with_their_rank(make: Make) -> None:
    executor = make(Source, 3)

    pairs = list(executor.stream("count", WAIT, args=(100,), window=4))

    for rank in range(3):
        assert [item for of, item in pairs if of == rank] == list(range(100))
    assert len(pairs) == 300


def test_no_more_is_made_than_the_window_allows(make: Make, tmp_path: Path) -> None:
    executor = make(Source, 1)
    note = tmp_path / "made"
    stream = executor.stream("noted", WAIT, args=(str(note),), rank=0, window=4)

    taken = [next(stream) for _ in range(10)]
    stream.close()
    executor.collective_rpc("number", WAIT)

    assert taken == list(range(10))
    assert len(note.read_text()) <= 14


def test_a_stream_closed_or_dropped_early_closes_its_generator(make: Make) -> None:
    closed, dropped = make(Source, 2), make(Source, 2)

    with closed.stream("count", WAIT, args=(10**9,)) as stream:
        next(stream)
    for _ in dropped.stream("count", WAIT, args=(10**9,)):
        break
    gc.collect()

    assert_closed(closed)
    assert_closed(dropped)
    assert list(stream) == []


def test_items_before_an_exception_are_not_lost(make: Make) -> None:
    executor = make(Source, 1)
    stream = executor.stream("blow_up", WAIT, args=(5,), rank=0)

    assert [next(stream) for _ in range(5)] == [0, 1, 2, 3, 4]
    with pytest.raises(KeyError, match="boom") as caught:
        next(stream)
    assert any("rank 0" in note for note in caught.value.__notes__)
    with pytest.raises(StopIteration):
        next(stream)
    assert executor.call("number", WAIT, rank=0) == 7


def test_one_ranks_exception_ends_the_stream_on_all(make: Make) -> None:
    executor = make(Source, 3)

    with pytest.raises(KeyError):
        for _ in executor.stream("blow_up_on", WAIT, args=(1,)):
            pass

    assert executor.collective_rpc("number", WAIT) == [7, 7, 7]


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
    assert between.result(WAIT) == [(100, 1)] * 2
    assert after.result(WAIT) == [(200, 2)] * 2


def test_large_items_arrive_whole_and_may_be_kept(make: Make) -> None:
    executor = make(Source, 2)

    kept = list(executor.stream("arrays", WAIT, args=(30, 1 << 20), window=3))

    for rank in (0, 1):
        mine = [item for of, item in kept if of == rank]
        assert len(mine) == 30
        assert all((item == rank + number).all() for number, item in enumerate(mine))


def test_an_item_that_cannot_travel_is_the_streams_error(make: Make) -> None:
    executor = make(Source, 1)
    stream = executor.stream("unpicklable", WAIT, rank=0)

    assert next(stream) == 1
    with pytest.raises(NotPicklable, match="item 2"):
        next(stream)


def test_whatever_can_be_iterated_can_be_streamed_and_nothing_else(make: Make) -> None:
    executor = make(Source, 1)

    assert list(executor.stream("listed", WAIT, rank=0)) == [1, 2, 3]
    assert list(executor.stream("count", WAIT, args=(0,), rank=0)) == []
    with pytest.raises(TypeError, match="not iterable"):
        list(executor.stream("number", WAIT, rank=0))


def test_closing_the_executor_ends_a_stream_with_an_error(make: Make) -> None:
    executor = make(Source, 1)
    stream = executor.stream("count", WAIT, args=(10**9,), rank=0, window=2)
    assert next(stream) == 0

    executor.close()

    with pytest.raises(ExecutorClosed):
        list(stream)


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


@pytest.mark.parametrize("how", ["dropped", "closed", "cancelled"])
def test_an_async_generator_left_in_the_middle_frees_the_rank(make: Make, how: str) -> None:
    ex = make(Source, 1)

    async def respond() -> AsyncGenerator[int, None]:
        async for item in ex.aio.stream("count", args=(10**9,), rank=0, window=2):
            yield item

    async def client() -> None:
        async for _ in respond():
            await asyncio.sleep(0)

    async def main() -> int:
        response = respond()
        await anext(response)
        if how == "closed":
            await response.aclose()
        elif how == "cancelled":
            task = asyncio.ensure_future(client())
            await asyncio.sleep(0.01)
            task.cancel()
        del response
        return await ex.aio.call("number", WAIT, rank=0)  # type: ignore[no-any-return]

    assert asyncio.run(main()) == 7


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


def test_a_stream_that_is_being_taken_has_no_limit(make: Make, gate: Path) -> None:
    ex = make(Source, 1)
    stream = ex.stream("gated", args=(str(gate),), rank=0, take_within=0.05)
    assert next(stream) == "before"
    opener = threading.Timer(0.3, gate.touch)
    opener.start()

    assert next(stream) == "after"
    opener.join()


@pytest.mark.parametrize("limit", [0, -1, "soon", math.nan])
def test_a_limit_for_the_taker_that_makes_no_sense_is_refused(make: Make, limit: Any) -> None:
    with pytest.raises(SpecError, match="take_within"):
        make(Source, 1, launch="inline").stream("count", args=(1,), rank=0, take_within=limit)


def test_a_stream_waits_for_a_restart_like_any_call(make: Make) -> None:
    executor = make(Source, 2)
    kill(executor)

    pairs: list[tuple[int, int]] = []
    deadline = time.monotonic() + WAIT
    while not pairs and time.monotonic() < deadline:
        try:
            pairs = list(executor.stream("count", WAIT, args=(10,)))
        except WorkerDied:
            continue  # it had begun before the death was known

    assert sorted(pairs) == sorted((rank, item) for rank in (0, 1) for item in range(10))


def test_a_stream_works_inline(make: Make) -> None:
    executor = make(Source, 1, launch="inline")

    assert list(executor.stream("count", args=(3,), rank=0)) == [0, 1, 2]
    assert list(executor.stream("count", args=(2,))) == [(0, 0), (0, 1)]
    with executor.stream("count", args=(9,), rank=0) as stream:
        next(stream)
    assert executor.call("progress", rank=0)[1] == 3
