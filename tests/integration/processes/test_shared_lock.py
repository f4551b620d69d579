"""Locks that outlive their holders: told who died, fair, and the same for threads and processes."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import threading
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.lock_deaths import WAYS
from tests.support.processes import LONG, start_thread, wait_until
from tests.support.programs import run_python

from phalanx.runtime import SharedLock, create_lock_file
from phalanx.runtime.memory.shared_lock import MOST_LOCKS
from phalanx.supervision import LockNotHeld, LockTimeout, RuntimeFault, SpecError, WouldDeadlock


@pytest.fixture
def file() -> Iterator[int]:
    fd = create_lock_file()
    yield fd
    os.close(fd)


def lock_of(file: int, name: str = "it", rank: int = 0) -> SharedLock:
    return SharedLock(file, name, rank, 1, LONG)


@contextlib.contextmanager
def holder(file: int, rank: int = 7) -> Generator[int]:
    """Fork a child that takes the lock and keeps it; yield its pid, then kill it."""
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        lock_of(file, rank=rank).acquire()
        os.write(write, b"!")
        time.sleep(600)
        os._exit(0)
    os.close(write)
    assert os.read(read, 1) == b"!"
    os.close(read)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def is_queued(pid: int) -> bool:
    """Whether that process has a place in a queue: the kernel lists its read lock."""
    for path in Path(f"/proc/{pid}/fdinfo").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            if "READ" in path.read_text():
                return True
    return False


def stopped_waiter(file: int) -> int:
    """Return a process that waits for the lock and has been stopped; the lock is held."""
    pid = os.fork()
    if not pid:
        lock_of(file).acquire()
        os._exit(0)
    wait_until(lambda: is_queued(pid))
    os.kill(pid, signal.SIGSTOP)
    os.waitpid(pid, os.WUNTRACED)
    return pid


def run_script(name: str, *words: object) -> dict[str, Any]:
    done = run_python(str(Path(__file__).parents[2] / "support" / name), *map(str, words))
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.mark.parametrize(
    ("kills", "seed"), [(60, 1), pytest.param(1000, 2, marks=pytest.mark.soak)]
)
def test_killed_holders_stop_nobody_and_leave_nothing_torn(kills: int, seed: int) -> None:
    result = run_script("lock_contention.py", kills, 4, seed)

    assert (result["stuck"], result["torn"]) == (0, 0)
    assert result["told"] > kills // 10
    assert min(result["turns"]) * 5 > max(result["turns"])


def test_however_a_holder_ends_the_next_one_has_the_lock_and_is_told() -> None:
    assert run_script("lock_deaths.py") == dict.fromkeys(WAYS, "told")


def test_a_stopped_waiter_keeps_nobody_from_a_free_lock(file: int) -> None:
    lock = lock_of(file)
    with lock:
        waiter = stopped_waiter(file)

    try:
        for _ in range(3):
            with lock as died:
                assert died is None
        with holder(file):
            pass
        with lock_of(file) as died:
            assert died is not None
    finally:
        os.kill(waiter, signal.SIGKILL)
        os.waitpid(waiter, 0)


def test_who_lets_go_and_asks_again_waits_behind_those_that_wait(file: int) -> None:
    turns: list[str] = []

    def wait() -> None:
        with lock_of(file):
            turns.append("waiter")

    with lock_of(file):
        thread = start_thread(wait)
        wait_until(lambda: is_queued(os.getpid()))
        time.sleep(0.002)  # the queue's order is by the millisecond
    with lock_of(file):
        turns.append("first")
    thread.join(LONG)

    assert turns == ["waiter", "first"]


def test_a_lock_that_is_released_while_a_waiter_looks_is_the_first_ones_in_the_queue(
    file: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked, released = threading.Event(), threading.Event()
    looks: list[bool] = []
    is_anybodys = SharedLock._is_anybodys

    def look(lock: SharedLock) -> bool:
        looks.append(released.is_set())
        found = is_anybodys(lock)
        looked.set()
        assert released.wait(LONG)
        return found

    monkeypatch.setattr(SharedLock, "_is_anybodys", look)
    with lock_of(file):
        thread = start_thread(lock_of(file).acquire)
        assert looked.wait(LONG)
    released.set()
    thread.join(LONG)

    assert not thread.is_alive()
    assert looks[0] is False
    assert looks[-1] is True  # it has not gone by what it had seen before


def test_a_lock_whose_holder_has_died_is_the_first_ones_in_the_queue(
    file: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    never = 1 << 62
    monkeypatch.setattr("phalanx.runtime.memory.shared_lock._OUT_OF_TURN_AFTER", never)
    looks: list[bool] = []
    is_anybodys = SharedLock._is_anybodys

    def look(lock: SharedLock) -> bool:
        looks.append(is_anybodys(lock))
        return looks[-1]

    monkeypatch.setattr(SharedLock, "_is_anybodys", look)
    with holder(file):
        first = stopped_waiter(file)
        time.sleep(0.002)  # the queue's order is by the millisecond
        second = start_thread(lock_of(file).acquire)
        wait_until(lambda: is_queued(os.getpid()))

    try:
        wait_until(lambda: looks.count(False) > 5 or not second.is_alive())
        assert second.is_alive()
    finally:
        os.kill(first, signal.SIGKILL)
        os.waitpid(first, 0)
    second.join(LONG)
    assert not second.is_alive()


def test_the_next_holder_is_told_who_died_though_while_repairing_and_the_one_after_is_not(
    file: int,
) -> None:
    with holder(file, rank=1):
        pass
    with holder(file, rank=7) as pid:  # was told of the other
        pass

    with lock_of(file) as died:
        assert died is not None
        assert (died.rank, died.incarnation, died.pid) == (7, 1, pid)
        assert 0 < died.since <= time.monotonic()
    with lock_of(file) as died:
        assert died is None


def test_a_timeout_names_the_lock_the_holder_and_the_seconds(file: int) -> None:
    lock = lock_of(file)
    with holder(file) as pid:
        with pytest.raises(LockTimeout, match=rf"'it'.*rank 7 #1 \(pid {pid}\).*0.05 s") as caught:
            lock.acquire(timeout=0.05)
        with pytest.raises(TimeoutError):
            lock.acquire(timeout=0)
        with lock_of(file, "another"):  # names are apart
            assert lock.holder() is not None

    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_thread_that_ends_with_it_is_a_death_too(file: int) -> None:
    thread = start_thread(lambda: lock_of(file).acquire())
    thread.join(LONG)

    with lock_of(file) as died:
        assert died is not None
        assert died.pid == os.getpid()


def test_one_thread_cannot_take_it_twice_nor_let_go_of_what_it_has_not(file: int) -> None:
    lock = lock_of(file)
    with lock, pytest.raises(WouldDeadlock, match="'it'"):
        lock_of(file).acquire()
    with pytest.raises(LockNotHeld, match="'it'"):
        lock.release()

    with lock_of(file) as died:
        assert died is None


def test_a_forked_child_holds_nothing_of_its_parents(file: int) -> None:
    lock = lock_of(file)
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


def test_any_text_is_a_name(file: int) -> None:
    with lock_of(file, "\udc80"), pytest.raises(WouldDeadlock):  # of a file name that is no UTF-8
        lock_of(file, "\udc80").acquire()


def test_one_name_too_many_says_so(file: int) -> None:
    for number in range(MOST_LOCKS):
        lock_of(file, f"lock {number}")

    with pytest.raises(RuntimeFault, match=f"{MOST_LOCKS} other locks"):
        lock_of(file, "one more")
    with lock_of(file, "lock 5"), lock_of(file, f"lock {MOST_LOCKS - 1}"):
        pass


@pytest.mark.parametrize(
    ("name", "timeout", "field"),
    [(name, None, "name") for name in ("", None, 5)]
    + [("it", timeout, "timeout") for timeout in (-1, "soon", True)],
)
def test_a_lock_needs_a_name_and_its_timeout_is_seconds(
    file: int, name: Any, timeout: Any, field: str
) -> None:
    with pytest.raises(SpecError, match=field):
        SharedLock(file, name, 0, 1, timeout)
