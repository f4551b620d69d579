# pyright: reportPrivateUsage=false
# An error in the executor's own thread has to be made in it.
"""Ranks get their processes beside the group's actor, which goes on hearing of everybody else."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.options import Make, with_defaults
from tests.support.processes import LONG, start_thread, wait_until
from tests.support.rank_faults import OFTEN, kill, wait_for_view
from tests.support.workers import Echo

from phalanx.actors import Executor, RestartPolicy, WorkerContext
from phalanx.actors.group.membership import THREAD
from phalanx.runtime import Runtime
from phalanx.supervision import ExecutorClosed, Strategy, WorkerDied

SLOW = """
import pathlib, time
here = pathlib.Path(__file__).parent
while not (here / "open").exists():
    time.sleep(0.002)
"""


class Slow:
    """A runtime whose zygote imports for as long as the test likes."""

    def __init__(self, folder: Path) -> None:
        self.preload = ("imports_slowly",)
        self.gate = folder / "open"
        (folder / "imports_slowly.py").write_text(SLOW)
        self.gate.touch()
        self.runtime = Runtime(console=None, stream=False)

    @property
    def zygote(self) -> int:
        """Its pid; 0 while there is none that can fork."""
        return self.runtime.launcher.zygote(self.preload).pid or 0

    def shut(self) -> None:
        """Have no more processes started until the gate is opened: another zygote imports."""
        self.gate.unlink()
        old = self.zygote
        os.kill(old, signal.SIGKILL)
        wait_until(lambda: self.zygote != old)


@pytest.fixture
def slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    monkeypatch.syspath_prepend(str(tmp_path))
    slow = Slow(tmp_path)
    with slow.runtime:
        yield slow


@pytest.fixture
def make(slow: Slow, make: Make) -> Make:
    def build(worker: Any = Echo, world_size: int = 3, **options: Any) -> Executor[Any]:
        usual = with_defaults(
            options,
            strategy=Strategy.ONE_FOR_ONE,
            intensity=OFTEN,
            limits={"start": 300.0},
            launch={"preload": slow.preload},
            runtime=slow.runtime,
        )
        return make(worker, world_size, **usual)

    return build


def busy(ex: Executor[Any], rank: int, folder: Path) -> Any:
    """Return a call that *rank* has begun and will not end."""
    begun = folder / f"begun {rank}"
    args = (str(folder / "never"), str(begun), "begun")
    call = ex.call("gated_note", args=args, non_block=True, rank=rank)
    wait_until(begun.exists)
    return call


def wait_launching(ex: Executor[Any], rank: int, incarnation: int = 2) -> None:
    """Return once *rank* has been given a new start, for which it has no process."""

    def holds(view: Any) -> bool:
        info = view.ranks[rank]
        return (info.incarnation, info.state, info.pid) == (incarnation, "starting", None)

    wait_for_view(ex, holds)


@pytest.mark.both_transports
def test_a_death_is_told_while_another_rank_waits_for_its_process(
    make: Make, slow: Slow, tmp_path: Path
) -> None:
    ex = make()
    calls = [busy(ex, rank, tmp_path) for rank in range(3)]
    slow.shut()

    for rank in (0, 1):
        kill(ex, rank)
        assert isinstance(calls[rank].exception(LONG), WorkerDied)
        wait_launching(ex, rank)

    assert not calls[2].done()
    (tmp_path / "never").touch()
    assert calls[2].result(LONG) == "begun"
    slow.gate.touch()
    assert ex.collective_rpc("rank", LONG) == [0, 1, 2]
    assert [info.incarnation for info in ex.ranks] == [2, 2, 1]


def test_warm_spares_take_their_ranks_while_their_successors_wait_for_a_process(
    make: Make, slow: Slow, tmp_path: Path
) -> None:
    ex = make(standby=2)
    wait_for_view(ex, lambda view: view.standby == 2)
    calls = [busy(ex, rank, tmp_path) for rank in range(2)]
    slow.shut()

    for rank in (0, 1):
        kill(ex, rank)
        assert isinstance(calls[rank].exception(LONG), WorkerDied)
        assert ex.call("rank", LONG, rank=rank) == rank

    assert not slow.gate.exists()
    slow.gate.touch()
    wait_for_view(ex, lambda view: view.standby == 2)


@pytest.mark.both_transports
def test_closing_withdraws_what_waits_for_a_process(make: Make, slow: Slow, tmp_path: Path) -> None:
    ex = make()
    call = busy(ex, 0, tmp_path)
    slow.shut()
    kill(ex, 0)
    wait_launching(ex, 0)
    assert isinstance(call.exception(LONG), WorkerDied)
    waiting = ex.call("rank", non_block=True, rank=0)

    closer = start_thread(ex.close)
    closer.join(LONG)

    assert not closer.is_alive()
    assert isinstance(waiting.exception(LONG), ExecutorClosed)
    assert not slow.gate.exists()


def test_a_first_start_that_waits_for_a_process_is_withdrawn(make: Make, slow: Slow) -> None:
    make(name="warms up").close()
    slow.shut()
    made: list[Executor[Any]] = []
    errors: list[BaseException] = []

    def build() -> None:
        try:
            made.append(make(name="cell", replace=True))
        except ExecutorClosed as error:
            errors.append(error)

    first, second = threading.Thread(target=build), threading.Thread(target=build)
    first.start()
    wait_until(lambda: f"{THREAD} cell" in [thread.name for thread in threading.enumerate()])
    second.start()  # as a notebook cell that is run again
    first.join(LONG)

    assert len(errors) == 1
    assert not slow.gate.exists()
    slow.gate.touch()
    second.join(LONG)
    assert made[0].collective_rpc("rank", LONG) == [0, 1, 2]


class Stays(Echo):
    """Is kept when another rank dies."""

    def on_reform(self, ctx: WorkerContext) -> None:
        pass


def test_a_start_that_is_overtaken_by_another_death_gives_its_place_back(
    make: Make, slow: Slow
) -> None:
    ex = make(
        Stays, strategy=Strategy.ONE_FOR_ALL, policy=RestartPolicy(survivors="keep"), devices="cpu"
    )
    before = [info.pid for info in ex.ranks]
    slow.shut()
    kill(ex, 0)
    wait_launching(ex, 0)

    kill(ex, 1)
    wait_launching(ex, 0, 3)  # in one epoch with rank 1
    wait_launching(ex, 1, 2)
    slow.gate.touch()

    assert ex.collective_rpc("rank", LONG) == [0, 1, 2]
    assert [info.incarnation for info in ex.ranks] == [3, 2, 1]
    assert ex.ranks[2].pid == before[2]


def test_a_planned_restart_hears_of_deaths_while_it_waits_for_a_process(
    make: Make, slow: Slow
) -> None:
    ex = make()
    slow.shut()
    planner = start_thread(ex.restart, 0)
    wait_launching(ex, 0)

    kill(ex, 1)
    wait_launching(ex, 1)
    slow.gate.touch()
    planner.join(LONG)

    assert not planner.is_alive()
    assert ex.collective_rpc("rank", LONG) == [0, 1, 2]
    status = ex.status()
    assert (status.planned, status.restarts) == (1, 1)


def test_an_error_in_the_executors_own_thread_ends_a_restart_and_answers_whoever_waits(
    make: Make, slow: Slow, tmp_path: Path
) -> None:
    ex = make(standby=1)
    wait_for_view(ex, lambda view: view.standby == 1)
    call = busy(ex, 2, tmp_path)
    slow.shut()
    for rank in (0, 1):  # one waits for a process, and so does the next spare
        kill(ex, rank)
    wait_launching(ex, 1)
    waiting = [ex.collective_rpc("rank", non_block=True), ex.call("rank", non_block=True, rank=1)]

    ex._group.post(len)  # a TypeError: it wants an argument

    for each in (call, *waiting):
        error = each.exception(LONG)
        assert isinstance(error, (WorkerDied, ExecutorClosed))
        assert "the executor itself: TypeError" in str(error)
    assert ex.wait_closed(LONG)
    assert not slow.gate.exists()
