"""Process a dataset: one output for each input, whichever process is killed, the driver included.

The inputs are the sources of Python's standard library; the output of each says how much of it is
documented. Run it again after a kill of any kind: it continues with the inputs without output.

- An output is written under another name and renamed, so that it is complete or absent.
- An input may be processed twice, by ranks that die in the middle: the later output replaces the
  equal one before it. So a call may be sent again, and the driver keeps no list.

    python examples/process_dataset.py OUT
    python examples/process_dataset.py OUT --kills 3        # of ranks
    python examples/process_dataset.py OUT --kill-driver    # and of the driver, half-way
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import signal
import subprocess
import sys
import sysconfig
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from typing import Any

from phalanx import Executor, Intensity, Launch, Strategy, WorkerActor, method

LIBRARY = Path(sysconfig.get_path("stdlib"))


class Processor(WorkerActor):
    """Processes one input at a time. Load your model in `on_start`."""

    def __init__(self, out: str) -> None:
        self._out = Path(out)

    @method(idempotent=True, hang_after=60.0)  # a death or a hang sends the call to another rank
    def process(self, name: str) -> None:
        """Write the output for the input *name*."""
        tree = ast.parse((LIBRARY / name).read_bytes())
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        found = [ast.get_docstring(each) for each in ast.walk(tree) if isinstance(each, kinds)]
        result = {"input": name, "documented": sum(map(bool, found)), "of": len(found)}
        unfinished = self._out / f"{name}.{os.getpid()}.unfinished"
        with unfinished.open("w") as file:
            json.dump(result, file)
            file.flush()
            os.fsync(file.fileno())  # a machine that loses power has no empty outputs
        unfinished.rename(self._out / f"{name}.json")


def process(options: argparse.Namespace, names: list[str]) -> None:
    """Process those of *names* that have no output."""
    out: Path = options.out
    missing = [name for name in names if not (out / f"{name}.json").exists()]
    print(f"{len(names)} inputs, {len(names) - len(missing)} outputs are there", flush=True)
    chance = random.Random(options.seed)
    kill_at = set(chance.sample(range(len(missing)), min(options.kills, len(missing))))
    killed = set[int]()
    waiting = set[Future[Any]]()
    ended = due = 0

    def take() -> None:
        nonlocal ended, waiting
        done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
        for call in done:
            call.result()  # an input that cannot be processed ends the run with its traceback
        ended += len(done)
        print(f"done {ended} of {len(missing)}", flush=True)

    with Executor(
        Processor,
        options.ranks,
        args=(str(out),),
        strategy=Strategy.ONE_FOR_ONE,
        intensity=Intensity(options.kills + 3, 60.0),
        devices="cpu",
        launch=Launch(preload=()),
    ) as group:
        for number, name in enumerate(missing):
            waiting.add(group.submit("process", args=(name,), retries=options.kills + 1))
            due += number in kill_at
            up = [each.pid for each in group.ranks if each.state == "up" and each.pid is not None]
            if due and (alive := sorted({*up} - killed)):
                victim = chance.choice(alive)
                os.kill(victim, signal.SIGKILL)
                killed.add(victim)
                due -= 1
                print(f"killed a rank (pid {victim})", flush=True)
            while len(waiting) >= 2 * options.ranks:  # one to work on and one to take next, each
                take()
        while waiting:
            take()


def kill_a_driver(options: argparse.Namespace, names: list[str]) -> None:
    """Run this program and kill it half-way."""
    words = [str(options.out), *("--ranks", str(options.ranks)), *("--limit", str(options.limit))]
    command = [sys.executable, __file__, *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        for line in driver.stdout:
            if line.startswith("done") and int(line.split()[1]) >= len(names) // 2:
                driver.kill()
                print(f"killed the driver (pid {driver.pid}) at: {line}", end="", flush=True)
                break


def main() -> int:
    """Process the dataset; return 0 if each input has exactly one output."""
    parser = argparse.ArgumentParser(description="Process a dataset, through kills.")
    parser.add_argument("out", type=Path, help="the folder of the outputs")
    parser.add_argument("--ranks", type=int, default=2, help="worker processes")
    parser.add_argument("--limit", type=int, default=150, help="inputs to process")
    parser.add_argument("--kills", type=int, default=0, help="ranks to kill while they work")
    parser.add_argument("--seed", type=int, default=0, help="of the kills")
    parser.add_argument("--kill-driver", action="store_true", help="kill a first run half-way")
    options = parser.parse_args()
    for name, least, most in (("ranks", 1, 64), ("limit", 1, 1000), ("kills", 0, options.limit)):
        if not least <= (value := getattr(options, name)) <= most:
            parser.error(f"--{name} {value}: give {least} to {most}")
    names = sorted(each.name for each in LIBRARY.glob("*.py"))[: options.limit]
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"out: {error}")
    if options.kill_driver:
        kill_a_driver(options, names)
    process(options, names)
    for each in options.out.glob("*.unfinished"):  # of ranks that were killed
        each.unlink()
    there = [each for name in names if (each := options.out / f"{name}.json").exists()]
    outputs = [json.loads(each.read_text()) for each in there]
    right = [each["input"] for each in outputs] == names
    print(f"{len(names)} inputs, {len(outputs)} outputs, one for each: {right}")
    documented, of = (sum(each[key] for each in outputs) for key in ("documented", "of"))
    print(f"{documented} of {of} modules, classes and functions are documented")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
