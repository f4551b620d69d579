"""The rank group of one engine, from vLLM's configuration and the policy.

Guarantees: ranks have the layout, the devices and the processors that vLLM's own executor would
give them; the process that they are forked from has imported the modules that this model needs.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from phalanx.actors import Devices, Executor, Launch, Layout, Limits, RestartPolicy, StopPolicy
from phalanx.supervision import RESUME_UNLESS_BROKEN, Decider, Directive, Rule, Strategy

from .compat import OMPProcessManager, current_platform, envs
from .policy import device_names
from .worker.engine_worker import EngineWorker

if TYPE_CHECKING:
    from .policy import Policy

_PRELOAD = (
    "torch",
    "phalanx.integrations.vllm.executor",  # the configuration holds its class
    "phalanx.integrations.vllm.worker.warm_start",
)

# A replay that fails is a failed start.
_DECIDER = Decider((Rule("NotRestored", Directive.RESTART), *RESUME_UNLESS_BROKEN.rules))


def start_group(
    config: Any, policy: Policy, *, pickled: bytes, mark: str
) -> Executor[EngineWorker]:
    """Return the workers of an engine, once they have loaded their weights.

    They get *config* as it was *pickled*; *mark* is part of their names in ``/dev/shm``.
    """
    parallel = config.parallel_config
    layout = Layout(
        tensor=parallel.tensor_parallel_size,
        pipeline=parallel.pipeline_parallel_size,
        prefill_context=parallel.prefill_context_parallel_size,
    )
    cpus, environments = _choose_processors(config)
    mask = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = device_names(mask, parallel) if current_platform.is_cuda_alike() else "cpu"
    return Executor(
        EngineWorker,
        args=(pickled, mark, cpus),
        layout=layout,
        name=f"vllm-{mark}",
        strategy=Strategy.ONE_FOR_ALL,
        intensity=policy.intensity,
        policy=RestartPolicy(
            backoff=policy.backoff, decider=_DECIDER, report_dir=policy.report_dir
        ),
        devices=Devices(
            names=names,
            # CUDA shows a process one instance of a partitioned GPU.
            visibility="one" if mask is not None and "MIG-" in mask else "all",
        ),
        launch=Launch(
            method=policy.launch,
            preload=(*_PRELOAD, *_modules_of(config), *policy.preload),
            rank_env=environments,
        ),
        # hurry: a survivor waits in a collective operation for the rank that is gone.
        limits=Limits(
            start=policy.start_timeout, stop=StopPolicy(hurry=0.0), stopped=policy.stopped_after
        ),
        hang_after=policy.hang_after or float(envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS),
        standby=policy.standby,
    )


def _modules_of(config: Any) -> list[str]:
    """Return the modules of vLLM that its workers and this model need."""
    from .compat import ModelRegistry  # noqa: PLC0415  # slow the first time

    known = (ModelRegistry.models.get(name) for name in config.model_config.architectures)
    models = [str(getattr(each, "module_name", "")) for each in known]
    # A model that others have registered may do anything when it is imported: `preload` names it.
    ours = [name for name in models if name.startswith("vllm.")]
    return [config.parallel_config.worker_cls.rpartition(".")[0], *ours]


def _choose_processors(
    config: Any,
) -> tuple[tuple[tuple[int, ...], ...], list[dict[str, str]]]:
    """Return the processors of each rank, empty if ranks are not bound, and variables for each.

    They are what vLLM's own executor would choose. It only sets the environment, which OpenMP reads
    when it is loaded; a forked rank has it loaded already, so it binds itself.
    """
    size = config.parallel_config.world_size
    if not current_platform.is_cpu():
        return (), [{} for _ in range(size)]
    chosen = OMPProcessManager(config)
    environments: list[dict[str, str]] = []
    for rank in range(size):
        before = dict(os.environ)
        with chosen.configure_omp_envs(rank=rank, local_rank=rank):
            now = dict(os.environ)
        environments.append({name: text for name, text in now.items() if before.get(name) != text})
    return tuple(tuple(each) for each in chosen.cpu_lists), environments
