"""An executor serves calls: what goes in, what comes out, and when."""

from __future__ import annotations

import asyncio
import concurrent.futures
import importlib
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.options import Make
from tests.support.processes import run_threads, start_thread, wait_until
from tests.support.workers import Echo

from phalanx.actors import Executor, Launch, Limits
from phalanx.supervision import CallTimeout, NotPicklable, WouldDeadlock

WAIT = 30.0


def test_a_collective_call_has_the_answers_in_rank_order_or_those_asked_for(make: Make) -> None:
    ex = make(world_size=3)

    assert ex.collective_rpc("rank") == [0, 1, 2]
    assert ex.collective_rpc("rank", unique_reply_rank=2) == 2
    combined = ex.collective_rpc("rank", unique_reply_rank=1, aggregate=lambda *both: both)
    assert combined == ([0, 1, 2], 1)
    assert ex.collective_rpc("echo", args=({"a": [1, None]},)) == [{"a": [1, None]}] * 3
    assert ex.collective_rpc("echo", kwargs={"value": "x"}) == ["x"] * 3
    assert ex.collective_rpc(lambda worker, x: worker.ctx.rank + x, args=(10,)) == [10, 11, 12]


def imported_after_the_fork(_worker: Any) -> list[str]:
    """Return the modules of phalanx and of what it needs that the zygote had not imported."""
    zygote: Any = importlib.import_module("tests.support.preloaded_module")
    ours = ("phalanx", "cloudpickle", "pykka", "structlog", "zmq", "rich")
    return [
        name
        for name in sorted(sys.modules)
        if name.partition(".")[0] in ours and name not in zygote.IMPORTED
    ]


@pytest.mark.usefixtures("phalanx_leak_check")
def test_what_every_worker_needs_is_imported_once_in_the_zygote() -> None:
    with Executor(Echo, 1, launch=Launch(preload=("tests.support.preloaded_module",))) as executor:
        assert executor.collective_rpc(imported_after_the_fork) == [[]]


def test_futures_complete_in_order_without_a_waiter(make: Make) -> None:
    ex = make()
    done: list[int] = []
    finished = threading.Event()

    futures = [ex.collective_rpc("echo", args=(i,), non_block=True) for i in range(50)]
    for i, future in enumerate(futures):
        future.add_done_callback(lambda _, i=i: done.append(i))
    futures[-1].add_done_callback(lambda _: finished.set())

    assert finished.wait(30)
    assert done == list(range(50))
    assert [f.result() for f in futures] == [[i, i] for i in range(50)]
    assert futures[7]._get_snapshot() == (True, False, [7, 7], None)  # by asyncio, since 3.14
    assert concurrent.futures.wait(futures, timeout=5).not_done == set()


def test_a_future_is_awaited_from_asyncio_and_cancelling_its_task_voids_the_answer(
    make: Make, gate: Path
) -> None:
    ex = make()

    async def main() -> Any:
        first = await ex.collective_rpc("echo", args=(1,), non_block=True)
        many = await asyncio.gather(*(ex.aio.collective_rpc("echo", args=(i,)) for i in range(20)))
        outcomes = await ex.aio.gather("rank")
        one = await ex.aio.submit("echo", args=("pool",))
        task = asyncio.ensure_future(ex.aio.collective_rpc("gated", args=(str(gate),)))
        await asyncio.sleep(0)
        while not ex.status().in_flight:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return first, many, [o.value for o in outcomes], one

    first, many, outcomes, one = asyncio.run(main())
    gate.touch()

    assert first == [1, 1]
    assert many == [[i, i] for i in range(20)]
    assert outcomes == [0, 1]
    assert one == "pool"
    assert ex.collective_rpc("rank", timeout=30) == [0, 1]
    assert ex.status().dropped_replies == 2


def test_calls_from_many_threads_are_seen_in_one_order_by_all_ranks(
    make: Make, tmp_path: Path
) -> None:
    ex = make()

    def caller(thread: int) -> None:
        for i in range(40):
            ex.collective_rpc(
                lambda w, text, base: w.note(f"{base}/{w.ctx.rank}", text),
                args=(f"{thread}.{i}", str(tmp_path)),
            )

    run_threads(4, caller)

    orders = [
        [line.split()[0] for line in (tmp_path / str(rank)).read_text().splitlines()]
        for rank in range(2)
    ]
    assert len(orders[0]) == 160
    assert orders[0] == orders[1]


