"""MemoryCheckpoint: a script's state, in memory of the ``phalanx torchrun`` that restarts it."""

from __future__ import annotations

import os
from typing import Any, ClassVar

import torch

from phalanx.integrations.torchrun.environment import find_state_memory
from phalanx.supervision import SpecError, check_kind

from .agreement import Claim, agree, difference, is_due
from .buffers import Paths, RankBuffers
from .errors import TrainingError, WorldSizeChanged
from .state import State

dist: Any = torch.distributed  # its types are partly unknown


class MemoryCheckpoint:
    """The newest state that all ranks of a script have saved, for the next round of the run.

    Under ``phalanx torchrun`` it is in memory that the launcher holds, two buffers for each rank,
    of which one is whole at any time. Elsewhere, as under torchrun, nothing is kept: `load` returns
    0 and `save` does nothing. ``examples/torchrun_script.py`` has a checkpoint on a disk, which is
    needed beside it where a run is to outlive its launcher.

    Only what is in *state* is kept, generators of torch as they are. The result does not depend on
    restarts if samples and other random numbers are functions of the step (`sample_indices`,
    `seed_step`), and DDP has `fix_buckets`.

    Args:
        state: All that a step changes; modules without their wrapper. One of each process.
        sharded: Whether each rank's state is its own, as with FSDP2. Else all ranks have the same
            state, and each writes a part of it.

    Raises:
        TrainingError: the ranks' states cannot be equal, and *sharded* is False; or this process
            has had one.
        WorldSizeChanged: the script has started ranks itself.
    """

    _is_made: ClassVar[bool] = False  # in this process: another one would use the same memory

    def __init__(self, state: State, *, sharded: bool = False) -> None:
        check_kind("state", state, State)
        check_kind("sharded", sharded, bool)
        if not sharded:
            state.check_replicated()
        self._state = state
        self._sharded = sharded
        self._buffers: RankBuffers | None = None
        self._last = -1  # step; -1 before `load`
        self._saves = 0  # of this process
        self._world = 1
        if (found := find_state_memory()) is not None:
            if MemoryCheckpoint._is_made:
                raise TrainingError("this process has a MemoryCheckpoint: give it all in one State")
            paths = Paths(*found, where="memory")
            self._world = len(paths.slots)
            if (ranks := int(os.environ["WORLD_SIZE"])) != self._world:
                raise WorldSizeChanged(self._world, ranks)
            self._buffers = RankBuffers(paths, int(os.environ["RANK"]), spread=not sharded)
            MemoryCheckpoint._is_made = True

    def load(self) -> int:
        """Give *state* the newest values that all ranks have saved; return their step, 0 for none.

        Call it on all ranks, once, after ``init_process_group`` and before the first `save`.

        Raises:
            StateLost: there have been such values, and they are damaged.
            ShapeChanged: they are those of other modules or optimizers.
            WorldSizeChanged: the process group has not all ranks of the run.
            TrainingError: there is no process group, and several ranks.
        """
        self._last = 0
        if (buffers := self._buffers) is None:
            return 0
        rows = self._gather((Claim(-1, buffers.steps()), buffers.is_used))
        claims, used = [row[0] for row in rows], any(row[1] for row in rows)
        source = agree(claims, sharded=self._sharded, used=used)
        if source.kind == "buffers":
            self._state.load(buffers.read(source.step))
            for name, drawn in self._state.result.items():
                self._state.generators[name].set_state(drawn)
        buffers.agree(source.complete, source.step)
        self._gather(None)  # the buffers of all are read: they may be written
        self._last = source.step
        return source.step

    def save(self, step: int) -> None:
        """Keep *state* as that of *step*, 1 or more and above the last; as every rank does.

        It counts once all ranks have written it. Unless the state is sharded, it gives all ranks
        the batch statistics of rank 0, as DDP does before the next step.

        Raises:
            TrainingError: the ranks' states are not equal, which calls 1, 2, 4, 8 and so on find.
            NoRoom: there is no memory for it; what was kept before is still there.
            StateLost: another rank has not written the state of the last step in a minute.
        """
        check_kind("step", step, int)
        if self._last < 0:
            raise TrainingError("call load() before the first save()")
        if step <= self._last:
            raise SpecError("step", step, f"give one above {self._last}, the last")
        self._last = step
        if (buffers := self._buffers) is None:
            return
        self._saves += 1
        if not self._sharded and self._world > 1:
            self._state.share_buffers()
            if is_due(self._saves) and (odd := difference(self._gather(self._state.checksums()))):
                raise TrainingError(f"{odd}: change it alike on all ranks, or give sharded=True")
        drawn = {name: each.get_state() for name, each in self._state.generators.items()}
        self._state.commit(step, drawn)
        buffers.write(step, self._state.packed())

    def _gather(self, value: object) -> list[Any]:
        if dist.is_initialized() and dist.get_world_size() != self._world:
            raise WorldSizeChanged(self._world, dist.get_world_size())
        if self._world == 1:
            return [value]
        if not dist.is_initialized():
            raise TrainingError("call torch.distributed.init_process_group() before load()")
        rows: list[Any] = [None] * self._world
        dist.all_gather_object(rows, value)
        return rows
