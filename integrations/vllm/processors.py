"""Which processors each rank runs on, where there are no GPUs.

Guarantees: the same as vLLM's own executor would choose.

vLLM says it in the environment of each process it starts, where OpenMP reads it when it is loaded.
A rank that is forked has it loaded, so it is told the numbers as well and binds itself.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from vllm.platforms import current_platform
from vllm.utils.ompmultiprocessing import OMPProcessManager


class Processors(NamedTuple):
    """The choice for all ranks.

    Attributes:
        numbers: The processors of each rank; empty where ranks are not bound.
        environments: What the environment of each rank is to say of it.
    """

    numbers: tuple[tuple[int, ...], ...]
    environments: list[dict[str, str]]


def choose_processors(config: Any) -> Processors:
    """Return which processors the ranks of the engine with this configuration run on."""
    size = config.parallel_config.world_size
    if not current_platform.is_cpu():
        return Processors((), [{} for _ in range(size)])
    chosen = OMPProcessManager(config)
    environments: list[dict[str, str]] = []
    for rank in range(size):
        before = dict(os.environ)
        with chosen.configure_omp_envs(rank=rank, local_rank=rank):
            now = dict(os.environ)
        environments.append({name: text for name, text in now.items() if before.get(name) != text})
    return Processors(tuple(tuple(each) for each in chosen.cpu_lists), environments)
