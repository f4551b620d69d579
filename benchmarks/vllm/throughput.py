"""What supervision costs a vLLM engine to which nothing happens, beside vLLM's own executor.

Two engines live side by side, each in a program of its own, and take turns: while one answers the
other rests. Printed are the tokens per second and the time of a step, as medians over the turns,
with the interval of their ratio; then start-up, memory and processor time at rest. With
``--starts`` each is then started so often again, in turns and with nothing beside it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness.arguments import count
from benchmarks.harness.process_group import Family
from benchmarks.harness.stats import Samples

from .fault_patterns import Attack
from .http_server import environment
from .local_engine import LocalEngine
from .processes import below
from .toy_model import make_model
from .workload import make_load

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

SIDES = ("stock", "supervised")
_COMMAND = [sys.executable, "-m", "benchmarks.vllm.throughput"]
_ROOT = Path(__file__).parents[2]
_REST = 5.0  # seconds over which the processor time at rest is taken
_SETTLE = 1.5  # seconds after which an idle engine has stopped spinning


class Clock(Attack):
    """Does nothing to the engine, and notes when tokens arrive."""

    times: list[float]

    def begin(self) -> None:
        """Begin to note."""
        self.times = []

    def arrived(self, count: int) -> None:
        """Note the time."""
        del count
        self.times.append(time.monotonic())


def main(argv: Sequence[str] | None = None) -> int:
    """Run it."""
    options = _options(argv)
    if options.side:
        return _side(options)
    with tempfile.TemporaryDirectory() as folder:
        model = str(make_model(Path(folder) / "toy", options.layers))
        said = {side: list[dict[str, Any]]() for side in SIDES}
        # At the same time, so that both find the machine the same.
        engines = {side: _start(side, model, options.tokens) for side in SIDES}
        about = {side: _ask(engines[side], "about") for side in SIDES}
        for turn in range(options.turns + 1):
            for side in _in_turn(turn):
                time.sleep(_SETTLE)
                answer = _ask(engines[side], "run")
                if turn:  # the first warms up
                    said[side].append(answer)
        for side, engine in engines.items():
            about[side] |= _ask(engine, "rest")
        for engine in engines.values():
            _end(engine)
        # Last, so that whatever they read has been read from the disk before.
        for turn in range(options.starts):
            for side in _in_turn(turn):
                engine = _start(side, model, options.tokens)
                about[side].setdefault("alone", []).append(_ask(engine, "about")["start"])
                _end(engine)
    print(_table(said, about))
    return 0


def _side(options: argparse.Namespace) -> int:
    """Be one of the two: start an engine, and answer lines on stdin."""
    for name, value in environment().items():
        os.environ.setdefault(name, value)
    arguments: dict[str, Any] = {
        "tensor_parallel_size": 2,
        "enforce_eager": True,
        "dtype": "float32",
        "max_model_len": 512,
        "max_num_seqs": 16,
        "disable_log_stats": True,
    }
    if options.side == "supervised":
        from phalanx.integrations.vllm import supervised  # noqa: PLC0415  # needs vLLM

        arguments |= supervised()
    engine = LocalEngine(Path(options.model), arguments, in_process=False)
    load = make_load(options.tokens, structured=False)
    for line in sys.stdin:
        match line.strip():
            case "about":
                said: dict[str, Any] = {"start": engine.started_in}
            case "run":
                said = _run(engine, load)
            case _:
                said = {"memory": _memory(engine.root), "processor": _processor_at_rest()}
        print("said " + json.dumps(said), flush=True)
    engine.close()
    return 0


def _run(engine: LocalEngine, load: Sequence[Any]) -> dict[str, Any]:
    clock = Clock("none", engine.root, random.Random(0))
    began = time.monotonic()
    answers = engine.run(load, clock)
    seconds = time.monotonic() - began
    moments = sorted(clock.times)
    gaps = [b - a for a, b in itertools.pairwise(moments) if b - a > 5e-4]
    tokens = sum(len(answer.tokens) for answer in answers)
    return {"speed": tokens / seconds, "step": statistics.median(gaps)}


def _memory(root: int) -> float:
    """Return the MiB of all processes below *root*, what they share counted once."""
    return Family(root, "").pss([root, *below(root)]) / (1 << 20)


def _processor_at_rest() -> float:
    """Return the share of one processor that all processes use while nothing is asked."""
    time.sleep(_SETTLE)
    before, began = _ticks(), time.monotonic()
    time.sleep(_REST)
    return (_ticks() - before) / os.sysconf("SC_CLK_TCK") / (time.monotonic() - began)


def _ticks() -> int:
    total = 0
    for pid in [os.getpid(), *below(os.getpid())]:
        with suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += int(fields[11]) + int(fields[12])
    return total


def _in_turn(turn: int) -> Iterable[str]:
    return SIDES if turn % 2 else reversed(SIDES)


def _start(side: str, model: str, tokens: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*_COMMAND, "--side", side, "--model", model, "--tokens", str(tokens)],
        cwd=_ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _ask(engine: subprocess.Popen[str], what: str) -> dict[str, Any]:
    assert engine.stdin is not None
    assert engine.stdout is not None
    engine.stdin.write(f"{what}\n")
    engine.stdin.flush()
    for line in engine.stdout:
        if line.startswith("said "):
            said: dict[str, Any] = json.loads(line[5:])
            return said
    msg = f"the engine ended when it was asked to {what}"
    raise RuntimeError(msg)


def _end(engine: subprocess.Popen[str]) -> None:
    assert engine.stdin is not None
    engine.stdin.close()
    engine.wait(60)


def _table(said: dict[str, list[dict[str, Any]]], about: dict[str, dict[str, Any]]) -> str:
    speeds = {side: [each["speed"] for each in said[side]] for side in SIDES}
    ratios = [b / a for a, b in zip(speeds["stock"], speeds["supervised"], strict=True)]
    found = Samples(tuple(ratios))
    rows = [
        ("", *SIDES),
        ("tokens/s", *(f"{statistics.median(speeds[side]):.0f}" for side in SIDES)),
        (
            "time of a step, ms",
            *(f"{1e3 * statistics.median(each['step'] for each in said[s]):.2f}" for s in SIDES),
        ),
        ("start of both at once, s", *(f"{about[side]['start']:.1f}" for side in SIDES)),
        ("memory, MiB", *(f"{about[side]['memory']:.0f}" for side in SIDES)),
        ("processor at rest, %", *(f"{100 * about[side]['processor']:.1f}" for side in SIDES)),
    ]
    if alone := [about[side]["alone"] for side in SIDES if "alone" in about[side]]:
        name = f"start alone, {len(alone[0])} of each, s"
        rows.insert(4, (name, *(f"{min(each):.1f} to {max(each):.1f}" for each in alone)))
    lines = [f"{name:28}{a:>14}{b:>14}" for name, a, b in rows]
    ratio = f"{found.median:.3f} ({found.low:.3f} to {found.high:.3f})"
    lines.append(f"tokens/s against stock: {ratio}, {found.confidence:.1%} confidence")
    lines.append(f"turns: {len(ratios)}")
    return "\n".join(lines)


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--turns", type=count, default=12, help="of each engine; one more warms up")
    parser.add_argument("--starts", type=int, default=0, help="of each engine, one after the other")
    parser.add_argument("--tokens", type=int, default=100, help="the longest answer")
    parser.add_argument("--layers", type=int, default=2, help="of the model")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
