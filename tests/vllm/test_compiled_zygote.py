"""What ranks are forked from has compiled what their first step needs."""

from __future__ import annotations

import pytest
from tests.support.programs import run_python

_STEP = """
import os
import torch
import phalanx.integrations.vllm.worker.warm_start
from vllm.model_executor.layers.vocab_parallel_embedding import get_masked_input_and_mask
from vllm.v1.sample.ops.logprobs import batched_count_greater_than

tasks = len(os.listdir("/proc/self/task"))
torch.set_num_threads(1)  # as a rank with one processor does
torch.compiler.set_stance("fail_on_recompile")
tokens = torch.arange(1000, dtype=torch.int32)
with torch.inference_mode():
    for count in (767, 13, 1):
        get_masked_input_and_mask(tokens[:count], 0, 128, 0, 256, 256)
        get_masked_input_and_mask(tokens[:count], 128, 250, 6, 250, 250)
        scores, chosen = torch.zeros(count, 32000), torch.zeros(count, 1)
        for each in (scores, chosen):
            torch._dynamo.decorators.mark_unbacked(each, 0)
        batched_count_greater_than(scores, chosen)
print("threads", tasks)
"""

_KERNELS = """
import phalanx.integrations.vllm.worker.warm_start
from vllm import plugins
from vllm.platforms import current_platform
from vllm.triton_utils.dispatcher import KernelOverride
from vllm.v1.worker.block_table import ComputeSlotMappingKernel

kernel = ComputeSlotMappingKernel.kernel
current_platform.register_triton_kernel_overrides()  # as each worker does
print("once", plugins.plugins_loaded, type(kernel) is KernelOverride)
print("same", ComputeSlotMappingKernel.kernel is kernel)
"""


@pytest.mark.timeout(600)
def test_a_rank_with_one_processor_compiles_nothing_and_is_forked_from_one_thread() -> None:
    done = run_python("-c", _STEP, timeout=600)

    assert done.stdout.split()[-2:] == ["threads", "1"], done.stderr[-4000:]


@pytest.mark.timeout(600)
def test_the_kernels_of_the_platform_are_put_in_place_once_for_all_ranks() -> None:
    done = run_python("-c", _KERNELS, timeout=600)

    assert done.stdout.split()[-5:] == ["once", "True", "True", "same", "True"], done.stderr[-4000:]
