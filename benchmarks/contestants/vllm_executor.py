"""vLLM's multi-process executor on CPUs: a model of one layer with invented weights, no requests.

Calls are ``collective_rpc`` with a callable, as vLLM offers to its users.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from .protocol import Contestant, beside, note

_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "num_hidden_layers": 1,
    "vocab_size": 256,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def nothing(_worker: Any) -> None:
    """Do nothing."""


def slow(_worker: Any, seconds: float, notes: str) -> str:
    """Do as `protocol.Echo.slow`."""
    note(notes, "began")
    time.sleep(seconds)
    note(notes, "ended")
    return f"answer of {os.getpid()}"


class VllmExecutor(Contestant):
    """The executor without the engine around it."""

    def open(self, ranks: int, variant: str) -> None:
        del variant
        os.environ.update(
            VLLM_CPU_KVCACHE_SPACE="1",
            VLLM_CPU_OMP_THREADS_BIND="nobind",
            VLLM_LOGGING_LEVEL="ERROR",
            VLLM_NO_USAGE_STATS="1",
            HF_HUB_OFFLINE="1",
        )
        folder = tempfile.mkdtemp(dir=beside())
        (Path(folder) / "config.json").write_text(json.dumps(_MODEL))
        arguments = import_module("vllm.engine.arg_utils").EngineArgs(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            enforce_eager=True,
            tensor_parallel_size=ranks,
            distributed_executor_backend="mp",
            max_model_len=64,
            dtype="float32",
        )
        config = arguments.create_engine_config()
        module = import_module("vllm.v1.executor.multiproc_executor")
        self._executor: Any = module.MultiprocExecutor(config)

    def close(self) -> None:
        self._executor.shutdown()

    def version(self) -> str:
        return version("vllm-cpu")

    def pids(self) -> list[int]:
        return [worker.proc.pid for worker in self._executor.workers]

    def call(self, method: str, *args: Any) -> Any:
        return self._executor.collective_rpc({"nothing": nothing, "slow": slow}[method], args=args)

    def works(self, timeout: float) -> None:
        self._executor.collective_rpc(nothing, timeout)


def make() -> VllmExecutor:
    """Return the contestant."""
    return VllmExecutor()
