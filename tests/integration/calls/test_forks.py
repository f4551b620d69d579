"""Processes that a worker forks: those that come back out of the user's code end there."""

from __future__ import annotations

import atexit
import ctypes
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.options import Make
from tests.support.processes import start_thread

from phalanx.actors import AsyncOutput, CheckpointPolicy, Executor, WorkerActor, WorkerContext
from phalanx.supervision import Strategy

WAIT = 30.0


def fork(how: str = "return") -> int | None:
    """Return None in the copy, and in the worker the copy's exit code once it has ended."""
    pid: int = ctypes.PyDLL(None).fork() if how == "native" else os.fork()
    if pid == 0:
        if how == "raise":
            raise ValueError("the copy's own")
        if how == "exit":
            sys.exit(3)
        return None
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def note(path: str) -> None:
    with open(path, "a") as file:
        file.write(f"{os.getpid()}\n")


class Output(AsyncOutput):
    def get_output(self) -> int | None:
        return fork()


class Forker(WorkerActor):
    def __init__(self, hook: str = "") -> None:
        self.hook = hook
        self.codes: list[int | None] = []

    def on_start(self, ctx: WorkerContext) -> None:
        self._fork_in("on_start")

    def on_stop(self, reason: object) -> None:
        note("stopped")
        atexit.register(note, "exited")
        self._fork_in("on_stop")

    def checkpoint(self) -> int:
        self._fork_in("checkpoint")
        return 0

    def restore(self, state: int) -> None:
        pass

    def on_failure(self, error: BaseException) -> None:
        note("failed")

    def _fork_in(self, hook: str) -> None:
        if hook == self.hook:
            self.codes.append(fork())

    def fork(self, how: str) -> int | None:
        return fork(how)

    def items(self, how: str) -> Iterator[int | None]:
        yield 1
        yield fork(how)
        yield 2

    def later(self) -> Output:
        return Output()

    def in_a_thread(self) -> list[int | None]:
        thread = start_thread(lambda: self.codes.append(fork()))
        thread.join()
        return self.codes

    def pool(self) -> list[int]:
        with multiprocessing.get_context("fork").Pool(2) as pool:
            return pool.map(abs, [-1, -2, -3])

    def end_at_once(self, times: int) -> list[int]:
        ends: list[int] = []
        for _ in range(times):
            child = os.fork()
            if not child:
                time.sleep(WAIT)
                os._exit(0)
            os.kill(child, signal.SIGTERM)
            ends.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        return ends

    def state(self) -> tuple[int, list[int | None]]:
        return os.getpid(), self.codes


def pid_of(ex: Executor[Any]) -> int:
    """Return the pid that answers, each of many times."""
    (pid,) = {ex.call("state", WAIT, rank=0)[0] for _ in range(20)}
    return int(pid)


@pytest.fixture(autouse=True)
def _apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.both_transports
def test_a_forked_copy_that_leaves_the_users_code_ends_and_answers_nothing(make: Make) -> None:
    ex = make(Forker, 1)
    worker = pid_of(ex)

    for how, code in (("return", 0), ("raise", 1), ("exit", 3), ("native", 0)):
        assert ex.call("fork", WAIT, (how,), rank=0) == code
        assert pid_of(ex) == worker
    for how, code in (("return", 0), ("raise", 1)):  # in a generator
        assert list(ex.stream("items", args=(how,), rank=0)) == [1, code, 2]
        assert pid_of(ex) == worker
    assert ex.call("later", WAIT, rank=0) == 0  # by the thread that computes outputs
    assert ex.call("in_a_thread", WAIT, rank=0) == [0]
    assert pid_of(ex) == worker


@pytest.mark.parametrize("hook", ["on_start", "checkpoint", "on_stop"])
def test_a_forked_copy_that_leaves_a_hook_ends_there(make: Make, hook: str, tmp_path: Path) -> None:
    ex = make(
        Forker,
        1,
        args=(hook,),
        strategy=Strategy.ONE_FOR_ONE,
        checkpoint=CheckpointPolicy(every_calls=1),
    )
    worker = pid_of(ex)
    codes = ex.call("state", WAIT, rank=0)[1]
    ex.close()

    assert set(codes) == ({0} if hook != "on_stop" else set())
    assert (tmp_path / "stopped").read_text().split() == [str(worker)]
    assert (tmp_path / "exited").read_text().split() == [str(worker)]
    assert not (tmp_path / "failed").exists()


def test_what_a_method_forks_and_ends_itself_works(make: Make) -> None:
    ex = make(Forker, 1)
    worker = pid_of(ex)

    # By SIGTERM, however early that comes.
    assert ex.call("end_at_once", WAIT, (50,), rank=0) == [-signal.SIGTERM] * 50
    assert ex.call("pool", WAIT, rank=0) == [1, 2, 3]
    assert pid_of(ex) == worker
