"""What a rank can have behind it before it is one: imports, and what is compiled for every engine.

Guarantees: to import this module imports whatever of vLLM's a worker would import on its way to its
first step; a name that this release does not have is passed over, for a worker imports it by itself.
"""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module

_NAMES = (
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


def compile_shared() -> None:
    """Compile what vLLM compiles when it is first used, whatever the model; on a CPU.

    It is the ranking of log-probabilities; elsewhere it is compiled for a device, which comes with
    the rank.
    """
    with suppress(ImportError, AttributeError):
        if not import_module("vllm.platforms").current_platform.is_cpu():
            return
        torch = import_module("torch")
        rank = import_module("vllm.v1.sample.ops.logprobs").batched_count_greater_than
        rank(torch.zeros(2, 8), torch.zeros(2, 1))


for _name in _NAMES:
    with suppress(ImportError):
        import_module(_name)
