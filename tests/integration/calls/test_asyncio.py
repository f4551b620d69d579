"""Calls that are awaited, and tasks that are cancelled while they wait."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.options import Make
from tests.support.workers import Echo

from phalanx.actors import Limits

WAIT = 30.0


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
