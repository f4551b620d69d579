"""Start-up: N ranks ready with torch imported, against multiprocessing's spawn in the same run.

Both sides run the same first torch operation in each process and report it through a pipe; the
clock runs from before anything exists until the last report.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import select
import statistics
import time
from typing import TYPE_CHECKING, Any

from phalanx.runtime.hub import Hub
from phalanx.runtime.launcher import Launcher, LaunchSpec

if TYPE_CHECKING:
    from collections.abc import Mapping
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

LONG = 300.0


def first_operation() -> float:
    import torch  # noqa: PLC0415  # what is measured

    torch.set_num_threads(1)
    return float(torch.ones(64, 64).matmul(torch.ones(64, 64)).sum())


def rank(_payload: bytes, fds: Mapping[str, int]) -> None:
    os.write(fds["out"], b"." if first_operation() == 64.0**3 else b"!")
    os.read(fds["stay"], 1)


def spawned(out: Connection, stay: Connection) -> None:
    out.send_bytes(b"." if first_operation() == 64.0**3 else b"!")
    stay.poll(None)


def await_reports(fd: int, count: int) -> None:
    """Return once *count* processes have reported on *fd*."""
    deadline = time.monotonic() + LONG
    seen = b""
    while len(seen) < count:
        ready, _, _ = select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            msg = f"{len(seen)} of {count} ready after {LONG} s"
            raise TimeoutError(msg)
        seen += os.read(fd, count)
    if seen.strip(b"."):
        msg = "a rank computed something else"
        raise ValueError(msg)


def measure_spawn(ranks: int) -> float:
    context = multiprocessing.get_context("spawn")
    stay, go = context.Pipe(duplex=False)
    began = time.monotonic()
    started: list[tuple[BaseProcess, Connection, Connection]] = []
    for _ in range(ranks):
        read, write = context.Pipe(duplex=False)
        process = context.Process(target=spawned, args=(write, stay))
        process.start()
        started.append((process, read, write))
    for _, read, _ in started:
        if not read.poll(LONG) or read.recv_bytes() != b".":
            msg = "a spawned rank did not become ready"
            raise TimeoutError(msg)
    took = time.monotonic() - began
    go.close()
    stay.close()
    for rank_process, read, write in started:
        rank_process.terminate()
        rank_process.join(LONG)
        read.close()
        write.close()
    return took


def measure_phalanx(ranks: int, more: int) -> tuple[float, list[float]]:
    """Return seconds for *ranks* cold, and for each of *more* single ones warm."""
    out, report = os.pipe()
    stay, go = os.pipe()
    began = time.monotonic()
    hub = Hub()
    launcher = Launcher(hub, preload=("torch",))

    def launch(count: int) -> None:
        specs = [
            LaunchSpec(entry="startup:rank", fds={"out": report, "stay": stay}, label=f"rank {n}")
            for n in range(count)
        ]
        launcher.launch_many(specs, on_exit=lambda _: None, deadline=time.monotonic() + LONG)
        await_reports(out, count)

    launch(ranks)
    cold = time.monotonic() - began
    warm: list[float] = []
    for _ in range(more):
        began = time.monotonic()
        launch(1)
        warm.append(time.monotonic() - began)
    launcher.close(time.monotonic() + 10.0)
    hub.close()
    for fd in (out, report, stay, go):
        os.close(fd)
    return cold, warm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--warm", type=int, default=11, help="single ranks to start when warm")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # An unmeasured import first, so that neither side pays for a cold disk cache.
    measure_spawn(1)
    cold, warm = measure_phalanx(options.ranks, options.warm)
    spawn = measure_spawn(options.ranks)
    figures: dict[str, Any] = {
        "ranks": options.ranks,
        "cpus": os.cpu_count(),
        "spawn_seconds": round(spawn, 3),
        "phalanx_cold_seconds": round(cold, 3),
        "ratio": round(cold / spawn, 3),
        "one_more_warm_ms": round(statistics.median(warm) * 1000, 1),
        "one_more_warm_worst_ms": round(max(warm) * 1000, 1),
    }
    if options.json:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        print(f"{name:24} {value}")


if __name__ == "__main__":
    main()