def test_a_timeout_names_the_method_and_the_ranks_and_its_late_answer_is_dropped(
    make: Make, gate: Path
) -> None:
    ex = make()

    with pytest.raises(CallTimeout, match=r"<lambda>.*rank\(s\) 1") as caught:
        ex.collective_rpc(
            lambda w, g: w.gated(g) if w.ctx.rank == 1 else "quick", timeout=0.2, args=(str(gate),)
        )
    gate.touch()

    assert caught.value.ranks == (1,)
    assert ex.collective_rpc("rank", timeout=30) == [0, 1]
    assert ex.status().dropped_replies >= 1


def test_a_gather_that_times_out_has_what_was_answered_and_names_all_ranks_that_are_late(
    make: Make, gate: Path
) -> None:
    ex = make(world_size=3)

    first, *late = ex.gather(
        lambda w, g: w.gated(g) if w.ctx.rank else "quick", 1.0, (str(gate),), non_block=True
    ).result(WAIT)
    gate.touch()

    assert first.get() == "quick"
    for outcome in late:
        with pytest.raises(CallTimeout) as caught:
            outcome.get()
        assert caught.value.ranks == (1, 2)


def test_a_future_expires_without_a_waiter_and_not_by_the_timeout_of_one(
    make: Make, gate: Path
) -> None:
    ex = make(world_size=1)
    expired = threading.Event()

    future = ex.collective_rpc("gated", 0.2, (str(gate),), non_block=True)
    future.add_done_callback(lambda _: expired.set())
    waited_for = ex.collective_rpc("gated", args=(str(gate), "answer"), non_block=True)

    assert expired.wait(30)
    assert isinstance(future.exception(), CallTimeout)
    with pytest.raises(TimeoutError):
        waited_for.result(0.1)
    gate.touch()
    assert waited_for.result(30) == ["answer"]


def test_a_slow_rank_makes_callers_wait_up_to_their_deadline_and_sends_nothing(
    make: Make, tmp_path: Path
) -> None:
    ex = make(world_size=1, limits=Limits(queue_depth=2))
    gate, notes = tmp_path / "gate", tmp_path / "notes"
    started = [
        ex.collective_rpc("gated_note", args=(str(gate), str(notes), f"n{i}"), non_block=True)
        for i in range(2)
    ]

    with pytest.raises(CallTimeout) as caught:
        ex.collective_rpc("gated_note", 0.2, (str(gate), str(notes), "never"))
    gate.touch()

    assert caught.value.sent is False
    assert [f.result(30) for f in started] == [["n0"], ["n1"]]
    assert ex.collective_rpc("echo", 30, ("after",)) == ["after"]
    assert "never" not in notes.read_text()


def test_a_full_queue_blocks_the_maker_of_futures_until_there_is_room(
    make: Make, gate: Path
) -> None:
    ex = make(world_size=1, limits=Limits(queue_depth=2))
    made: list[Any] = []

    def producer() -> None:
        made.extend(
            ex.collective_rpc("gated", args=(str(gate), i), non_block=True) for i in range(30)
        )

    thread = start_thread(producer)
    wait_until(lambda: ex.status().waiting >= 2)
    assert ex.status().waiting + ex.status().in_flight == 4
    gate.touch()
    thread.join(30)

    assert [f.result(30) for f in made] == [[i] for i in range(30)]


def test_a_callback_may_not_wait_and_one_that_is_slow_blocks_no_other_call(make: Make) -> None:
    ex = make(world_size=1)
    seen: list[BaseException] = []
    begun, release = threading.Event(), threading.Event()

    def callback(_: object) -> None:
        try:
            ex.collective_rpc("rank")
        except WouldDeadlock as error:
            seen.append(error)
        begun.set()
        release.wait(30)

    ex.collective_rpc("rank", non_block=True).add_done_callback(callback)

    assert begun.wait(30)
    assert len(seen) == 1
    assert ex.collective_rpc("rank", timeout=20) == [0]
    assert ex.collective_rpc("rank", 20, non_block=True).result(20) == [0]
    release.set()


def test_a_cancelled_future_that_was_not_sent_never_runs(make: Make, tmp_path: Path) -> None:
    ex = make(world_size=1, limits=Limits(queue_depth=1))
    gate, notes = tmp_path / "gate", tmp_path / "notes"
    first = ex.collective_rpc("gated", args=(str(gate),), non_block=True)
    second = ex.collective_rpc("note", args=(str(notes), "ran"), non_block=True)

    assert second.cancel()
    gate.touch()

    assert first.result(30) == [None]
    assert ex.collective_rpc("rank", 30) == [0]
    assert not notes.exists()
    with pytest.raises(concurrent.futures.CancelledError):
        second.result()


