"""``python -m benchmarks.training.torchrun``: how long a script is gone when a rank is killed.

One script runs under torchrun and under ``phalanx torchrun`` in the same run; ranks of the two are
killed in turn. A gap lasts from SIGKILL of a rank until every rank has ended a step of the next
round. The script puts a prefix of its own before the keys of each round, without which ranks under
torchrun may fail to join again with gloo.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from benchmarks.harness.arguments import add_json, check_writable, count, give
from benchmarks.harness.machine import describe, sentence
from benchmarks.harness.process_group import MARK, Family, Watch, adopt_orphans
from benchmarks.harness.stats import Samples, percentile
from benchmarks.harness.tables import (
    seconds,
    table,
    time_with_interval,
    verdict_table,
    with_interval,
)
from benchmarks.harness.targets import at_most

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_LONG = 180.0  # seconds for a round to take its first step
_STEPS = 20  # of each rank before the next kill
_SCRIPT = Path(__file__).with_name("torchrun_subject.py")
_COMMANDS = {
    "phalanx torchrun": ("-m", "phalanx", "torchrun"),
    "torchrun": ("-m", "torch.distributed.run"),
}


@dataclass(slots=True)
class Launched:
    """A script under one launcher; its ranks note each step in a file."""

    name: str
    ranks: int
    notes: Path
    popen: subprocess.Popen[bytes]
    mark: str
    gaps: list[float] = field(default_factory=list[float])
    round: int = 0

    @classmethod
    def begin(cls, name: str, ranks: int, kills: int, folder: Path) -> Self:
        """Start the script."""
        notes, mark = folder / name.replace(" ", "-"), uuid.uuid4().hex
        words = (*_COMMANDS[name], "--standalone", f"--nproc-per-node={ranks}")
        with (folder / f"{notes.name}.log").open("wb") as log:
            popen = subprocess.Popen(
                [sys.executable, *words, f"--max-restarts={kills}", str(_SCRIPT), str(notes)],
                stdout=log,
                stderr=log,
                # torchrun leaves a folder behind.
                env={**os.environ, "TMPDIR": str(folder), MARK: mark},
            )
        return cls(name, ranks, notes, popen, mark)

    def steps(self) -> dict[int, list[tuple[float, int]]]:
        """Return the steps of this round by rank: when each ended, and its rank's process."""
        found: dict[int, list[tuple[float, int]]] = {rank: [] for rank in range(self.ranks)}
        text = self.notes.read_text() if self.notes.exists() else ""
        for line in text.splitlines(keepends=True):
            if line.endswith("\n"):
                number, rank, at, pid = line.split()
                if int(number) == self.round:
                    found[int(rank)].append((float(at), int(pid)))
        return found

    def wait_steps(self, least: int) -> dict[int, list[tuple[float, int]]]:
        """Return the steps of this round once each rank has taken *least*."""
        deadline = time.monotonic() + _LONG
        while True:
            steps = self.steps()
            if all(len(each) >= least for each in steps.values()):
                return steps
            if self.popen.poll() is not None or time.monotonic() > deadline:
                log = self.notes.with_name(f"{self.notes.name}.log").read_text()[-2000:]
                raise TimeoutError(f"{self.name}: round {self.round} took no steps\n{log}")
            time.sleep(0.02)

    def kill(self, rank: int) -> None:
        """Kill *rank* at work, and note how long it is until all ranks have taken a step."""
        pid = self.wait_steps(_STEPS)[rank][-1][1]
        began = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        self.round += 1
        first = max(each[0][0] for each in self.wait_steps(1).values())
        self.gaps.append(first - began)

    def end(self) -> None:
        """End it in good order, and by force what is left of it."""
        self.popen.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.popen.wait(60.0)
        Family(self.popen.pid, self.mark).end()
        self.popen.wait()


def measure(ranks: int, kills: int, seed: int) -> dict[str, list[float]]:
    """Return the gaps of each command, in the order of the kills."""
    adopt_orphans()
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as made:
        launched: list[Launched] = []
        for name in _COMMANDS:
            each = Launched.begin(name, ranks, kills, Path(folder))
            made.callback(Watch(each.mark).end)
            made.callback(each.end)
            launched.append(each)
        for each in launched:
            each.wait_steps(_STEPS)
        for _ in range(kills):
            rank = chance.randrange(ranks)
            for each in launched:
                each.kill(rank)
    return {each.name: each.gaps for each in launched}


def report(gaps: Mapping[str, Sequence[float]]) -> str:
    """Return the table."""
    samples = {name: Samples(tuple(found)) for name, found in gaps.items()}
    ours, theirs = (samples[name] for name in _COMMANDS)
    ratio = with_interval(ours.over(theirs))
    rows = [
        (
            name,
            time_with_interval(found),
            seconds(percentile(found.values, 99)),
            ratio if found is ours else "1",
        )
        for name, found in samples.items()
    ]
    heads = ("command", "gap: median (interval)", "99th percentile", "ratio (interval)")
    return f"{table(heads, rows)}\n\nIntervals: {ours.confidence:.1%} confidence of the median."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command line."""
    parser.add_argument("--ranks", type=count, default=2)
    parser.add_argument("--kills", type=count, default=10, help="of each command")
    parser.add_argument("--seed", type=int, default=1, help="of the ranks that are killed")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; the exit code is 1 if the ratio is not at most a quarter."""
    check_writable("json", arguments.json)
    machine = describe()
    gaps = measure(arguments.ranks, arguments.kills, arguments.seed)
    ours, theirs = (Samples(tuple(gaps[name])) for name in _COMMANDS)
    what = "at work again: at most a quarter of torchrun's time"
    held = at_most(what, ours.over(theirs), 0.25)
    values: dict[str, Any] = {
        "machine": machine,
        "ranks": arguments.ranks,
        "seed": arguments.seed,
        "gaps_seconds": gaps,
        "targets": [asdict(held)],
    }
    about = f"{sentence(machine)}. {arguments.ranks} ranks, {arguments.kills} kills of each, gloo."
    shown = f"{about}\n\n{report(gaps)}\n\n{verdict_table([held])}"
    give(arguments, values, f"## Back at work after a kill\n\n{shown}")
    return int(held.state != "met")


def main() -> int:
    """Run the command line of this process; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training.torchrun")
    add_arguments(parser)
    return run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
