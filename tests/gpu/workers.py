"""A worker that does things on a GPU. Imports torch where it is used: in worker processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from phalanx.actors import WorkerActor, WorkerContext


class OnGpu(WorkerActor):
    """Allocates, computes, and goes wrong where it is told."""

    def on_start(self, ctx: WorkerContext) -> None:
        import torch

        torch.cuda.set_device(ctx.device)
        torch.zeros(1, device=ctx.device)  # the context, so that all that follows is its own
        torch.cuda.synchronize()
        self.free_at_start = self.free()
        self.held: Any = None

    def free(self) -> int:
        """The bytes that are free on the device, as the driver sees them."""
        import torch

        return int(torch.cuda.mem_get_info()[0])

    def hold(self, size: int) -> None:
        import torch

        self.held = torch.ones(size, dtype=torch.uint8, device=self.ctx.device)
        torch.cuda.synchronize()

    def started_with(self) -> tuple[int, int]:
        return self.ctx.incarnation, self.free_at_start

    def sees(self) -> tuple[int, str, str]:
        """How many devices it sees, the first one's UUID, and the mask it was started with."""
        import torch

        uuid = str(torch.cuda.get_device_properties(0).uuid)
        return torch.cuda.device_count(), uuid, os.environ["CUDA_VISIBLE_DEVICES"]

    def pid(self) -> int:
        return os.getpid()

    def incarnation(self) -> int:
        return self.ctx.incarnation

    def where(self, value: Any) -> str:
        return str(value.device)

    def double(self, value: Any) -> Any:
        return value.to(self.ctx.device) * 2

    def linear(self) -> Any:
        import torch

        return torch.nn.Linear(3, 2).to(self.ctx.device)

    def chunks(self, number: int) -> Any:
        import torch

        for index in range(number):
            yield torch.full((1 << 16,), float(index), device=self.ctx.device)

    def assert_on_device(self) -> None:
        import torch

        values = torch.zeros(4, device=self.ctx.device)
        values[torch.tensor([1 << 20], device=self.ctx.device)].sum().item()

    def start_program(self, size: int) -> None:
        """Start a program that takes memory of the device."""
        code = f"import torch; held = torch.ones({size}, dtype=torch.uint8, device='cuda'); "
        code += "torch.cuda.synchronize(); print('ready', flush=True); input()"
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.program = subprocess.Popen([sys.executable, "-c", code], text=True, **pipes)
        assert self.program.stdout is not None
        assert self.program.stdout.readline() == "ready\n"

    def exhaust(self) -> None:
        import torch

        torch.empty(1 << 44, dtype=torch.uint8, device=self.ctx.device)

    def spin(self, cycles: int) -> None:
        import torch

        cuda: Any = torch.cuda
        cuda._sleep(cycles)
        torch.cuda.synchronize()


class InGroup(OnGpu):
    """The same, in an NCCL group of its epoch."""

    def on_start(self, ctx: WorkerContext) -> None:
        super().on_start(ctx)
        self.starts = 1
        ctx.init_process_group("nccl", timeout=60)

    def on_reform(self, ctx: WorkerContext) -> None:
        ctx.init_process_group("nccl", timeout=60)

    def total(self) -> float:
        return self.sum_in(None)

    def sum_in(self, group: Any) -> float:
        import torch
        import torch.distributed as dist

        value = torch.ones(1, device=self.ctx.device)
        dist.all_reduce(value, group=group)
        return float(value)


class InTwoGroups(InGroup):
    """The same, and in a second group."""

    def on_start(self, ctx: WorkerContext) -> None:
        super().on_start(ctx)
        self.meet()

    def on_reform(self, ctx: WorkerContext) -> None:
        super().on_reform(ctx)
        self.meet()

    def meet(self) -> None:
        import torch.distributed as dist

        self.part: Any = dist.new_group([0, 1])
        self.total()

    def total(self) -> float:
        return self.sum_in(None) + self.sum_in(self.part)

    def wait_in_group(self, *, part: bool, mark: str) -> float:
        """Make the file *mark*, and wait for the other rank, which does not come."""
        Path(mark).touch()
        return self.sum_in(self.part if part else None)


class Ready(OnGpu):
    """The same, with something prepared on the host where it was a spare."""

    def __init__(self) -> None:
        self.prepared: Any = None
        self.seen: int | None = None

    def on_standby(self) -> None:
        import torch

        self.prepared = torch.arange(8)
        self.seen = torch.cuda.device_count()

    def sums(self) -> tuple[int, int | None]:
        return int(self.prepared.to(self.ctx.device).sum()), self.seen
