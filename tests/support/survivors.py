"""Workers that are kept when another rank dies."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

from tests.support.workers import Echo, go_wrong, wait_for

from phalanx.actors import AsyncOutput, WorkerContext
from phalanx.runtime import abort_process_groups


class Keeper(Echo):
    """Meets the others in a gloo group, holds something, and goes wrong where it is told."""

    def __init__(self, wrong: dict[int, str] | None = None) -> None:
        super().__init__()
        self.wrong = wrong or {}
        self.loads = 0
        self.reforms: list[int] = []

    def on_start(self, ctx: WorkerContext) -> None:
        self.loads += 1
        self.join(ctx)

    def on_reform(self, ctx: WorkerContext) -> None:
        import torch.distributed as dist

        assert not dist.is_initialized()
        self.reforms.append(ctx.epoch)
        if ctx.rank in self.wrong:
            go_wrong(self.wrong[ctx.rank], "cannot go on")
        else:
            self.join(ctx)

    def join(self, ctx: WorkerContext) -> None:
        ctx.init_process_group("gloo", timeout=60)

    def kept(self) -> tuple[int, list[int], int, int]:
        return self.loads, self.reforms, os.getpid(), self.ctx.epoch

    def total_later(self, mark: str, seconds: float) -> AsyncOutput:
        """Add up on the output thread; rank 1 does not come."""
        import torch
        import torch.distributed as dist

        class Output(AsyncOutput):
            def get_output(_self) -> float:
                Path(f"{mark}.{self.ctx.rank}").touch()
                if self.ctx.rank == 1:
                    threading.Event().wait()
                time.sleep(seconds)
                tensor = torch.full((1,), 100.0)
                dist.all_reduce(tensor)
                return float(tensor)

        return Output()

    def total(self) -> float:
        import torch
        import torch.distributed as dist

        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        return float(tensor)

    def reduce_for_ever(self, mark: str, absent: int | None = None) -> None:
        """Meet the others until one is gone, or never comes; say in a file that it has begun."""
        Path(f"{mark}.{self.ctx.rank}").touch()
        while self.ctx.rank != absent:
            self.total()
        time.sleep(600)

    def busy(self, gate: str) -> Any:
        wait_for(gate, 600)

    def meet_by_env(self) -> tuple[str | None, str | None]:
        return os.environ.get("MASTER_PORT"), os.environ.get("TORCHELASTIC_RESTART_COUNT")


class Sender(Keeper):
    """Rank 1 sends rank 0 more than it takes at once; the others wait for rank 0."""

    def reduce_for_ever(self, mark: str, absent: int | None = None) -> None:
        import torch
        import torch.distributed as dist

        tensor = torch.ones(1 << 26)  # 256 MiB
        Path(f"{mark}.{self.ctx.rank}").touch()
        while True:
            if self.ctx.rank == 1:
                dist.send(tensor, 0)
            else:
                dist.recv(tensor, 1 if self.ctx.rank == 0 else 0)


class Spinner(Keeper):
    """Rank 0 gets a message for an operation that is no more: gloo's thread tries without end.

    Another of its threads waits in an operation that this holds up.
    """

    def leave_message(self) -> None:
        import torch
        import torch.distributed as dist

        if self.ctx.rank == 1:
            dist.barrier()  # now the operation is no more
            self.sent = dist.isend(torch.ones(1), 0)
            return
        dist.irecv(torch.ones(1), 1)
        dist.barrier()
        self.work = cast("Any", dist.all_reduce(torch.ones(1), async_op=True))
        deadline = time.monotonic() + 60
        used = time.process_time()
        while time.process_time() - used < 0.1 and time.monotonic() < deadline:
            time.sleep(0.1)

    def abort(self) -> str:
        abort_process_groups()
        with contextlib.suppress(RuntimeError):
            self.work.wait(timedelta(seconds=30))
        return str(self.work.exception())


class Loner(Keeper):
    """The same without a process group: its start waits for nobody."""

    def join(self, ctx: WorkerContext) -> None:
        pass


class Holder(Keeper):
    """Refers to the process group in a way of its own, on every rank, when the group is left."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.held: list[Any] = []

    def join(self, ctx: WorkerContext) -> None:
        import torch
        import torch.distributed as dist

        super().join(ctx)
        match self.how:
            case "group":
                self.held.append(dist.group.WORLD)
            case "operation":
                work = cast("Any", dist.all_reduce(torch.ones(1), async_op=True))
                work.wait()
                self.held.append(work)
            case "thread":
                pair = dist.new_group([0, 1])
                if ctx.rank == 0:  # rank 1 never comes to this one
                    thread = threading.Thread(target=self.meet, args=(pair,), daemon=True)
                    thread.start()
                    self.held.append(thread)
            case _:
                pass

    def still_waits(self) -> bool:
        """Whether the thread that waited in the first epoch's group does so still."""
        self.held[0].join(10.0)
        return bool(self.held[0].is_alive())

    def meet(self, group: Any) -> None:
        import torch
        import torch.distributed as dist

        with contextlib.suppress(RuntimeError):
            dist.all_reduce(torch.ones(1), group=group)

    def reduce_for_ever(self, mark: str, absent: int | None = None) -> None:
        try:
            super().reduce_for_ever(mark, absent)
        except RuntimeError as error:
            if self.how == "error":
                self.held.append(error)
            raise
