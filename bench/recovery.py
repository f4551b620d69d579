"""How long a group is gone: from SIGKILL of a rank to the first call that succeeds.

``python bench/recovery.py [--kills N] [--ranks N]`` prints a table: medians and the slowest, in
milliseconds, with torch imported in every rank. A killed rank is idle; the next call is made at
once, with ``on_death="retry"``, and its return stops the clock. "Bare" is a child forked from a
process that has imported torch as well, killed and awaited by pidfd, with nothing around it: what
knowing of a death costs at least.
"""

from __future__ import annotations

import argparse
import os
import platform
import select
import signal
import statistics
import subprocess
import sys
import threading
import time
from importlib import import_module
from typing import TYPE_CHECKING, Any

from phalanx import Executor, Intensity, Runtime, Strategy, WorkerActor, WorkerExited

if TYPE_CHECKING:
    from phalanx import WorkerContext

LONG = 60.0


class Plain(WorkerActor):
    """A rank that meets nobody."""

    def ping(self) -> int:
        return self.ctx.rank


class Reducer(WorkerActor):
    """A rank in a gloo group."""

    def on_start(self, ctx: WorkerContext) -> None:
        ctx.init_process_group("gloo", timeout=60)

    def on_reform(self, ctx: WorkerContext) -> None:
        ctx.init_process_group("gloo", timeout=60)

    def ping(self) -> float:
        # In the ranks only; by name, for torch's types are partly unknown.
        one: Any = import_module("torch").ones(1)
        import_module("torch.distributed").all_reduce(one)
        return float(one)


def bare() -> float:
    """Return the seconds from SIGKILL of a forked child to its pidfd's news."""
    pid = os.fork()
    if pid == 0:
        time.sleep(600)
        os._exit(0)
    pidfd = os.pidfd_open(pid)
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    began = time.perf_counter()
    os.kill(pid, signal.SIGKILL)
    poller.poll()
    took = time.perf_counter() - began
    os.close(pidfd)
    os.waitpid(pid, 0)
    return took


def bare_with_torch(kills: int) -> list[float]:
    """Return what `bare` does, from a process of its own: this one stays without torch."""
    command = [sys.executable, __file__, "--bare", "--kills", str(kills)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return [float(word) for word in done.stdout.split()]


def recover(ex: Executor[Any], rank: int, standby: int) -> tuple[float, float]:
    """Kill *rank*; return the seconds until the driver knew, and until a call succeeded."""
    while ex.status().standby < standby:
        time.sleep(0.005)
    known = threading.Event()
    at: list[float] = []

    def hear(event: Any) -> None:
        if isinstance(event, WorkerExited) and event.pid == pid:
            at.append(event.at)
            known.set()

    pid = ex.ranks[rank].pid
    assert pid is not None
    forget = ex.events(hear)
    began = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    ex.collective_rpc("ping", LONG, on_death="retry", retries=10)
    took = time.monotonic() - began
    known.wait(LONG)
    forget()
    return at[0] - began, took


def row(name: str, values: list[float]) -> str:
    """Return one line of the table."""
    return f"| {name} | {statistics.median(values) * 1e3:.1f} | {max(values) * 1e3:.1f} |"


def measure(runtime: Runtime, name: str, options: dict[str, Any], kills: int) -> list[str]:
    """Return the lines of one kind of group."""
    known: list[float] = []
    healed: list[float] = []
    worker: type[WorkerActor] = options.pop("worker")
    standby = options.get("standby", 0)
    with Executor(worker, runtime=runtime, intensity=Intensity(10**6, 1.0), **options) as ex:
        for index in range(kills):
            first, second = recover(ex, index % ex.world_size, standby)
            known.append(first)
            healed.append(second)
    return [row(f"{name}: the driver knows", known), row(f"{name}: first call", healed)]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--bare", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.bare:
        import_module("torch")
        print(*[bare() for _ in range(options.kills)])
        return
    size = options.ranks
    alone = {"world_size": size, "worker": Plain, "strategy": Strategy.ONE_FOR_ONE}
    group = {"world_size": size, "worker": Reducer, "strategy": Strategy.ONE_FOR_ALL}
    kinds: list[tuple[str, dict[str, Any]]] = [
        ("no process group", {**alone}),
        ("no process group, a spare", {**alone, "standby": 1}),
        ("gloo, restart all", {**group}),
        ("gloo, survivors kept", {**group, "survivors": "keep"}),
        ("gloo, survivors kept, a spare", {**group, "survivors": "keep", "standby": 1}),
        ("gloo, restart all, spares", {**group, "standby": size}),
    ]
    print(f"{size} ranks, {options.kills} kills each, {os.cpu_count()} x {platform.machine()}\n")
    print("| from SIGKILL to | median ms | slowest ms |\n| --- | --- | --- |")
    print(row("bare pidfd", bare_with_torch(options.kills)))
    with Runtime(console=None, stream=False) as runtime:
        for name, what in kinds:
            for line in measure(runtime, name, what, options.kills):
                print(line, flush=True)


if __name__ == "__main__":
    main()
