"""A group's shared lock, across kills, incarnations and spares."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support.options import Make
from tests.support.rank_faults import OFTEN, kill
from tests.support.workers import Echo, wait_for

from phalanx.actors import Executor, WorkerContext
from phalanx.supervision import LockTimeout, SpecError, Strategy

LONG = 30.0
USUAL = {"world_size": 3, "intensity": OFTEN}


class Locker(Echo):
    def hold(self, mark: str) -> None:
        with self.ctx.lock("it"):
            Path(mark).touch()
            wait_for(f"{mark}.gate", 600)

    def enter(self, timeout: float | None = None) -> Any:
        with self.ctx.lock("it", timeout) as died:
            return None if died is None else (died.rank, died.incarnation)


def hold(ex: Executor[Any], rank: int, mark: Path) -> None:
    ex.call("hold", args=(str(mark),), non_block=True, rank=rank)
    wait_for(str(mark))


@pytest.mark.parametrize("standby", [0, 1])
def test_the_next_incarnation_has_the_same_locks(make: Make, tmp_path: Path, standby: int) -> None:
    ex = make(Locker, strategy=Strategy.ONE_FOR_ONE, standby=standby)
    for round_ in (1, 2):
        hold(ex, 1, tmp_path / f"mark{round_}")
        with pytest.raises(LockTimeout, match=f"rank 1 #{round_}"):
            ex.call("enter", LONG, (0.0,), rank=2)
        kill(ex, 1)
        assert ex.call("enter", LONG, rank=1) == (1, round_)
    assert ex.collective_rpc("enter", LONG) == [None, None, None]


def test_a_whole_group_that_is_killed_inside_goes_on(make: Make, tmp_path: Path) -> None:
    ex = make(Locker, strategy=Strategy.ONE_FOR_ALL)
    hold(ex, 2, tmp_path / "mark")

    for rank in range(3):
        kill(ex, rank)

    told = ex.collective_rpc("enter", LONG, retries=5)
    assert sorted(told, key=str) in ([(2, 1), None, None], [None, None, None])
    assert ex.collective_rpc("enter", LONG) == [None, None, None]


def test_an_unknown_scope_is_refused() -> None:
    with (
        Executor(Locker, 1, launch="inline") as ex,
        pytest.raises(SpecError, match="scope='machine'"),
    ):
        ex.call(lambda worker: worker.ctx.lock("it", scope="machine"), rank=0)


def test_inline_it_is_a_lock_too() -> None:
    ex = Executor(Locker, 1, launch="inline")

    assert ex.call("enter", rank=0) is None

    ex.close()


class Keeper(Locker):
    def on_start(self, ctx: WorkerContext) -> None:
        ctx.lock("it").acquire()


def test_a_lock_that_an_inline_rank_keeps_ends_with_its_executor() -> None:
    for _ in range(2):  # the second has the first one's descriptor
        with Executor(Keeper, 1, launch="inline") as ex:
            assert ex.call("rank", rank=0) == 0
