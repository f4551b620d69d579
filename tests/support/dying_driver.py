"""A driver program of its own, for tests that end drivers.

Usage: ``python -m tests.support.dying_driver MODE [ARGUMENT]``. It prints one JSON object per line.
Its worker class lives in ``__main__``, as in a notebook.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from tests.support.options import with_defaults
from tests.support.transport import TRANSPORT
from tests.support.workers import Echo, wait_for

from phalanx import (
    Executor,
    Intensity,
    Launch,
    Limits,
    StopPolicy,
    Strategy,
    Supervisor,
    SupervisorSpec,
    WorkerContext,
    executor_child,
)


def say(**fields: Any) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


class Point:
    """A value of a class that only this program has."""

    def __init__(self, x: int) -> None:
        self.x = x


class Main(Echo):
    def __init__(self, start_gate: str = "") -> None:
        super().__init__()
        self.start_gate = start_gate

    def on_start(self, ctx: WorkerContext) -> None:
        while self.start_gate and not Path(self.start_gate).exists():
            time.sleep(0.01)

    def double(self, point: Point) -> Point:
        return Point(point.x * 2)

    def hold(self, gate: str = "", seconds: float = 600.0) -> str:
        deadline = time.monotonic() + seconds
        if gate:
            Path(f"{gate}.{self.ctx.rank}").touch()  # begun
        while time.monotonic() < deadline:
            if gate and Path(gate).exists():
                return "released"
            time.sleep(0.005)
        return "late"

    def hold_gil(self) -> None:
        import ctypes

        ctypes.PyDLL(None).sleep(600)


def build(world_size: int = 2, **options: Any) -> Executor[Main]:
    options = with_defaults(
        options,
        launch={"preload": (), "transport": TRANSPORT},
        limits={"stop": StopPolicy(ask=2.0, terminate=1.0)},
        strategy=Strategy.ONE_FOR_ONE,
        intensity=(1000, 60.0),
    )
    ex = Executor(Main, world_size, **options)
    say(ready=[info.pid for info in ex.ranks])
    return ex


def values() -> None:
    with build() as ex:
        point = ex.call("double", args=(Point(21),), rank=0)
        say(type_is_ours=type(point) is Point, x=point.x, lam=ex.call(lambda w: w.rank(), rank=1))


def forgets() -> None:
    ex = build()
    say(ranks=ex.collective_rpc("rank"))


def raises() -> None:
    ex = build()
    ex.collective_rpc("hold", args=("", 0.0), non_block=True)
    raise SystemExit(3)


def thread_ends() -> None:
    """The thread that built the executor ends; the workers live on."""
    made: list[Executor[Main]] = []
    thread = threading.Thread(target=lambda: made.append(build()))
    thread.start()
    thread.join()
    with made[0] as ex:
        say(ranks=ex.collective_rpc("rank", 20))


def calls(gate: str, drain: str = "10") -> None:
    """Hold one call until *gate*; then a call more."""
    with build(limits={"stop": StopPolicy(ask=2.0, terminate=1.0, drain=float(drain))}) as ex:
        threading.Timer(0.0, lambda: say(calling=True)).start()
        say(answer=ex.collective_rpc("hold", args=(gate,)))
        time.sleep(30)


def closes_slowly(gate: str) -> None:
    """Close with two minutes for a call that goes on, after a Ctrl-C."""
    with build(limits=Limits(stop=StopPolicy(ask=120.0))) as ex:

        def tell() -> None:
            while not all(info.doing for info in ex.ranks):
                time.sleep(0.01)
            say(calling=True)

        threading.Thread(target=tell).start()
        ex.collective_rpc("hold", args=(gate,))


def calls_in_a_row(gate: str) -> None:
    """Have one call held until *gate*, and another wait for its turn."""
    with build(limits=Limits(queue_depth=1)) as ex:
        calls = [ex.collective_rpc("hold", args=(gate,), non_block=True)]
        calls.append(ex.collective_rpc("rank", non_block=True))
        say(waiting=ex.status().waiting)
        say(answers=[call.result() for call in calls])
        time.sleep(30)


def starts() -> None:
    """Hang in the start of the workers."""
    say(starting=True)
    with build(kwargs={"start_gate": "/nonexistent"}):
        pass


def interrupted(gate: str) -> None:
    """Report what Ctrl-C does to a blocked call."""
    ex = build()
    try:
        say(calling=True)
        ex.collective_rpc("hold", args=(gate,))
    except KeyboardInterrupt:
        say(interrupted=True, in_flight=ex.status().in_flight)
        Path(gate).touch()
        say(ranks=ex.collective_rpc("rank", 20))
    ex.close()
    say(closed=True)


def drains(gate: str) -> None:
    """Report what Ctrl-C does to a drain."""
    with build() as ex:
        ex.collective_rpc("hold", args=(gate,), non_block=True)
        try:
            say(draining=True)
            ex.drain()
        except KeyboardInterrupt:
            Path(gate).touch()
            say(ranks=ex.collective_rpc("rank", 20))


def forks() -> None:
    """A forked child touches nothing of its parent's."""
    ex = build()
    pid = os.fork()
    if pid == 0:
        try:
            ex.collective_rpc("rank", 5)
        except Exception as error:
            say(child=type(error).__name__)
        ex.close()
        sys.exit(0)
    _, status = os.waitpid(pid, 0)
    say(status=status, ranks=ex.collective_rpc("rank", 20))
    ex.close()


