"""A toy RL loop whose ranks are killed: it updates weights at every step; prints what came of it.

A separate program, so that the engine ends with it: ``python updated_weights.py FOLDER HOW``, where
*HOW* is ``replay``, ``hook`` or ``neither``.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from pathlib import Path
from threading import Event
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.vllm.http_server import environment
from benchmarks.vllm.processes import strike
from benchmarks.vllm.toy_model import make_model

_STEPS = 6
_TOKENS = 12
_LONG = 300.0
_POLICIES: dict[str, dict[str, Any]] = {
    "replay": {"replay": ["set_weights"], "superseding": ["set_weights"], "replay_bytes": 2000},
    "hook": {"on_weights_lost": "tests.vllm.updated_weights:send_again"},
    "neither": {},
}

version = 0


class Updated:
    """Extends a worker of vLLM's by an update of weights."""

    _first: Any = None

    def set_weights(self, number: int, _padding: bytes) -> None:
        """Set those of version *number*; 0 is the checkpoint's."""
        runner: Any = vars(self)["model_runner"]
        weight = runner.get_model().model.embed_tokens.weight
        if self._first is None:
            self._first = weight.data.clone()
        weight.data.copy_(self._first.roll(number, dims=1))


def send_again(lost: Any) -> None:
    """Set the weights of the newest version: the hook."""
    module: Any = import_module("tests.vllm.updated_weights")  # this is not it, as a program
    lost.call("set_weights", module.version, b"")
    module.called += 1


called = 0


def main(folder: Path, how: str) -> None:
    """Run it."""
    module: Any = import_module("tests.vllm.updated_weights")
    os.environ.update({"VLLM_ENABLE_V1_MULTIPROCESSING": "0", **environment()})
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[2])
    vllm: Any = import_module("vllm")
    supervised = import_module("phalanx.integrations.vllm").supervised
    engine = vllm.LLMEngine.from_engine_args(
        vllm.EngineArgs(
            model=str(make_model(folder / "toy")),
            tensor_parallel_size=2,
            enforce_eager=True,
            dtype="float32",
            max_model_len=512,
            worker_extension_cls="tests.vllm.updated_weights.Updated",
            **supervised(intensity=[100, 60.0], **_POLICIES[how]),
        )
    )
    executor = engine.engine_core.engine_core.model_executor
    ended = Event()
    executor.register_failure_callback(ended.set)
    parameters = vllm.SamplingParams(max_tokens=_TOKENS, temperature=0.0, ignore_eos=True)

    def roll_out(number: int, *, kill: bool) -> list[list[int]]:
        module.version = number
        engine.collective_rpc("set_weights", args=(number, bytes(900)))
        engine.reset_prefix_cache()
        if kill and number % 2:  # between two steps of the loop
            strike(os.getpid(), (0,))
            if how == "neither":  # it does not take a request to find that the weights are lost
                said["ended"] = ended.wait(_LONG) and executor.is_failed
        for request in range(3):
            prompt = {"prompt_token_ids": list(range(request, 30))}
            engine.add_request(f"{number}-{request}", prompt, parameters)
        answers: dict[str, list[int]] = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                answers[output.request_id] = list(output.outputs[0].token_ids)
            if kill and not number % 2 and len(answers) == 3:  # in the middle of one
                kill = False
                strike(os.getpid(), (1,))
        return [answers[name] for name in sorted(answers)]

    numbers = range(1, _STEPS + 1)
    said: dict[str, Any] = {}
    said["right"] = [roll_out(number, kill=False) for number in numbers]
    try:
        said["killed"] = [roll_out(number, kill=True) for number in numbers]
    except Exception as error:  # it is what the test looks at
        said["error"] = str(error)
    said["restarts"] = executor.supervision.status().restarts
    said["hook"] = module.called
    engine.engine_core.shutdown()
    try:
        executor.collective_rpc("check_health")
    except Exception as error:
        said["after"] = type(error).__name__
    print(json.dumps(said))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
