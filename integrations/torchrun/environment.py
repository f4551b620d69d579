"""The environment variables of a rank: those that torchrun sets, and the memory for its state.

Source: ``LocalElasticAgent._start_workers`` and ``_set_local_rank_env`` of torch 2.13.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from phalanx.runtime import descriptors
from phalanx.supervision import SpecError

if TYPE_CHECKING:
    from collections.abc import Mapping

STATE_MEMORY = "PHALANX_STATE_MEMORY"
_PAGE = 4096  # bytes that a file has before it is used
_RANKS = 64  # of the table, for each page


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnvironment:
    """The values that the variables of all ranks and rounds of a run share.

    Attributes:
        given: The launcher's values of variables that phalanx sets for its workers otherwise; None
            for those that were not set.
        virtual: Whether each rank sees one GPU only, as device 0.
        state_memory: As from `make_state_memory`; empty for none.
    """

    world_size: int
    run_id: str
    role: str
    max_restarts: int
    given: Mapping[str, str | None]
    virtual: bool = False
    state_memory: str = ""

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
            **({STATE_MEMORY: f"{self.run_id} {self.state_memory}"} if self.state_memory else {}),
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


def make_state_memory(world_size: int) -> str:
    """Return the paths of two files of each rank, and of a table; this process holds them open."""
    names = [f"rank-{rank}.{each}" for rank in range(world_size) for each in "ab"]
    size = _PAGE * (1 + world_size // _RANKS)
    files = (descriptors.make_shared_file(f"phalanx-{name}", size) for name in (*names, "table"))
    return ":".join(path for path, _ in files)


def find_state_memory() -> tuple[tuple[tuple[str, str], ...], str] | None:
    """Return the two paths of each rank, and the table's; None in no rank of such a run.

    A rank of a launch within such a rank is none: its run has another id.
    """
    run_id, _, paths = os.environ.get(STATE_MEMORY, "").rpartition(" ")
    if not paths or run_id != os.environ.get("TORCHELASTIC_RUN_ID"):
        return None
    *slots, table = paths.split(":")
    return tuple(zip(slots[::2], slots[1::2], strict=True)), table
