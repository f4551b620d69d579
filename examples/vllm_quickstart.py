"""A vLLM engine outlives the death of a worker: ``python vllm_quickstart.py MODEL [RANKS]``."""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

import argparse
import os
import signal
import threading
from typing import Any

from phalanx.integrations.vllm import supervised


def main(model: str, ranks: int = 1) -> None:
    """Answer three prompts while a worker is killed."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # so that the workers can be reached below
    from vllm import LLM, SamplingParams  # noqa: PLC0415  # it reads the environment

    llm: Any = LLM(model, tensor_parallel_size=ranks, **supervised())
    group = llm.llm_engine.engine_core.engine_core.model_executor.supervision
    victim = group.status().ranks[0].pid
    killer = threading.Timer(1.0, os.kill, (victim, signal.SIGKILL))
    killer.start()

    prompts = ["The capital of France is", "One, two, three,", "Why is the sky blue?"]
    for output in llm.generate(prompts, SamplingParams(max_tokens=200, ignore_eos=True)):
        print(output.prompt, output.outputs[0].text)
    if not killer.finished.is_set():
        killer.cancel()
        print("answered before the worker was killed: ask for more")
    print(f"restarts: {group.status().restarts}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Kill a worker of vLLM while it answers.")
    parser.add_argument("model", help="a folder, or a name that vLLM finds")
    parser.add_argument("ranks", nargs="?", type=int, choices=range(1, 9), default=1)
    options = parser.parse_args()
    main(options.model, options.ranks)
