"""Which processors each rank runs on, where there are no GPUs.

Guarantees: the same as vLLM's own executor would choose.

vLLM says it in the environment of each process it starts, where OpenMP reads it when it is loaded.
A rank that is forked has it loaded, so it is told the numbers as well and binds itself.
"""

from __future__ import annotations

import os
from typing import Any

from vllm.platforms import current_platform
from vllm.utils.ompmultiprocessing import OMPProcessManager


def processors(config: Any) -> tuple[tuple[int, ...], ...]:
    """Return the processors of each rank; empty where ranks are not bound."""
    if not current_platform.is_cpu():
        return ()
    return tuple(tuple(each) for each in OMPProcessManager(config).cpu_lists)


def environments(config: Any) -> list[dict[str, str]]:
    """Return what the environment of each rank is to say of it."""
    size = config.parallel_config.world_size
    chosen = OMPProcessManager(config) if current_platform.is_cpu() else None
    said: list[dict[str, str]] = []
    for rank in range(size):
        if chosen is None:
            said.append({})
            continue
        before = dict(os.environ)
        with chosen.configure_omp_envs(rank=rank, local_rank=rank):
            said.append({k: v for k, v in os.environ.items() if before.get(k) != v})
    return said
