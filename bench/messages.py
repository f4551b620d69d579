"""How long messages take: empty and large ones, beside what a user could build instead.

    python bench/messages.py [--json] [--rounds N]

Everything is alive at once and measured in turns, so that drift of the machine falls on all alike.
"One memcpy" copies the same bytes between two warm buffers of this process.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import pickle
import statistics
import tempfile
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from phalanx import Executor, WorkerActor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from multiprocessing.connection import Connection

RANKS = (1, 2, 4, 8)
MIB = 1 << 20
CALLS = 200  # per round
PIPELINED = 1000


class Echo(WorkerActor):
    """Does nothing, or reads what it is given."""

    def nothing(self, _value: Any = None) -> None:
        return None

    def read(self, array: Any) -> int:
        return int(array.sum())


def serve_zmq(address: str, name: bytes) -> None:
    import zmq  # noqa: PLC0415  # only the contestant that is measured needs it

    with zmq.Context() as context, context.socket(zmq.DEALER) as sock:
        sock.setsockopt(zmq.IDENTITY, name)
        sock.connect(address)
        sock.send(b"")
        while (message := sock.recv()) != b"stop":
            pickle.loads(message)
            sock.send(pickle.dumps(None, 5))


def serve_pipe(pipe: Connection) -> None:
    while pipe.recv() != "stop":
        pipe.send(None)


class Zmq:
    """Raw ROUTER/DEALER over ipc, with pickle."""

    def __init__(self, ranks: int, folder: str) -> None:
        import zmq  # noqa: PLC0415  # as above

        address = f"ipc://{folder}/zmq-{ranks}"
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.bind(address)
        self._names = [f"rank {rank}".encode() for rank in range(ranks)]
        spawn = multiprocessing.get_context("spawn")
        self._processes = [
            spawn.Process(target=serve_zmq, args=(address, name)) for name in self._names
        ]
        for process in self._processes:
            process.start()
        for _ in self._names:
            self._router.recv_multipart()

    def call(self, value: Any = None) -> None:
        message = pickle.dumps(("nothing", (value,), {}), 5)
        for name in self._names:
            self._router.send_multipart((name, message))
        for _ in self._names:
            pickle.loads(self._router.recv_multipart()[1])

    def pipeline(self, calls: int) -> None:
        message = pickle.dumps(("nothing", (), {}), 5)
        sent = answered = 0
        while answered < calls:
            while sent < calls and sent - answered < 64:
                for name in self._names:
                    self._router.send_multipart((name, message))
                sent += 1
            for _ in self._names:
                pickle.loads(self._router.recv_multipart()[1])
            answered += 1

    def close(self) -> None:
        for name in self._names:
            self._router.send_multipart((name, b"stop"))
        for process in self._processes:
            process.join()
        self._context.destroy()


class Pipes:
    """One `multiprocessing.Pipe` per rank."""

    def __init__(self, ranks: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for _ in range(ranks):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=serve_pipe, args=(theirs,))
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def call(self, value: Any = None) -> None:
        for pipe in self._pipes:
            pipe.send(("nothing", (value,), {}))
        for pipe in self._pipes:
            pipe.recv()

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send("stop")
        for process in self._processes:
            process.join()


def timed(do: Callable[[], object], times: int = 1) -> list[float]:
    spent: list[float] = []
    for _ in range(times):
        before = time.perf_counter()
        do()
        spent.append(time.perf_counter() - before)
    return spent


def measure(
    contestants: Mapping[str, Callable[[], object]], rounds: int, times: int
) -> dict[str, Any]:
    """Return median and 99th percentile of each, in seconds, measured in turns."""
    for do in contestants.values():
        timed(do, max(3, times // 10))
    spent: dict[str, list[float]] = {name: [] for name in contestants}
    medians: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, do in contestants.items():
            taken = timed(do, times)
            spent[name] += taken
            medians[name].append(statistics.median(taken))
    return {
        name: {
            "median": statistics.median(medians[name]),
            "p99": sorted(every)[len(every) * 99 // 100],
        }
        for name, every in spent.items()
    }


def empty_calls(ranks: int, rounds: int, folder: str) -> dict[str, Any]:
    raw, pipes = Zmq(ranks, folder), Pipes(ranks)
    try:
        with Executor(Echo, ranks, preload=()) as executor:

            def pipeline() -> None:
                futures = [
                    executor.collective_rpc("nothing", non_block=True) for _ in range(PIPELINED)
                ]
                for future in futures:
                    future.result()

            calls = {
                "phalanx": lambda: executor.collective_rpc("nothing"),
                "pyzmq": raw.call,
                "Pipe": pipes.call,
            }
            piped = {"phalanx": pipeline, "pyzmq": lambda: raw.pipeline(PIPELINED)}
            row = measure(calls, rounds, CALLS)
            for name, result in measure(piped, rounds, 1).items():
                row[name]["pipelined_per_second"] = PIPELINED / result["median"]
            return row
    finally:
        raw.close()
        pipes.close()


def large_calls(ranks: int, size: int, rounds: int, folder: str) -> dict[str, Any]:
    source, target = np.ones(size, np.uint8), np.ones(size, np.uint8)
    raw = Zmq(ranks, folder)
    try:
        with Executor(Echo, ranks, preload=()) as executor:
            contestants: dict[str, Callable[[], object]] = {
                "memcpy": lambda: np.copyto(target, source),
                "phalanx": lambda: executor.collective_rpc("nothing", args=(source,)),
                "phalanx, every byte read": lambda: executor.collective_rpc("read", args=(source,)),
                "pyzmq": lambda: raw.call(source),
            }
            return measure(contestants, rounds, 3)
    finally:
        raw.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = {f"empty, {n} ranks": empty_calls(n, options.rounds, folder) for n in RANKS}
        for size, ranks in ((8 * MIB, 8), (64 * MIB, 4)):
            name = f"{size // MIB} MiB, {ranks} ranks"
            found[name] = large_calls(ranks, size, options.rounds, f"{folder}")
    if options.json:
        print(json.dumps(found))
        return
    print(f"{os.cpu_count()} processors")
    for row, results in found.items():
        print(row)
        for name, result in results.items():
            median, p99 = (f"{result[key] * 1e6:10.1f} us" for key in ("median", "p99"))
            line = f"  {name:26}{median}   p99{p99}"
            if "pipelined_per_second" in result:
                line += f"   pipelined {result['pipelined_per_second']:8.0f}/s"
            print(line)


if __name__ == "__main__":
    main()
