"""An engine whose requests use adapters, and whose ranks are killed; prints what came of it.

A program of its own, so that the engine ends with it: ``python adapters.py FOLDER``.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.vllm.http_server import environment
from benchmarks.vllm.processes import strike
from benchmarks.vllm.toy_model import CONFIG, make_model

_RANK = 8
_TOKENS = 40
_STRIKE_AFTER = 60  # tokens


def main(folder: Path) -> None:
    """Run it."""
    os.environ.update({"VLLM_ENABLE_V1_MULTIPROCESSING": "0", **environment()})
    vllm: Any = import_module("vllm")
    supervised = import_module("phalanx.integrations.vllm").supervised
    request: Any = import_module("vllm.lora.request").LoRARequest
    adapters = [request(f"a{n}", n, str(_make_adapter(folder / f"a{n}", n))) for n in (1, 2, 3)]
    arguments = vllm.EngineArgs(
        model=str(make_model(folder / "toy")),
        tensor_parallel_size=2,
        enforce_eager=True,
        dtype="float32",
        max_model_len=512,
        enable_lora=True,
        max_loras=3,
        max_cpu_loras=4,
        max_lora_rank=_RANK,
        **supervised(),
    )
    engine = vllm.LLMEngine.from_engine_args(arguments)
    said: dict[str, Any] = {"added": [engine.add_lora(each) for each in adapters]}
    engine.pin_lora(3)
    parameters = vllm.SamplingParams(max_tokens=_TOKENS, temperature=0.0, ignore_eos=True)

    def run(do: Callable[[], object] | None = None) -> list[list[int]]:
        for number, adapter in enumerate(adapters[:2]):
            prompt = {"prompt_token_ids": list(range(number, 60))}
            engine.add_request(str(number), prompt, parameters, lora_request=adapter)
        answers: dict[str, list[int]] = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                answers[output.request_id] = list(output.outputs[0].token_ids)
            if do is not None and sum(map(len, answers.values())) > _STRIKE_AFTER:
                do()
                do = None
        return [answers[number] for number in sorted(answers)]

    said["right"] = run()
    said["killed"] = run(lambda: strike(os.getpid(), (0,)))
    said["listed"] = sorted(engine.list_loras())
    shutil.rmtree(folder / "a3")
    said["without_files"] = run(lambda: strike(os.getpid(), (1,)))
    said["left"] = sorted(engine.list_loras())
    engine.engine_core.shutdown()
    print(json.dumps(said))


def _make_adapter(folder: Path, seed: int) -> Path:
    torch: Any = import_module("torch")
    chance = torch.Generator().manual_seed(seed)
    hidden = CONFIG["hidden_size"]
    weights: dict[str, Any] = {}
    for layer in range(2):
        for name in ("q_proj", "v_proj"):
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{place}.lora_A.weight"] = torch.randn(_RANK, hidden, generator=chance) * 0.2
            weights[f"{place}.lora_B.weight"] = torch.randn(hidden, _RANK, generator=chance) * 0.2
    folder.mkdir()
    import_module("safetensors.torch").save_file(weights, folder / "adapter_model.safetensors")
    about = {"peft_type": "LORA", "r": _RANK, "lora_alpha": 16, "bias": "none"}
    targets = {"target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
    (folder / "adapter_config.json").write_text(json.dumps({**about, **targets}))
    return folder


if __name__ == "__main__":
    main(Path(sys.argv[1]))
