"""A signal that Python notes without ending the wait of the main thread has its handler run soon.

So it is with one that comes between the last bytecode before a wait and that wait. Here it comes on
another thread, which is as bad and can be had at will.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.options import Make
from tests.support.processes import soon, start_thread, wait_until

from phalanx.actors import Executor, StopPolicy, WorkerActor, WorkerContext
from phalanx.supervision import (
    ChildSpec,
    ExitReason,
    StartContext,
    Supervisor,
    SupervisorSpec,
    thread_child,
)

WAIT = 60.0
LATE = {"stop": StopPolicy(ask=100.0)}


class Waiting(WorkerActor):
    """Waits for a file where it is told."""

    def __init__(self, starts: str = "", stops: str = "") -> None:
        self.starts, self.stops = starts, stops

    def on_start(self, ctx: WorkerContext) -> None:
        hold(self.starts)

    def on_stop(self, reason: ExitReason) -> None:
        hold(self.stops)

    def hold(self, path: str) -> str:
        hold(path)
        return "held"


def hold(path: str) -> None:
    if path:
        Path(f"{path}.begun").touch()
        deadline = soon()
        while not Path(path).exists():
            if time.monotonic() > deadline:
                Path(f"{path}.late").touch()
                return
            time.sleep(0.005)


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[str]:
    """A file that appears by a signal handler, once something waits for it and so does this thread.

    The signal comes on another thread.
    """
    path = tmp_path / "gate"
    main = threading.get_native_id()
    ended = threading.Event()

    def strike() -> None:
        waiting = 0
        while waiting < 20 and not ended.wait(0.01):  # in a row, so that it is in that wait
            stat = Path(f"/proc/self/task/{main}/stat").read_text()
            is_asleep = stat.rpartition(")")[2].split()[0] == "S"
            waiting = waiting + 1 if is_asleep and Path(f"{path}.begun").exists() else 0
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, lambda *_: path.touch())
    thread = start_thread(strike)
    try:
        yield str(path)
        assert not Path(f"{path}.late").exists()
    finally:
        ended.set()
        thread.join()
        signal.signal(signal.SIGUSR1, before)


def test_during_a_start(make: Make, gate: str) -> None:
    make(Waiting, 1, kwargs={"starts": gate})


def slow_child(gate: str) -> ChildSpec:
    start = thread_child(lambda _stop: None)

    def slowly(ctx: StartContext) -> object:
        hold(gate)
        return start(ctx)

    return ChildSpec("slow", slowly)


def test_during_the_start_of_a_tree(gate: str) -> None:
    with Supervisor(SupervisorSpec("app", children=(slow_child(gate),))):
        pass


def test_during_the_start_of_a_child(gate: str) -> None:
    with Supervisor(SupervisorSpec("app")) as tree:
        assert tree.start_child(slow_child(gate)) == "slow"


@pytest.mark.parametrize("others_read", [False, True])
def test_during_a_call(make: Make, gate: str, others_read: bool) -> None:
    ex: Executor[Waiting] = make(Waiting, 2)
    thread = None
    if others_read:
        thread = start_thread(ex.call, "hold", WAIT, (gate,), rank=1)
        wait_until(lambda: ex.status().in_flight > 0)
    assert ex.call("hold", WAIT, (gate,), rank=0) == "held"
    if thread is not None:
        thread.join()


def test_during_a_close(make: Make, gate: str) -> None:
    ex: Executor[Waiting] = make(Waiting, 1, kwargs={"stops": gate}, limits=LATE)
    ex.close()


def test_during_a_wait_for_the_end(make: Make, gate: str) -> None:
    ex: Executor[Waiting] = make(Waiting, 1, kwargs={"stops": gate}, limits=LATE)
    thread = start_thread(ex.close)
    assert ex.wait_closed(WAIT) is not None
    thread.join()


def test_during_a_planned_restart(make: Make, gate: str) -> None:
    ex: Executor[Waiting] = make(Waiting, 1)
    held = ex.call("hold", WAIT, (gate,), rank=0, non_block=True)
    ex.restart(timeout=WAIT)
    assert held.result(WAIT) == "held"
