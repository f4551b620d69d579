"""What supervision costs: a restart decision by number of children, memory, many supervisors.

``python -m benchmarks supervision`` prints a table. The decision is the machine's alone, with the
exit and the outcome of the start delivered; nothing is started. Figures are medians.
"""

from __future__ import annotations

import gc
import statistics
import time
import tracemalloc
from collections import deque
from typing import TYPE_CHECKING, Any

from phalanx.supervision import (
    IGNORE,
    SHUTDOWN,
    ChildSpec,
    ExitKind,
    ExitReason,
    Intensity,
    Strategy,
    Supervisor,
    SupervisorSpec,
)
from phalanx.supervision.core.machine import SupervisorMachine
from phalanx.supervision.core.messages import (
    Booted,
    Event,
    Exited,
    KillChild,
    Request,
    StartChild,
    Started,
    TerminateChild,
)

from .harness.arguments import add_json, check_writable, count, give
from .harness.machine import describe, sentence
from .harness.tables import seconds, table

if TYPE_CHECKING:
    import argparse

    from phalanx.supervision import StartContext

_CRASH = ExitReason(ExitKind.CRASH)
_RESTARTS = 1_000_000  # never the limit here


def start(_ctx: StartContext) -> Any:
    """Start nothing."""
    return IGNORE


class Core:
    """A supervisor without effects: every start and stop succeeds at once."""

    def __init__(self, strategy: Strategy, children: int) -> None:
        dynamic = strategy is Strategy.DYNAMIC
        # One spec, shared, as a program that makes many alike would have it.
        specs = () if dynamic else [ChildSpec(f"w{n}", start) for n in range(children)]
        spec = SupervisorSpec("top", strategy, Intensity(_RESTARTS, 1e-6), specs)
        self.machine = SupervisorMachine(spec)
        self.serials: dict[str, int] = {}
        self.now = 0.0
        self.run(Booted())
        instance = ChildSpec("w", start)
        for _ in range(children if dynamic else 0):
            self.run(Request(None, lambda machine: machine.start_child(instance)))

    def run(self, event: Event) -> None:
        """Deliver *event* and what follows."""
        pending: deque[Event] = deque([event])
        while pending:
            for action in self.machine.handle(pending.popleft(), self.now):
                match action:
                    case StartChild(key, serial):
                        self.serials[key] = serial
                        pending.append(Started(key, serial))
                    case TerminateChild(key, serial) | KillChild(key, serial):
                        pending.append(Exited(key, serial, SHUTDOWN))
                    case _:
                        pass

    def crash(self, key: str) -> float:
        """Crash *key*, restart whom that concerns; return the seconds it took."""
        self.now += 1.0
        began = time.perf_counter()
        self.run(Exited(key, self.serials[key], _CRASH))
        return time.perf_counter() - began


def decision(strategy: Strategy, children: int) -> float:
    """Return the median seconds of one restart among *children*."""
    core = Core(strategy, children)
    keys = list(core.serials)
    rounds = 200 if strategy is not Strategy.ONE_FOR_ALL else max(1, min(200, 20_000 // children))
    gc.collect()
    gc.disable()
    try:
        return statistics.median(core.crash(keys[n * 7919 % len(keys)]) for n in range(rounds))
    finally:
        gc.enable()


def memory_per_child(children: int) -> float:
    """Return the bytes a dynamic supervisor's machine holds per running child."""
    tracemalloc.start()
    core = Core(Strategy.DYNAMIC, 0)
    instance = ChildSpec("w", start)
    gc.collect()
    before = tracemalloc.get_traced_memory()[0]
    for _ in range(children):
        core.run(Request(None, lambda machine: machine.start_child(instance)))
    core.serials.clear()
    gc.collect()
    used = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    return used / children


def nested(supervisors: int) -> tuple[float, float]:
    """Return the seconds to start and to stop *supervisors* actors below one."""
    children = [SupervisorSpec(f"s{n}") for n in range(supervisors)]
    began = time.perf_counter()
    top = Supervisor(SupervisorSpec("top", children=children))
    started = time.perf_counter()
    top.close()
    return started - began, time.perf_counter() - started


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command line."""
    parser.add_argument("--most", type=count, default=100_000, help="largest number of children")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measure and print."""
    check_writable("json", arguments.json)
    machine, most = describe(), arguments.most
    sizes = [size for size in (10, 1_000, 100_000) if size <= most] or [most]
    strategies = (Strategy.ONE_FOR_ONE, Strategy.DYNAMIC, Strategy.ONE_FOR_ALL)
    restarts = {str(each): {size: decision(each, size) for size in sizes} for each in strategies}
    each_child = memory_per_child(min(10_000, most))
    supervisors = min(1_000, most)
    up, down = nested(supervisors)
    figures: dict[str, Any] = {
        "machine": machine,
        "restart_seconds": restarts,
        "bytes_per_child": each_child,
        "nested": {"supervisors": supervisors, "start_seconds": up, "stop_seconds": down},
    }
    rows = [(name, *(seconds(times[size]) for size in sizes)) for name, times in restarts.items()]
    shown = table(("one restart among", *(f"{size:,} children" for size in sizes)), rows)
    give(
        arguments,
        figures,
        f"## Supervision\n\n{sentence(machine)}.\n\n{shown}\n\n"
        f"memory per running child: {each_child:.0f} bytes\n"
        f"{supervisors:,} nested supervisors: started in {seconds(up)}, stopped in {seconds(down)}",
    )
    return 0
