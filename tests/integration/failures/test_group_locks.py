"""A group's shared lock, across kills, incarnations and spares."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support.options import Make
from tests.support.rank_faults import OFTEN, kill
from tests.support.workers import Echo, wait_for

from phalanx.actors import Executor
from phalanx.supervision import LockTimeout, Strategy, WorkerDied

LONG = 30.0


class Locker(Echo):
    def hold(self, mark: str) -> None:
        with self.ctx.lock("it"):
            Path(mark).touch()
            wait_for(f"{mark}.gate", 600)

    def take(self) -> None:
        self.ctx.lock("it").acquire()

    def take_and_exit(self, code: int) -> None:
        self.take()
        sys.exit(code)

    def enter(self, timeout: float | None = None) -> Any:
        with self.ctx.lock("it", timeout) as died:
            return None if died is None else (died.rank, died.incarnation)

    def count_up(self, path: str, times: int) -> None:
        """Read, then write: what gets lost where two do it at once."""
        file = Path(path)
        for _ in range(times):
            with self.ctx.lock("file"):
                file.write_text(str(int(file.read_text()) + 1))


def build(make: Make, world_size: int = 3, **options: Any) -> Executor[Any]:
    options = {"strategy": Strategy.ONE_FOR_ONE, **options}
    return make(Locker, world_size, intensity=OFTEN, **options)


def hold(ex: Executor[Any], rank: int, mark: Path) -> Any:
    call = ex.call("hold", args=(str(mark),), non_block=True, rank=rank)
    wait_for(str(mark))
    return call


def test_one_worker_at_a_time_is_inside(make: Make, tmp_path: Path) -> None:
    ex = build(make)
    (tmp_path / "count").write_text("0")

    ex.collective_rpc("count_up", LONG, (str(tmp_path / "count"), 100))

    assert (tmp_path / "count").read_text() == "300"


def test_a_killed_holder_is_followed_by_one_who_is_told(make: Make, tmp_path: Path) -> None:
    ex = build(make)
    held = hold(ex, 1, tmp_path / "mark")
    waiting = ex.call("enter", non_block=True, rank=0)

    with pytest.raises(LockTimeout, match="rank 1 #1"):
        ex.call("enter", LONG, (0.0,), rank=2)
    kill(ex, 1)

    assert waiting.result(LONG) == (1, 1)
    with pytest.raises(WorkerDied):
        held.result(LONG)
    assert ex.collective_rpc("enter", LONG) == [None, None, None]


@pytest.mark.parametrize("code", [None, 0, 3])
def test_a_holder_that_ends_in_good_order_is_followed_too(make: Make, code: int | None) -> None:
    ex = build(make, 2)
    if code is None:
        ex.call("take", LONG, rank=0)
        ex.restart(0)
    else:
        with pytest.raises(WorkerDied):
            ex.call("take_and_exit", LONG, (code,), rank=0)

    assert ex.call("enter", LONG, (LONG,), rank=1) == (0, 1)


@pytest.mark.parametrize("standby", [0, 1])
def test_the_next_incarnation_has_the_same_locks(make: Make, tmp_path: Path, standby: int) -> None:
    ex = build(make, standby=standby)
    for round_ in (1, 2):
        hold(ex, 1, tmp_path / f"mark{round_}")
        kill(ex, 1)
        assert ex.call("enter", LONG, rank=1) == (1, round_)


def test_a_whole_group_that_is_killed_inside_goes_on(make: Make, tmp_path: Path) -> None:
    ex = build(make, strategy=Strategy.ONE_FOR_ALL)
    hold(ex, 2, tmp_path / "mark")

    for rank in range(3):
        kill(ex, rank)

    told = ex.collective_rpc("enter", LONG, retries=5)
    assert sorted(told, key=str) in ([(2, 1), None, None], [None, None, None])
    assert ex.collective_rpc("enter", LONG) == [None, None, None]


def test_inline_it_is_a_lock_too() -> None:
    ex = Executor(Locker, 1, launch="inline")

    assert ex.call("enter", rank=0) is None

    ex.close()
