"""An engine whose workers raise CUDA errors, or are killed by a request; prints what came of it.

A separate program, so that the engine ends with it: ``python device_errors.py FOLDER RANKS``.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.vllm.http_server import environment
from benchmarks.vllm.toy_model import make_model

_SHM = Path("/dev/shm")
_TOKENS = 24
_STRIKE_AFTER = 40  # tokens


def main(folder: Path, ranks: int) -> None:
    """Run it."""
    faults = folder / "faults"
    faults.mkdir()
    os.environ.update({"VLLM_ENABLE_V1_MULTIPROCESSING": "0", **environment()})
    os.environ |= {"PHALANX_FAULTS": str(faults), "PYTHONPATH": str(Path(__file__).parents[2])}
    every = range(ranks)
    for rank in every:  # while the engine starts
        (faults / f"determine_available_memory-{rank}").touch()
    (faults / f"initialize_from_config-{ranks - 1}").touch()
    vllm: Any = import_module("vllm")
    structured: Any = import_module("vllm.sampling_params").StructuredOutputsParams
    supervised = import_module("phalanx.integrations.vllm").supervised
    arguments = vllm.EngineArgs(
        model=str(make_model(folder / "toy")),
        tensor_parallel_size=ranks,
        enforce_eager=True,
        dtype="float32",
        max_model_len=512,
        worker_cls="tests.vllm.faulty_worker.FaultyWorker",
        **supervised(intensity=[12, 600.0] if ranks == 1 else [100, 60.0]),
    )
    said: dict[str, Any] = {}
    shared = set(_names(_SHM))
    (faults / f"load_model-{ranks - 1}").write_text("mistake")
    try:
        vllm.LLMEngine.from_engine_args(arguments)
    except Exception as error:  # it is what the test looks at
        said |= {"refused": str(error), "shared": sorted({*_names(_SHM)} - shared)}
    (faults / f"load_model-{ranks - 1}").touch()
    engine = vllm.LLMEngine.from_engine_args(arguments)
    group = engine.engine_core.engine_core.model_executor.supervision
    said |= {"started": group.status().restarts, "left": _names(faults)}

    def run(wanted: Sequence[str] = (), *, grammar: bool = False) -> dict[str, Any]:
        restarts = group.status().restarts
        for number in range(4):
            options: dict[str, Any] = {"max_tokens": _TOKENS, "temperature": 0.0}
            if number == 3 and grammar:
                options["structured_outputs"] = structured(regex="[a-z0-9 ]{30}")
            prompt = {"prompt_token_ids": list(range(number + 1, 40))}
            parameters = vllm.SamplingParams(**options, ignore_eos=True)
            engine.add_request(f"r{number}", prompt, parameters)
        answers: dict[str, Any] = {}
        seen = 0
        while engine.has_unfinished_requests():
            for output in engine.step():
                part = output.outputs[0]
                answers[output.request_id] = list(part.token_ids), part.finish_reason
            if seen < _STRIKE_AFTER <= sum(len(tokens) for tokens, _ in answers.values()):
                seen = _STRIKE_AFTER
                for name in wanted:
                    (faults / name).write_text("r1")
        return {
            "answers": [answers[number] for number in sorted(answers)],
            "restarts": group.status().restarts - restarts,
            "left": _names(faults),
        }

    for grammar in (False, True):
        said[f"right {grammar}"] = run(grammar=grammar)
        for where in ("execute_model", "sample_tokens"):
            for who in ([0], [ranks - 1], list(every))[: 2 * ranks - 1]:
                name = f"{where} {who} {grammar}"
                said[name] = run([f"{where}-{rank}" for rank in who], grammar=grammar)
    # The second one is raised while the loss to the first is made good.
    for who in ([ranks - 1], list(every))[:ranks]:
        replay = [f"initialize_from_config-{rank}" for rank in who]
        said[f"replay {who} False"] = run(["execute_model-0", *replay])
    said["poison"] = run(["poison"])
    for _ in range(4):  # more restarts in all than the intensity allows
        said["again"] = run(["poison"])
    (faults / "poison").unlink()
    said["after False"] = run()
    said["report"] = str(group.status().reports[0].reason)
    engine.engine_core.shutdown()
    print(json.dumps(said))


def _names(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
