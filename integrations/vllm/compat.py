"""Every name of vLLM that the plug-in uses, with its place; each is imported when it is first used.

vLLM promises none of them to executors: when a release moves one, this is the file to change.
"""

from __future__ import annotations

import pkgutil
from typing import Any

_PLACES = {
    "AsyncModelRunnerOutput": "v1.outputs:AsyncModelRunnerOutput",
    "EngineArgs": "engine.arg_utils:EngineArgs",
    "EngineCoreOutput": "v1.engine:EngineCoreOutput",
    "EngineCoreOutputs": "v1.engine:EngineCoreOutputs",
    "EngineDeadError": "v1.engine.exceptions:EngineDeadError",
    "ModelRegistry": "model_executor.models:ModelRegistry",
    "ModelRunnerOutput": "v1.outputs:ModelRunnerOutput",
    "OMPProcessManager": "utils.ompmultiprocessing:OMPProcessManager",
    "Request": "v1.request:Request",
    "RequestStatus": "v1.request:RequestStatus",
    "Scheduler": "v1.core.sched.scheduler:Scheduler",
    "VllmExecutor": "v1.executor.abstract:Executor",
    "WorkerWrapperBase": "v1.worker.worker_base:WorkerWrapperBase",
    "command_line": "entrypoints.cli.main:",
    "current_platform": "platforms:current_platform",
    "distributed": "distributed:",
    "embedding": "model_executor.layers.vocab_parallel_embedding:",
    "envs": "envs:",
    "init_logger": "logger:init_logger",
    "parallel_state": "distributed.parallel_state:",
    "ranking": "v1.sample.ops.logprobs:",
    "set_random_seed": "utils.torch_utils:set_random_seed",
}

PRELOADED = (
    "vllm.distributed.device_communicators.cpu_communicator",
    "vllm.distributed.elastic_ep.elastic_execute",
    "vllm.distributed.kv_events",
    "vllm.lora.resolver",
    "vllm.model_executor.layers.quantization.compressed_tensors.utils",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.model_executor.model_loader",
    "vllm.triton_utils.dispatcher",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.attention.backends.zentorch_sdpa",
    "vllm.v1.pool.flash_maxsim",
    "vllm.v1.worker.gpu_input_batch",
    "vllm.v1.worker.worker_base",
    "torch._inductor.compile_fx",
)
"""The modules that a worker imports on the way to its first step, where a release has them."""


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    return pkgutil.resolve_name(f"vllm.{_PLACES[name]}")
