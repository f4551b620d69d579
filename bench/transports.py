"""What ``transport="zmq"`` costs beside the default: the same calls over each, in turns.

    python bench/transports.py [--json] [--rounds N]

Everything is alive at once, so that drift of the machine falls on all alike.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from phalanx import Executor, Runtime, WorkerActor, Zmq

if TYPE_CHECKING:
    from collections.abc import Callable

RANKS = (1, 2, 4)
MIB = 1 << 20
CALLS = 100  # per round
LARGE = 5
TRANSPORTS: dict[str, Any] = {"local": "local", "zmq tcp": "zmq", "zmq ipc": Zmq(ipc=True)}


class Echo(WorkerActor):
    """Does nothing."""

    def nothing(self, _value: Any = None) -> None:
        return None


def time_of(call: Callable[[], object], times: int) -> float:
    start = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - start) / times


def pipeline(executor: Executor[Echo]) -> None:
    futures = [executor.collective_rpc("nothing", non_block=True) for _ in range(CALLS)]
    for future in futures:
        future.result()


def measure(rounds: int) -> dict[str, dict[str, float]]:
    """Return the median of each row, by transport, in seconds."""
    array = np.ones(8 * MIB, dtype=np.uint8)
    found: dict[str, dict[str, list[float]]] = {}
    with Runtime(console=None, stream=False) as runtime:
        for ranks in RANKS:
            group: dict[str, Executor[Echo]] = {}
            try:
                for name, transport in TRANSPORTS.items():
                    group[name] = Executor(
                        Echo, ranks, preload=(), runtime=runtime, transport=transport
                    )
                for _ in range(rounds + 1):  # the first one warms up
                    for name, executor in group.items():
                        empty = partial(executor.collective_rpc, "nothing")
                        large = partial(executor.collective_rpc, "nothing", args=(array,))
                        rows = {
                            f"empty call, {ranks} ranks": time_of(empty, CALLS),
                            f"pipelined, {ranks} ranks": time_of(partial(pipeline, executor), 1)
                            / CALLS,
                            f"8 MiB, {ranks} ranks": time_of(large, LARGE),
                        }
                        for row, seconds in rows.items():
                            found.setdefault(row, {}).setdefault(name, []).append(seconds)
            finally:
                for executor in group.values():
                    executor.close()
    return {
        row: {name: statistics.median(values[1:]) for name, values in by_name.items()}
        for row, by_name in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    load = os.getloadavg()[0]
    found = measure(options.rounds)
    if options.json:
        print(json.dumps({"load": load, "seconds": found}))
        return
    print(f"load before {load:.1f}, {os.cpu_count()} cores, medians of {options.rounds} rounds, us")
    for row, by_name in found.items():
        figures = "  ".join(f"{name} {value * 1e6:9.0f}" for name, value in by_name.items())
        print(f"{row:24} {figures}")


if __name__ == "__main__":
    main()
