"""``python -m benchmarks startup``: N ranks with torch imported, beside multiprocessing's spawn.

Both sides run the same first torch operation in each process and report it through a pipe; the
clock runs from before anything exists until the last report.
"""

from __future__ import annotations

import multiprocessing
import os
import select
import time
from typing import TYPE_CHECKING, Any

from phalanx.runtime import EventLoop, Launcher, LaunchSpec

from .harness.arguments import add_json, check_writable, count, give
from .harness.machine import describe, sentence
from .harness.stats import Samples
from .harness.tables import seconds, table

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

_LONG = 300.0


def first_operation() -> float:
    """Have torch do something, in one thread."""
    import torch  # noqa: PLC0415  # what is measured

    torch.set_num_threads(1)
    return float(torch.ones(64, 64).matmul(torch.ones(64, 64)).sum())


def rank(_payload: bytes, fds: Mapping[str, int]) -> None:
    """Be a rank of ours."""
    os.write(fds["out"], b"." if first_operation() == 64.0**3 else b"!")
    os.read(fds["stay"], 1)


def spawned(out: Connection, stay: Connection) -> None:
    """Be a rank of multiprocessing's."""
    out.send_bytes(b"." if first_operation() == 64.0**3 else b"!")
    stay.poll(None)


def await_reports(fd: int, count: int) -> None:
    """Return once *count* processes have reported on *fd*."""
    deadline = time.monotonic() + _LONG
    seen = b""
    while len(seen) < count:
        ready, _, _ = select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            msg = f"{len(seen)} of {count} ready after {_LONG} s"
            raise TimeoutError(msg)
        seen += os.read(fd, count)
    if seen.strip(b"."):
        msg = "a rank computed something else"
        raise ValueError(msg)


def measure_spawn(ranks: int) -> float:
    """Return the seconds until *ranks* spawned processes are ready."""
    context = multiprocessing.get_context("spawn")
    stay, go = context.Pipe(duplex=False)
    began = time.monotonic()
    started: list[tuple[BaseProcess, Connection, Connection]] = []
    for _ in range(ranks):
        read, write = context.Pipe(duplex=False)
        process = context.Process(target=spawned, args=(write, stay), daemon=True)
        process.start()
        started.append((process, read, write))
    for _, read, _ in started:
        if not read.poll(_LONG) or read.recv_bytes() != b".":
            msg = "a spawned rank did not become ready"
            raise TimeoutError(msg)
    took = time.monotonic() - began
    go.close()
    stay.close()
    for rank_process, read, write in started:
        rank_process.terminate()
        rank_process.join(_LONG)
        read.close()
        write.close()
    return took


def measure_phalanx(ranks: int, more: int) -> tuple[float, list[float]]:
    """Return seconds for *ranks* cold, and for each of *more* single ones warm."""
    out, report = os.pipe()
    stay, go = os.pipe()
    began = time.monotonic()
    loop = EventLoop()
    launcher = Launcher(loop, preload=("torch",))

    def launch(count: int) -> None:
        specs = [
            LaunchSpec(
                entry=f"{__name__}:rank", fds={"out": report, "stay": stay}, label=f"rank {n}"
            )
            for n in range(count)
        ]
        launcher.launch(*specs, on_exit=lambda _: None, deadline=time.monotonic() + _LONG)
        await_reports(out, count)

    launch(ranks)
    cold = time.monotonic() - began
    warm: list[float] = []
    for _ in range(more):
        began = time.monotonic()
        launch(1)
        warm.append(time.monotonic() - began)
    launcher.close(time.monotonic() + 10.0)
    loop.close()
    for fd in (out, report, stay, go):
        os.close(fd)
    return cold, warm


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command line."""
    parser.add_argument("--ranks", type=count, default=8)
    parser.add_argument("--warm", type=count, default=11, help="single ranks to start when warm")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measure and print."""
    check_writable("json", arguments.json)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    machine = describe()
    # An unmeasured import first, so that neither side pays for a cold disk cache.
    measure_spawn(1)
    cold, warm = measure_phalanx(arguments.ranks, arguments.warm)
    spawn = measure_spawn(arguments.ranks)
    singles = Samples(tuple(warm))
    figures: dict[str, Any] = {
        "machine": machine,
        "ranks": arguments.ranks,
        "spawn_seconds": spawn,
        "phalanx_cold_seconds": cold,
        "ratio": cold / spawn,
        "one_more_warm_seconds": warm,
    }
    rows = [
        (f"{arguments.ranks} ranks, multiprocessing spawn", seconds(spawn), ""),
        (f"{arguments.ranks} ranks, phalanx, cold", seconds(cold), f"{cold / spawn:.2f} of it"),
        ("one more rank, warm", seconds(singles.median), f"slowest {seconds(max(warm))}"),
    ]
    shown = table(("ready with torch", "median", ""), rows)
    give(arguments, figures, f"## Start-up\n\n{sentence(machine)}.\n\n{shown}")
    return 0
