"""Calls in a row: many are sent before the first is answered."""

from __future__ import annotations

import concurrent.futures
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tests.support.options import Make
from tests.support.processes import start_thread, wait_until
from tests.support.rank_faults import kill
from tests.support.workers import Echo, wait_for

from phalanx.supervision import Strategy, WorkerDied

WAIT = 30.0


class Counter(Echo):
    """Notes what it is called with, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def see(self, number: int) -> int:
        self.seen.append(number)
        return number

    def seen_so_far(self) -> list[int]:
        return self.seen

    def wait_at(self, gate: str) -> None:
        """Wait there, and say in a file that it does."""
        Path(f"{gate}.{self.ctx.rank}").touch()
        wait_for(gate)


def test_while_a_future_is_waited_for_the_driver_sleeps(make: Make, gate: Path) -> None:
    """For seconds, if that is what the call takes: nothing of ours has to look meanwhile."""
    ex = make(Counter, 1)
    future = ex.call("wait_at", args=(str(gate),), non_block=True, rank=0)
    waiter = start_thread(future.result, WAIT)
    wait_for(f"{gate}.0")
    loop = next(each.native_id for each in threading.enumerate() if each.name == "phalanx-loop")

    def naps() -> int:
        told = Path(f"/proc/self/task/{loop}/status").read_text()
        return int(told.split("\nvoluntary_ctxt_switches:\t")[1].split()[0])

    before = naps()
    time.sleep(1.0)  # nothing happens: there is no event for that
    woken = naps() - before

    gate.touch()
    waiter.join()
    assert woken < 50


def test_a_long_row_is_run_once_and_in_order_whatever_its_calls_are(make: Make) -> None:
    ex = make(Counter, 2)

    futures: list[Any] = []
    for n in range(500):
        if n % 7:
            futures.append(ex.collective_rpc("see", args=(n,), non_block=True))
        else:
            futures.append(ex.call("see", args=(n,), non_block=True, rank=0))

    answers = [future.result(WAIT) for future in futures]
    assert answers == [[n, n] if n % 7 else n for n in range(500)]
    assert ex.call("seen_so_far", WAIT, rank=0) == list(range(500))
    assert ex.call("seen_so_far", WAIT, rank=1) == [n for n in range(500) if n % 7]

    sent = [bytes([n % 251]) * (n * 997 % 90_000) for n in range(100)]  # large and small
    futures = [ex.collective_rpc("echo", args=(each,), non_block=True) for each in sent]
    assert [future.result(WAIT) for future in futures] == [[each] * 2 for each in sent]


def test_what_a_death_finds_in_a_row_is_sent_again_in_order_at_no_cost(
    make: Make, gate: Path
) -> None:
    ex = make(Counter, 2, strategy=Strategy.ONE_FOR_ONE)
    first = ex.collective_rpc("wait_at", args=(str(gate),), non_block=True)
    futures = [ex.collective_rpc("see", args=(n,), non_block=True) for n in range(50)]
    wait_until(lambda: all(Path(f"{gate}.{rank}").exists() for rank in range(2)))

    kill(ex, 1)
    wait_until(lambda: (ex.ranks[1].incarnation, ex.ranks[1].state) == (2, "up"))
    gate.touch()  # only now may rank 0, which lives, begin another

    with pytest.raises(WorkerDied):
        first.result(WAIT)
    assert [future.result(WAIT) for future in futures] == [[n, n] for n in range(50)]
    assert ex.collective_rpc("seen_so_far", WAIT) == [list(range(50))] * 2


def test_a_failed_call_ends_a_wait_for_the_first_exception_and_a_cancelled_one_does_not(
    make: Make, gate: Path, tmp_path: Path
) -> None:
    ex = make(Counter, 1)
    when = concurrent.futures.FIRST_EXCEPTION

    bad = ex.collective_rpc(lambda _: 1 // 0, non_block=True)
    held = ex.collective_rpc("wait_at", args=(str(gate),), non_block=True)
    done, left = concurrent.futures.wait([bad, held], WAIT, return_when=when)
    gate.touch()

    assert (done, left) == ({bad}, {held})
    assert isinstance(bad.exception(WAIT), ZeroDivisionError)
    held.result(WAIT)

    other = tmp_path / "other"
    held = ex.collective_rpc("wait_at", args=(str(other),), non_block=True)
    off = ex.collective_rpc("see", args=(1,), non_block=True)
    waited: list[Any] = []
    waiter = start_thread(
        lambda: waited.append(concurrent.futures.wait([held, off], WAIT, return_when=when))
    )
    wait_until(lambda: held.is_whole and off.is_whole)
    assert off.abandon()
    other.touch()
    waiter.join(WAIT)

    assert waited == [({held, off}, set())]
    with pytest.raises(concurrent.futures.CancelledError):
        off.exception(WAIT)
    assert off.cancelled()


def test_futures_come_as_they_are_completed_and_are_told_of_in_a_row(
    make: Make, gate: Path
) -> None:
    ex = make(Counter, 1)
    told = threading.Event()

    futures = [ex.collective_rpc("see", args=(n,), non_block=True) for n in range(40)]
    came = list(concurrent.futures.as_completed(futures, WAIT))
    last = ex.collective_rpc("see", args=(40,), non_block=True)
    last.add_done_callback(lambda _: told.set())
    held = ex.collective_rpc("wait_at", args=(str(gate),), non_block=True)

    assert sorted(future.result(0)[0] for future in came) == list(range(40))
    assert "done" in repr(came[0])
    assert told.wait(WAIT)
    assert not held.done()
    gate.touch()
    held.result(WAIT)
