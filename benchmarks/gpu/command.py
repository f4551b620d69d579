"""``python -m benchmarks gpu e0 e1 …``: each experiment in a process, ended at its limit.

What an experiment starts carries a mark in its environment and is killed with it, and with this
process, so that one that hangs in native code costs its limit and no more. Its figures are in
FOLDER/e0.json, and so on.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness.arguments import span
from benchmarks.harness.process_group import MARK, Family, Watch, adopt_orphans, command

from .record import Record

if TYPE_CHECKING:
    import argparse

EXPERIMENTS = {
    "e0": ("evidence", 330.0, "what NVML shows of our processes, Xid events, make test-gpu"),
    "e1": ("release", 400.0, "how long GPU memory stays in use after SIGKILL"),
    "e2": ("errors", 120.0, "which CUDA errors leave a process unusable"),
    "e3": ("hangs", 240.0, "an endless kernel, a stopped process, the interpreter held"),
    "e4": ("leases", 120.0, "a lease beside a process that is not ours"),
    "e5": ("survivors", 500.0, "survivors of NCCL groups: kills, aborts, the next epoch"),
    "e7": ("training", 500.0, "training through kills, bit for bit"),
    "e8": ("checkpoint", 120.0, "a spare without GPU memory: cuCheckpointProcess*"),
    "e9": ("inference", 330.0, "kill -9 while a decoder decodes; weights that stay"),
    "e12": ("chaos", 520.0, "a chaos run; what is left on the GPU"),
}
_UNWIND = 15.0  # seconds from SIGTERM to SIGKILL


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Take the experiments, their limit, and where their figures go."""
    about = "; ".join(f"{name}: {what}" for name, (_, _, what) in EXPERIMENTS.items())
    parser.add_argument("names", nargs="+", choices=EXPERIMENTS, metavar="E", help=about)
    parser.add_argument("--out", type=Path, default=Path(), help="folder of the figures")
    parser.add_argument("--limit", type=span, help="seconds for each (default: its own)")
    parser.add_argument("--rehearse", action="store_true", help="small, on the CPU, without NCCL")
    parser.add_argument("--inside", action="store_true", help="run one in this very process")


def run(arguments: argparse.Namespace) -> int:
    """Run them one after the other; return 0 if each came to its end and left nothing."""
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.inside:
        return _inside(arguments)
    adopt_orphans()
    failed = 0
    for name in arguments.names:
        limit = arguments.limit or EXPERIMENTS[name][1]
        values = _outside(name, limit, arguments.out, rehearse=arguments.rehearse)
        well = values["end"] == "done" and not values["left"]
        failed += not well
        print(f"{name}: {values['end']} after {values['seconds']} s; left: {values['left'] or 0}")
    return 1 if failed else 0


def _inside(arguments: argparse.Namespace) -> int:
    (name,) = arguments.names
    adopt_orphans()  # what a killed process leaves is to be seen as ours
    # Imported here: it says first which experiment it is, and torch takes seconds.
    with Record(arguments.out / f"{name}.json", name, rehearsal=arguments.rehearse) as record:
        import_module(f"benchmarks.gpu.{EXPERIMENTS[name][0]}").run(record)
    return 0


def _outside(name: str, limit: float, out: Path, *, rehearse: bool) -> dict[str, Any]:
    """Run *name* in a process; return what is in its file, and how it ended."""
    mark, began = uuid.uuid4().hex, time.monotonic()
    words = [sys.executable, "-m", "benchmarks", "gpu", name, "--inside", "--out", str(out)]
    path = out / f"{name}.json"
    path.unlink(missing_ok=True)
    environment = {**os.environ, MARK: mark, "PHALANX_LAB_UNTIL": str(began + limit)}
    end, watch = "done", Watch(mark)
    with (
        tempfile.TemporaryDirectory(prefix="lab-", ignore_cleanup_errors=True) as temporary,
        subprocess.Popen(
            words + ["--rehearse"] * rehearse, env={**environment, "TMPDIR": temporary}
        ) as process,
    ):
        family = Family(process.pid, mark)
        try:
            code = process.wait(limit)
            end = end if code == 0 else f"exit code {code}"
        except BaseException as error:
            # Also if we are to end: what it started is ours.
            end = f"cut off at {limit:g} s" if isinstance(error, subprocess.TimeoutExpired) else ""
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_UNWIND)
            if not end:
                family.end()
                raise
        left = [command(pid) for pid in family.pids() if pid != process.pid]
        still = family.end()
    watch.end()
    values: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"name": name}
    seconds = round(time.monotonic() - began, 1)
    values |= {"end": end, "seconds": seconds, "left": left, "unkillable": still}
    path.write_text(json.dumps(values, indent=1) + "\n")
    return values