@pytest.mark.parametrize("method", ["collective_rpc", "submit"])
def test_a_task_cancelled_while_it_waits_for_a_place_has_called_nothing(
    make: Make, tmp_path: Path, method: str
) -> None:
    ex = make(Echo, 1, limits=Limits(queue_depth=1))
    gates, notes = [tmp_path / "first", tmp_path / "second"], tmp_path / "notes"
    full = [ex.submit("gated", args=(str(gate),)) for gate in gates]

    before = threading.active_count()

    async def main() -> None:
        arguments = {"args": (str(notes), "never")}
        task = asyncio.ensure_future(getattr(ex.aio, method)("note", **arguments))
        for _ in range(3):  # it has come to where it waits
            await asyncio.sleep(0)
        assert threading.active_count() == before  # no thread does so for it
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gates[0].touch()  # there is a place now, behind the second

    asyncio.run(main())

    assert full[0].result(WAIT) is None
    assert (ex.status().in_flight, ex.status().waiting) == (1, 0)
    gates[1].touch()
    assert [future.result(WAIT) for future in full] == [None, None]
    assert ex.collective_rpc("echo", WAIT, args=(1,)) == [1]
    assert not notes.exists()


def test_a_task_waits_for_a_place_up_to_its_deadline_and_passes_on_one_that_it_does_not_use(
    make: Make, tmp_path: Path
) -> None:
    ex = make(Echo, 1, limits=Limits(queue_depth=1))
    gates = [tmp_path / "first", tmp_path / "second"]
    full = [ex.submit("gated", args=(str(gate),)) for gate in gates]

    async def main() -> None:
        for late in (ex.aio.collective_rpc("echo", 0.1, (1,)), ex.proxy(timeout=0.1).echo.aio(1)):
            with pytest.raises(CallTimeout, match=r"echo: never sent.* 0\.1 s"):
                await late
        cancelled, wrong, last = [
            asyncio.ensure_future(ex.aio.call("echo", WAIT, (argument,), rank=0))
            for argument in (1, threading.Lock(), 7)
        ]
        for _ in range(3):  # they have come to where they wait
            await asyncio.sleep(0)
        cancelled.cancel()
        gates[0].touch()  # there is a place now, behind the second
        with pytest.raises(NotPicklable):
            await wrong
        gates[1].touch()
        assert await last == 7

    asyncio.run(asyncio.wait_for(main(), WAIT))

    assert [future.result(WAIT) for future in full] == [None, None]


class Fills:
    """An argument: while its call is being made, other calls take the last places."""

    def __init__(self, fill: Callable[[], None]) -> None:
        self._fill = fill

    def __reduce__(self) -> tuple[Any, ...]:
        self._fill()
        return (int, (7,))


@pytest.mark.parametrize("method", ["call", "stream"])
def test_an_event_loop_goes_on_where_others_fill_the_queue_while_its_call_is_made(
    make: Make, tmp_path: Path, method: str
) -> None:
    gate = tmp_path / "gate"
    ex = make(Echo, 1, limits=Limits(queue_depth=1))
    full: list[Any] = []

    def fill() -> None:
        full.extend(ex.call("gated", args=(str(gate),), non_block=True, rank=0) for _ in range(2))

    async def main() -> Any:
        argument = Fills(fill)
        if method == "stream":
            stream = ex.aio.stream(lambda _, got: [got], WAIT, (argument,), rank=0)
            assert not ex.has_room
            gate.touch()
            return [item async for item in stream]
        task = asyncio.ensure_future(ex.aio.call("echo", WAIT, (argument,), rank=0))
        while not full:
            await asyncio.sleep(0)
        assert not ex.has_room
        gate.touch()
        return [await task]

    assert asyncio.run(main()) == [7]
    assert [future.result(WAIT) for future in full] == [None, None]


def test_a_loop_that_was_closed_costs_nobody_his_call(make: Make, gate: Path) -> None:
    ex = make(Echo, 1)
    future = ex.collective_rpc("gated", args=(str(gate), 7), non_block=True)
    loop = asyncio.new_event_loop()
    awaiting = future.__await__()

    async def begin() -> None:
        next(awaiting)

    loop.run_until_complete(begin())
    loop.close()
    gate.touch()

    assert future.result(WAIT) == [7]
    assert ex.collective_rpc("echo", WAIT, args=(1,)) == [1]
