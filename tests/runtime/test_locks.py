"""Locks that outlive their holders: told who died, fair, and the same for threads and processes."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.lock_ends import WAYS

from phalanx.runtime import LockTable, SharedLock, descriptors
from phalanx.runtime.memory import shared_lock
from phalanx.runtime.memory.shared_lock import MOST_LOCKS
from phalanx.supervision import (
    LockNotHeld,
    LockTimeout,
    RuntimeFault,
    SpecError,
    WouldDeadlock,
)

LONG = 20.0


@pytest.fixture
def table() -> LockTable:
    fd = LockTable.create()
    table = LockTable(fd)
    descriptors.close(fd)
    return table


def lock_of(table: LockTable, name: str = "it", rank: int = 0) -> SharedLock:
    return SharedLock(table, name, rank, 1, LONG)


def hold_in_child(table: LockTable, rank: int = 7) -> int:
    """Fork a child that takes the lock and keeps it; return its pid once it has it."""
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        lock_of(table, rank=rank).acquire()
        os.write(write, b"!")
        time.sleep(600)
        os._exit(0)
    os.close(write)
    assert os.read(read, 1) == b"!"
    os.close(read)
    return pid


def wait_in_child(table: LockTable) -> int:
    """Fork a child that waits for the lock, which somebody has; return its pid once it waits."""
    pid = os.fork()
    if not pid:
        lock_of(table).acquire()
        os._exit(0)
    turnstile = table.mutex(table.slot("it"), turnstile=True)
    deadline = time.monotonic() + LONG
    while turnstile.lock(0.0) is not None:
        turnstile.unlock()
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return pid


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def run_script(name: str, *words: object) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / name), *map(str, words)],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.mark.parametrize(
    ("kills", "seed"), [(60, 1), pytest.param(1000, 2, marks=pytest.mark.soak)]
)
def test_killed_holders_stop_nobody_and_leave_nothing_torn(kills: int, seed: int) -> None:
    result = run_script("lockers.py", kills, 4, seed)

    assert (result["stuck"], result["torn"]) == (0, 0)
    assert result["told"] > kills // 10
    assert min(result["turns"]) * 5 > max(result["turns"])


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    """What the next holder was told after each way of ending."""
    return run_script("lock_ends.py")


@pytest.mark.parametrize("way", sorted(WAYS))
def test_however_a_holder_ends_the_next_one_has_the_lock_and_is_told(
    told: dict[str, Any], way: str
) -> None:
    assert told[way] == "told"


def test_exec_is_refused_in_a_thread_that_would_take_the_lock_with_it(table: LockTable) -> None:
    refused: list[BaseException] = []
    freely: list[BaseException] = []

    def work() -> None:
        lock = lock_of(table)
        with pytest.raises(WouldDeadlock, match="'it'.*main thread") as caught, lock:
            os.execv("/nonexistent", ["it"])
        refused.append(caught.value)
        with pytest.raises(FileNotFoundError) as missed:
            os.execv("/nonexistent", ["it"])
        freely.append(missed.value)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(LONG)

    assert len(refused) == len(freely) == 1


def test_a_stopped_waiter_keeps_nobody_from_a_free_lock(table: LockTable) -> None:
    lock = lock_of(table)
    with lock:
        waiter = wait_in_child(table)
        os.kill(waiter, signal.SIGSTOP)
        os.waitpid(waiter, os.WUNTRACED)

    try:
        for _ in range(3):
            with lock as died:
                assert died is None
        kill(hold_in_child(table))
        with lock_of(table) as died:
            assert died is not None
    finally:
        kill(waiter)


def test_the_next_holder_is_told_who_died_and_the_one_after_is_not(table: LockTable) -> None:
    pid = hold_in_child(table, rank=7)
    kill(pid)

    with lock_of(table) as died:
        assert died is not None
        assert (died.rank, died.incarnation, died.pid) == (7, 1, pid)
        assert 0 < died.since <= time.monotonic()
    with lock_of(table) as died:
        assert died is None


def test_a_death_while_repairing_is_told_too(table: LockTable) -> None:
    kill(hold_in_child(table, rank=1))
    second = hold_in_child(table, rank=2)
    kill(second)

    with lock_of(table) as died:
        assert died is not None
        assert died.rank == 2


def test_a_waiter_gets_it_when_its_holder_is_killed(table: LockTable) -> None:
    pid = hold_in_child(table)
    got: list[Any] = []
    started = threading.Event()

    def wait() -> None:
        started.set()
        with lock_of(table) as died:
            got.append(died)

    thread = threading.Thread(target=wait)
    thread.start()
    started.wait(LONG)
    kill(pid)
    thread.join(LONG)

    assert [died.pid for died in got] == [pid]


def test_a_timeout_names_the_lock_the_holder_and_the_seconds(table: LockTable) -> None:
    pid = hold_in_child(table)
    lock = lock_of(table)

    with pytest.raises(LockTimeout, match=rf"'it'.*rank 7 #1 \(pid {pid}\).*0.05 s") as caught:
        lock.acquire(timeout=0.05)
    with pytest.raises(TimeoutError):
        lock.acquire(timeout=0)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    assert lock.holder() is not None
    kill(pid)


def test_an_older_c_library_waits_by_the_monotonic_clock_too(
    table: LockTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_lock, "_on_monotonic", False)

    test_a_timeout_names_the_lock_the_holder_and_the_seconds(table)
    test_a_waiter_gets_it_when_its_holder_is_killed(table)
    test_one_thread_cannot_take_it_twice_nor_let_go_of_what_it_has_not(table)
    test_threads_of_one_process_exclude_each_other(table)


def test_threads_of_one_process_exclude_each_other(table: LockTable) -> None:
    inside = 0
    worst = 0

    def work() -> None:
        nonlocal inside, worst
        for _ in range(300):
            with lock_of(table):
                inside += 1
                worst = max(worst, inside)
                time.sleep(0)
                inside -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)

    assert worst == 1
    assert not any(thread.is_alive() for thread in threads)


def test_a_thread_that_ends_with_it_is_a_death_too(table: LockTable) -> None:
    thread = threading.Thread(target=lambda: lock_of(table).acquire())
    thread.start()
    thread.join(LONG)

    with lock_of(table) as died:
        assert died is not None
        assert died.pid == os.getpid()


def test_one_thread_cannot_take_it_twice_nor_let_go_of_what_it_has_not(table: LockTable) -> None:
    lock = lock_of(table)
    with lock, pytest.raises(WouldDeadlock, match="'it'"):
        lock_of(table).acquire()
    with pytest.raises(LockNotHeld, match="'it'"):
        lock.release()

    with lock_of(table) as died:
        assert died is None


def test_names_are_apart_and_the_same_in_every_process(table: LockTable) -> None:
    pid = hold_in_child(table)

    with lock_of(table, "another"), pytest.raises(LockTimeout):
        lock_of(table).acquire(timeout=0)
    kill(pid)


def test_a_forked_child_holds_nothing_of_its_parents(table: LockTable) -> None:
    lock = lock_of(table)
    with lock:
        pid = os.fork()
        if not pid:
            try:
                lock.acquire(timeout=0)
            except LockTimeout:
                os._exit(0)
            os._exit(1)
        assert os.waitpid(pid, 0)[1] == 0
    with lock as died:
        assert died is None


def test_one_name_too_many_says_so(table: LockTable) -> None:
    for number in range(MOST_LOCKS):
        table.slot(f"lock {number}")

    with pytest.raises(RuntimeFault, match=f"{MOST_LOCKS} other locks"):
        table.slot("one more")
    assert table.slot("lock 5") == 6


@pytest.mark.parametrize("wrong", ["", None, 5])
def test_a_lock_needs_a_name(table: LockTable, wrong: Any) -> None:
    with pytest.raises(SpecError, match="name"):
        SharedLock(table, wrong, 0, 1, None)


@pytest.mark.parametrize("wrong", [-1, "soon", True])
def test_a_timeout_is_seconds(table: LockTable, wrong: Any) -> None:
    with pytest.raises(SpecError, match="timeout"):
        SharedLock(table, "it", 0, 1, wrong)
