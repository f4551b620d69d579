"""What metrics cost a call: ``python -m benchmarks metrics``.

Two drivers make empty calls to two ranks in turns, one of them with a `MetricsServer`. The ratio is
that of the two medians of one round; slow phases of the machine strike both.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from benchmarks.harness.arguments import count
from benchmarks.harness.machine import describe, sentence
from benchmarks.harness.stats import Samples
from phalanx import Executor, Runtime, WorkerActor
from phalanx.integrations.prometheus import MetricsServer

if TYPE_CHECKING:
    import argparse

_RANKS = 2
_MODES = ("off", "on")
_ASKED = 3.0  # seconds; status is requested once a second, and calls are counted from then on


class Idle(WorkerActor):
    """A worker with nothing to do."""

    def nothing(self) -> None:
        """Return."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command line."""
    parser.add_argument("--rounds", type=count, default=41)
    parser.add_argument("--calls", type=count, default=2000, help="in a round, of each driver")


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; return the exit code."""
    medians: dict[str, list[float]] = {mode: [] for mode in _MODES}
    with contextlib.ExitStack() as stack:
        drivers = {mode: stack.enter_context(_driver(mode)) for mode in _MODES}
        for each in drivers.values():
            _read(each)
        for number in range(arguments.rounds):
            for mode in _MODES if number % 2 else reversed(_MODES):
                assert drivers[mode].stdin is not None
                print(arguments.calls, file=drivers[mode].stdin, flush=True)
                medians[mode].append(_read(drivers[mode]))
        for each in drivers.values():
            assert each.stdin is not None
            each.stdin.close()
    off, on = (Samples(tuple(values)) for values in medians.values())
    ratio = on.over(off)
    assert ratio is not None
    print(sentence(describe()))
    for mode, values in zip(_MODES, (off, on), strict=True):
        print(f"metrics {mode:<3}  median of an empty call {values.median:.1f} us")
    about = f"{ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f})"
    print(f"on/off  median of {arguments.rounds} pairs {about}, {ratio.confidence:.1%} confidence")
    return 0


def _driver(mode: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", __spec__.name, mode]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _read(driver: subprocess.Popen[str]) -> float:
    assert driver.stdout is not None
    return float(json.loads(driver.stdout.readline()))


def drive(mode: str) -> None:
    """Make as many calls as each line of stdin says; print their median in microseconds."""
    with (
        MetricsServer(0) if mode == "on" else contextlib.nullcontext(),
        Runtime(console=None) as runtime,
        Executor(Idle, _RANKS, devices="cpu", launch={"preload": ()}, runtime=runtime) as group,
    ):
        time.sleep(_ASKED)
        print(0, flush=True)
        for line in sys.stdin:
            took: list[float] = []
            for _ in range(int(line)):
                began = time.perf_counter()
                group.collective_rpc("nothing")
                took.append(time.perf_counter() - began)
            print(1e6 * statistics.median(took), flush=True)


if __name__ == "__main__":
    drive(*sys.argv[1:])
