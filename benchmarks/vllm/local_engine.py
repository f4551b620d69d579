"""The engine in this program: in its process, or with an engine core in a process of its own.

Guarantees: outputs are taken as they come, so that a token which came twice would be seen twice.
"""

from __future__ import annotations

import itertools
import os
import time
import traceback
from importlib import import_module
from typing import TYPE_CHECKING, Any

from .workload import Answer, Ask

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from .fault_patterns import Attack


class LocalEngine:
    """Sixteen requests at a time through vLLM's own engine class.

    Args:
        arguments: Further ones of the engine's.

    Attributes:
        root: The process under which the ranks are.
        started_in: Seconds from the first import of vLLM to an engine that takes requests.
    """

    def __init__(self, model: Path, arguments: Mapping[str, Any], *, in_process: bool) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if in_process else "1"
        began = time.monotonic()
        vllm: Any = import_module("vllm")
        engine_arguments = vllm.EngineArgs(model=str(model), **arguments)
        self._engine: Any = vllm.LLMEngine.from_engine_args(engine_arguments)
        self._parameters: Any = vllm.SamplingParams
        self._structured: Any = import_module("vllm.sampling_params").StructuredOutputsParams
        self._deltas = import_module("vllm.sampling_params").RequestOutputKind.DELTA
        self._numbers = itertools.count(1)
        self.root = os.getpid()
        self.started_in = time.monotonic() - began

    def run(self, load: Sequence[Ask], attack: Attack) -> list[Answer]:
        """Have the engine answer *load* under *attack*."""
        answers = {f"{next(self._numbers)}": Answer() for _ in load}
        for name, ask in zip(answers, load, strict=True):
            prompt = {"prompt_token_ids": ask.prompt}
            self._engine.add_request(name, prompt, self._parameters_of(ask))
        attack.begin()
        try:
            while self._engine.has_unfinished_requests():
                for output in self._engine.step():
                    self._take(answers[output.request_id], output, attack)
        except Exception as error:  # noqa: BLE001  # the engine is gone: so are its requests
            traceback.print_exc()
            for answer in answers.values():
                if not answer.finish:
                    answer.error = f"{type(error).__name__}: {error}"
        attack.end()
        return list(answers.values())

    def close(self) -> None:
        """End it."""
        self._engine.engine_core.shutdown()

    def _parameters_of(self, ask: Ask) -> Any:
        options = dict(ask.options)
        structured = options.pop("structured_outputs", None)
        if structured is not None:
            options["structured_outputs"] = self._structured(**structured)
        return self._parameters(**options, output_kind=self._deltas)

    def _take(self, answer: Answer, output: Any, attack: Attack) -> None:
        part = output.outputs[0]
        answer.tokens.extend(part.token_ids)
        for token, scores in zip(part.token_ids, part.logprobs or (), strict=False):
            answer.scores.append(scores[token].logprob)
        if part.token_ids:
            attack.arrived(len(part.token_ids))
        if part.finish_reason is not None:
            answer.finish = part.finish_reason
            answer.stop = str(part.stop_reason)
