"""``python -m benchmarks scale``: what a group costs by the number of its ranks.

Guarantees: groups of every size take their turn in each round, so that drift of the machine falls
on all alike; each has a separate driver. "At most linear" holds each size against the one before
it: what it has of everything may be as much more as it has more ranks.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx import Executor, Intensity, Launch, Runtime, Strategy, WorkerActor

from .harness.arguments import add_json, check_writable, count, give, several
from .harness.machine import describe, sentence
from .harness.process_group import Family
from .harness.stats import Samples, percentile
from .harness.tables import ranks_in_words, seconds, size, table, verdict_table
from .harness.targets import Verdict, at_most

if TYPE_CHECKING:
    import argparse

_LONG = 300.0
_BROADCAST = 8 << 20
_BROADCASTS = 5
_SECONDS = ("start", "call", "p99", "broadcast", "death", "end")
_KINDS = {
    "start": "ready",
    "call": "empty call",
    "p99": "its p99",
    "broadcast": "8 MiB to all",
    "death": "one killed to the next answer",
    "end": "closed",
    "descriptors": "descriptors of the driver",
    "driver": "memory of the driver",
    "ranks": "memory of the ranks",
}


class Idle(WorkerActor):
    """A rank that does nothing."""

    def nothing(self) -> None:
        """Answer."""

    def take(self, data: bytes) -> int:
        """Return how much that was."""
        return len(data)


def measure(ranks: int, calls: int) -> dict[str, float]:
    """Return what one group of *ranks* takes, in a separate process."""
    code = f"from {__spec__.name} import drive; drive({ranks}, {calls})"
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, stdout=subprocess.PIPE, check=True, timeout=5 * _LONG)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def drive(ranks: int, calls: int) -> None:
    """Print what `measure` returns."""
    with Runtime(console=None, stream=False) as runtime:
        with Executor(Idle, 1, launch=Launch(preload=()), devices="cpu", runtime=runtime) as group:
            group.collective_rpc("nothing", _LONG)  # the zygote starts with it
        print(json.dumps(_measure(runtime, ranks, calls)))


def _measure(runtime: Runtime, ranks: int, calls: int) -> dict[str, float]:
    """Return seconds, descriptors, bytes."""
    driver = Family(os.getpid(), "")
    files, memory = _descriptors(), driver.pss([os.getpid()])
    found: dict[str, float] = {}
    began = time.monotonic()
    group = Executor(
        Idle,
        ranks,
        strategy=Strategy.ONE_FOR_ONE,
        intensity=Intensity(1000, 60.0),
        launch=Launch(preload=()),
        devices="cpu",
        runtime=runtime,
    )
    with group:
        group.collective_rpc("nothing", _LONG)
        found["start"] = time.monotonic() - began
        taken = [_time(lambda: group.collective_rpc("nothing", _LONG)) for _ in range(calls)]
        found["call"], found["p99"] = Samples(tuple(taken)).median, percentile(taken, 99)
        data = bytes(_BROADCAST)
        sent = [
            _time(lambda: group.collective_rpc("take", _LONG, args=(data,)))
            for _ in range(_BROADCASTS + 1)
        ]
        found["broadcast"] = Samples(tuple(sent[1:])).median  # the first makes the memory
        found["descriptors"] = _descriptors() - files
        found["driver"] = driver.pss([os.getpid()]) - memory
        found["ranks"] = driver.pss(each.pid for each in group.ranks if each.pid is not None)
        victim = group.ranks[ranks // 2].pid
        assert victim is not None
        os.kill(victim, signal.SIGKILL)
        found["death"] = _time(lambda: group.collective_rpc("nothing", _LONG, retries=9))
        began = time.monotonic()
    found["end"] = time.monotonic() - began
    return found


def _time(call: Any) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def verdicts(found: dict[int, dict[str, Samples]]) -> list[Verdict]:
    """Hold each size against the one before it."""
    held: list[Verdict] = []
    for few, many in pairwise(sorted(found)):
        for kind, text in _KINDS.items():
            ratio = found[many][kind].over(found[few][kind])
            what = f"{text}: {ranks_in_words(many)} to {few}, at most {many / few:g}"
            held.append(at_most(what, ratio, many / few))
    return held


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command line."""
    parser.add_argument("--ranks", type=several(count), default=[8, 64, 256], help="8,64,256")
    parser.add_argument("--rounds", type=count, default=6, help="groups of each size (default 6)")
    parser.add_argument("--calls", type=count, default=200, help="empty ones (default 200)")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; the exit code is 1 if groups of a size broke."""
    check_writable("json", arguments.json)
    machine = describe()
    sizes: list[int] = sorted(arguments.ranks)
    rounds: dict[int, list[dict[str, float]]] = {ranks: [] for ranks in sizes}
    broken: dict[int, str] = {}
    for number in range(arguments.rounds):
        for ranks in sizes if number % 2 else reversed(sizes):
            if ranks not in broken:
                try:
                    rounds[ranks].append(measure(ranks, arguments.calls))
                except subprocess.SubprocessError as error:
                    broken[ranks] = f"{ranks_in_words(ranks)} broke: {error}"
    found = {
        ranks: {kind: Samples(tuple(each[kind] for each in rows)) for kind in _KINDS}
        for ranks, rows in rounds.items()
        if rows
    }
    rows = [
        (text, *(_show(kind, each[kind].median, ranks) for ranks, each in found.items()))
        for kind, text in _KINDS.items()
    ]
    shown = "\n\n".join((table(("", *map(ranks_in_words, found)), rows), *broken.values()))
    held = verdicts(found)
    values: dict[str, Any] = {"machine": machine, "rounds": rounds, "broken": broken}
    text = f"## Ranks\n\n{sentence(machine)}.\n\n{shown}"
    give(arguments, values, f"{text}\n\n{verdict_table(held)}" if held else text)
    return int(bool(broken))


def _show(kind: str, value: float, ranks: int) -> str:
    if kind in _SECONDS:
        return seconds(value)
    each = value / ranks
    return f"{value:g}, {each:.3g} a rank" if kind == "descriptors" else f"{size(each)} a rank"