def forks_in_a_call(gate: str) -> None:
    """A forked child that asks for an answer takes none of its parent's."""
    with build() as ex:
        future = ex.collective_rpc("hold", args=(gate,), non_block=True)
        pid = os.fork()
        if pid == 0:
            try:
                say(child=future.result())
            except Exception as error:
                say(child=type(error).__name__)
            os._exit(0)
        victim = ex.ranks[1].pid
        assert victim is not None
        wait_for(f"{gate}.1")  # a call that it has not begun would be sent again
        os.kill(victim, signal.SIGKILL)
        died = type(future.exception(20)).__name__
        again = ex.collective_rpc("hold", 20, (gate,), non_block=True)
        os.waitpid(pid, 0)
        Path(gate).touch()
        say(died=died, again=again.result(20), ranks=ex.collective_rpc("rank", 20))


def children() -> None:
    """The program's own processes are its own."""
    with build() as ex:
        done = subprocess.run([sys.executable, "-S", "-c", "raise SystemExit(5)"], check=False)
        own = os.fork()
        if own == 0:
            os._exit(7)
        pid, status = os.waitpid(-1, 0)
        say(
            subprocess=done.returncode,
            waited=pid == own,
            status=os.waitstatus_to_exitcode(status),
            ranks=ex.collective_rpc("rank", 20),
        )


def ignores_sigchld() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with build() as ex:
        pid = ex.ranks[0].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        say(ranks=ex.collective_rpc("rank", 20, retries=3))


def chaos(how: str) -> None:
    """Work, restart and leave strays until somebody kills this program."""
    ex = build(3, launch={"preload": ("torch",) if how == "import" else ()})
    ex.call("grandchild", kwargs={"daemon": True}, rank=0)
    ex.call("grandchild", kwargs={"daemon": False}, rank=1)
    if how == "gil":
        ex.call("hold_gil", non_block=True, rank=2)
    say(working=True)
    while True:
        if how == "restart":
            pid = ex.ranks[0].pid
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
        if how == "close":
            ex.close()
            say(closed=True)
            ex = build(3)
        ex.call("rank", 20, retries=10, rank=1)


def handles_sigterm() -> None:
    """Work on after a SIGTERM that the program handles itself."""
    told = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: told.set())
    with build() as ex:
        assert told.wait(60)
        say(ranks=ex.collective_rpc("rank", 20))


def loops_with_restarts() -> None:
    """Call, and restart a rank now and then, for as long as the program lives."""
    with build() as ex:
        say(calling=True)
        while True:
            for _ in range(5):
                ex.collective_rpc("rank")
            ex.restart(0)


def supervised(gate: str) -> None:
    """Call an executor that has ended in its tree, beside one whose call ends after that."""
    ex = build(1)
    call = ex.collective_rpc("hold", args=(gate,), non_block=True)
    launch = Launch(preload=(), transport=TRANSPORT)
    tree = Supervisor(SupervisorSpec("root", children=[executor_child("m", Main, launch=launch)]))
    ended, lasting = tree.child("m"), tree.executor("m")

    def call_again() -> None:
        ended.wait_closed()
        try:
            say(again=lasting.collective_rpc("rank", 3.0))
        except TimeoutError:
            say(again=None)
        Path(gate).touch()

    threading.Thread(target=call_again, daemon=True).start()
    say(calling=True)
    call.result()


def ends_before_its_call(gate: str) -> None:
    """End at *gate*, with a call that goes on."""
    ex = build()
    ex.collective_rpc("hold", args=("/nonexistent",), non_block=True)
    say(calling=True)
    while not Path(gate).exists():
        time.sleep(0.01)


def bare(result: str) -> None:
    """Work without standard descriptors, as a daemon does."""
    os.closerange(0, 3)
    ex = Executor(
        Main, 2, launch=Launch(preload=(), transport=TRANSPORT), intensity=Intensity(3, 60.0)
    )
    answer = ex.collective_rpc("rank", 30)
    ex.close()
    Path(result).write_text(json.dumps(answer))


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
