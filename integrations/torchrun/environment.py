"""The environment variables of a rank, as torchrun sets them.

Source: ``LocalElasticAgent._start_workers`` and ``_set_local_rank_env`` of torch 2.13.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from phalanx.supervision import SpecError

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnvironment:
    """The values that the variables of all ranks and rounds of a run share.

    Attributes:
        given: The launcher's values of variables that phalanx sets for its workers otherwise; None
            for those that were not set.
        virtual: Whether each rank sees one GPU only, as device 0.
    """

    world_size: int
    run_id: str
    role: str
    max_restarts: int
    given: Mapping[str, str | None]
    virtual: bool = False

    def of_rank(
        self, rank: int, restart: int, error_file: str, address: str, port: int
    ) -> dict[str, str | None]:
        """Return the variables of one rank in the round after *restart* restarts; None: unset."""
        size = str(self.world_size)
        return {
            **self.given,
            "RANK": str(rank),
            "LOCAL_RANK": "0" if self.virtual else str(rank),
            "GROUP_RANK": "0",
            "ROLE_RANK": str(rank),
            "ROLE_NAME": self.role,
            "WORLD_SIZE": size,
            "LOCAL_WORLD_SIZE": size,
            "GROUP_WORLD_SIZE": "1",
            "ROLE_WORLD_SIZE": size,
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RESTART_COUNT": str(restart),
            "TORCHELASTIC_MAX_RESTARTS": str(self.max_restarts),
            "TORCHELASTIC_RUN_ID": self.run_id,
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_ERROR_FILE": error_file,
            **({"CUDA_VISIBLE_DEVICES": self._gpu(rank)} if self.virtual else {}),
        }

    def _gpu(self, rank: int) -> str:
        visible = self.given.get("CUDA_VISIBLE_DEVICES")
        return str(rank) if visible is None else visible.split(",")[rank].strip()


def environment_of(
    environ: Mapping[str, str],
    *,
    world_size: int,
    run_id: str,
    role: str,
    max_restarts: int,
    virtual: bool,
) -> RunEnvironment:
    """Return the environment of a run that is launched with *environ*.

    Raises:
        SpecError: *virtual*, and fewer GPUs are visible than there are ranks.
    """
    threads = environ.get("OMP_NUM_THREADS", "1" if world_size > 1 else None)
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if virtual and visible is not None and len(visible.split(",")) < world_size:
        text = f"CUDA_VISIBLE_DEVICES has fewer than {world_size} devices"
        raise SpecError("--virtual-local-rank", visible, text)
    given = {
        "OMP_NUM_THREADS": threads,
        "CUDA_VISIBLE_DEVICES": visible,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }
    return RunEnvironment(
        world_size=world_size,
        run_id=run_id,
        role=role,
        max_restarts=max_restarts,
        given=given,
        virtual=virtual,
    )
