"""What survivors raise because another rank died is that death, and what they raise else is not."""

from __future__ import annotations

import atexit
import os
import queue
import sys
import time
from typing import Any

import pytest
from tests.support.options import Make
from tests.support.rank_faults import OFTEN, kill, wait_healed

from phalanx.actors import Emitted, Executor, WorkerActor, WorkerContext
from phalanx.runtime import Runtime
from phalanx.supervision import WorkerDied

LONG = 60.0
KILLS = 6


class Summing(WorkerActor):
    """Adds up over a process group, again and again."""

    def on_start(self, ctx: WorkerContext) -> None:
        ctx.init_process_group("gloo", timeout=60)

    def sum_for(self, seconds: float) -> float:
        import torch
        from torch import distributed

        tensor = torch.ones(100_000)
        end = torch.tensor([time.monotonic() + seconds])
        distributed.broadcast(end, 0)  # all go on until the same moment
        while True:
            left = torch.tensor([float(end) - time.monotonic()])
            distributed.broadcast(left, 0)
            if float(left) <= 0:
                return float(tensor[0])
            distributed.all_reduce(tensor)  # pyright: ignore[reportUnknownMemberType]  # torch's gap
            tensor /= self.ctx.world_size

    def pid_on_start_of_sum(self, seconds: float) -> float:
        self.ctx.emit(os.getpid())
        return self.sum_for(seconds)

    def raise_on(self, rank: int) -> int:
        if rank in (self.ctx.rank, -1):
            raise ValueError(f"rank {self.ctx.rank} does not like it")
        return self.ctx.rank

    def end_slowly_on(self, rank: int) -> None:
        if rank == self.ctx.rank:
            atexit.register(time.sleep, 0.9)
            sys.exit(3)
        self.end_on(-1)

    def end_on(self, rank: int) -> None:
        import torch
        from torch import distributed

        if rank == self.ctx.rank:
            os._exit(3)
        distributed.all_reduce(torch.ones(10))  # pyright: ignore[reportUnknownMemberType]  # torch's gap


@pytest.fixture
def group(make: Make, torch_runtime: Runtime) -> Executor[Any]:
    return make(Summing, 3, launch={"preload": ("torch",)}, runtime=torch_runtime, intensity=OFTEN)


def test_a_call_to_be_retried_is_retried_whatever_its_survivors_raise(group: Executor[Any]) -> None:
    begun: queue.SimpleQueue[Any] = queue.SimpleQueue()
    group.subscribe(lambda event: begun.put(event) if isinstance(event, Emitted) else None)
    for turn in range(KILLS):
        victim = turn % 3
        pid = group.ranks[victim].pid

        call = group.collective_rpc("pid_on_start_of_sum", LONG, (0.2,), retries=3, non_block=True)
        while begun.get(timeout=LONG).value != pid:
            pass
        kill(group, victim)

        assert call.result() == [1.0, 1.0, 1.0]
        # It may have been killed after the call; two deaths at once would be one restart.
        wait_healed(group, turn + 1)
        assert group.status().restarts == turn + 1


def test_a_call_not_to_be_retried_fails_with_the_death_not_with_its_echo(
    group: Executor[Any],
) -> None:
    """Also if it takes its time: its connections break long before it has ended."""
    for how, rank in (("end_on", 0), ("end_on", 1), ("end_on", 2), ("end_slowly_on", 1)):
        with pytest.raises(WorkerDied, match="exit code 3") as caught:
            group.collective_rpc(how, LONG, (rank,))

        assert [report.rank for report in caught.value.reports] == [rank]


def test_a_rank_that_raises_by_itself_fails_the_call_with_its_own_exception(
    group: Executor[Any],
) -> None:
    for rank in (1, -1):
        with pytest.raises(ValueError, match="does not like it"):
            group.collective_rpc("raise_on", LONG, (rank,), retries=3)

    assert group.status().restarts == 0
    assert group.collective_rpc("raise_on", LONG, (7,)) == [0, 1, 2]
