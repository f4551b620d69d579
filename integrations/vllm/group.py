"""The rank group of one engine, put together from vLLM's configuration and the policy.

Guarantees: ranks are laid out, and get the devices and processors, as under vLLM's own executor;
the process that they are forked from has imported what they and this model are made of.

Left to others: what a rank is (`worker`), and what it is told once it is there (`executor`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from phalanx.actors import Devices, Executor, Launch, Layout, Limits, RestartPolicy, StopPolicy

from .processors import choose_processors
from .worker import EngineWorker

if TYPE_CHECKING:
    from .policy import Policy

_PRELOAD = (
    "torch",
    "phalanx.integrations.vllm.worker",
    "phalanx.integrations.vllm.warmth",
)


def start_group(
    config: Any, policy: Policy, *, pickled: bytes, mark: str
) -> Executor[EngineWorker]:
    """Return the workers of an engine, once they have loaded their weights.

    Args:
        config: The ``VllmConfig``.
        pickled: The same, as the workers are to have it.
        mark: What their names in ``/dev/shm`` bear.
    """
    parallel = config.parallel_config
    layout = Layout(
        tensor=parallel.tensor_parallel_size,
        pipeline=parallel.pipeline_parallel_size,
        prefill_context=parallel.prefill_context_parallel_size,
    )
    chosen = choose_processors(config)
    return Executor(
        EngineWorker,
        args=(pickled, mark, chosen.numbers),
        layout=layout,
        name=f"vllm-{mark}",
        strategy=policy.strategy,
        intensity=policy.intensity,
        policy=RestartPolicy(backoff=policy.backoff),
        devices=Devices(names=_devices(parallel.world_size), visibility="all"),
        launch=Launch(
            method=policy.launch,
            preload=(*_PRELOAD, *_modules_of(config), *policy.preload),
            rank_env=chosen.environments,
        ),
        # hurry: a survivor waits in a collective operation for the rank that is gone.
        limits=Limits(
            start=policy.start_timeout, stop=StopPolicy(hurry=0.0), stopped=policy.stopped_after
        ),
        report_dir=policy.report_dir,
        hang_after=policy.hang_after or _step_limit(),
        standby=policy.standby,
    )


def _modules_of(config: Any) -> list[str]:
    """Return the modules of vLLM's that its workers and this model are made of."""
    from vllm.model_executor.models import ModelRegistry  # noqa: PLC0415  # slow where it is first

    known = (ModelRegistry.models.get(name) for name in config.model_config.architectures)
    models = [str(getattr(each, "module_name", "")) for each in known]
    # What others have registered may do anything when it is imported: its owner may name it.
    ours = [name for name in models if name.startswith("vllm.")]
    return [config.parallel_config.worker_cls.rpartition(".")[0], *ours]


def _devices(world_size: int) -> Any:
    from vllm.platforms import current_platform  # noqa: PLC0415  # asks the machine, once imported

    return list(range(world_size)) if current_platform.is_cuda_alike() else "cpu"


def _step_limit() -> float:
    from vllm import envs  # noqa: PLC0415  # as above

    return float(envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS)
