"""Trainers with everything that could go wrong: batch statistics, dropout, a schedule, a clip.

A fault is (rank, step, moment): it strikes once, in whatever process has that rank by then.
"""

from __future__ import annotations

import os
import signal
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel.distributed import _MixedPrecision
from torch.utils.data import DataLoader

from phalanx.actors import WorkerContext
from phalanx.integrations.torch import (
    NoRoom,
    Plan,
    State,
    Trainer,
    TrainingError,
    replicate,
    sample_indices,
)
from phalanx.integrations.torch.packing import Packed

Fault = tuple[int, int, str]
SAMPLES = 200
BATCH = 4


class Replicated(Trainer):
    def __init__(self, plan: Plan, faults: Sequence[Fault] = (), marks: str = "") -> None:
        super().__init__(plan)
        self._faults = set(faults)
        self._marks = marks

    def build(self, ctx: WorkerContext) -> State:
        self.model = nn.Sequential(
            nn.Embedding(SAMPLES, 32),
            nn.Linear(32, 96),
            nn.BatchNorm1d(96),
            nn.Dropout(0.1),
            nn.GELU(),
            nn.Linear(96, SAMPLES),
        )
        self.shard(ctx)
        optimizer = torch.optim.AdamW(self.model.parameters(), 1e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
        return State(model=self.model, optimizer=optimizer, schedule=schedule)

    def shard(self, ctx: WorkerContext) -> None:
        pass

    def join(self, ctx: WorkerContext) -> None:
        self.strike("joining", ctx.epoch)
        self.scale = 1 + torch.rand(1).item()
        self.wrap()

    def wrap(self) -> None:
        self.net: Any = replicate(self.model, bucket_cap_mb=0.01)

    def train_step(self, step: int) -> list[list[float]]:
        self.strike("begin", step)
        self.strike("stopped", step, signal.SIGSTOP)
        rank, world = self.ctx.rank, self.ctx.world_size
        ids = sample_indices(
            self.plan.seed, step, rank, world_size=world, batch=BATCH, samples=SAMPLES
        )
        x = torch.tensor(ids)
        loss = self.scale * nn.functional.cross_entropy(self.net(x), (x * 7) % SAMPLES)
        torch.autograd.backward(loss)
        self.strike("backward", step)
        self.fail("raising", step)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        row = torch.tensor([loss.item(), *ids], dtype=torch.float64)
        rows = [torch.empty_like(row) for _ in range(world)]
        dist.all_gather(rows, row)
        return [each.tolist() for each in rows]

    def fail(self, moment: str, step: int) -> None:
        if self.is_due(moment, step):
            self.mark(moment, step).touch()
            msg = f"step {step} on rank {self.ctx.rank}"
            raise ValueError(msg)

    def apply(self) -> None:
        step = self.state.step + 1
        self.fail("raising late", step)
        super().apply()
        self.strike("applied", step)
        if self.is_due("writing", step):
            buffers: Any = self._buffers
            whole = buffers.write

            def write(step: int, packed: Packed) -> None:
                cast("Any", packed).copy_to = self.tear
                whole(step, packed)

            buffers.write = write

    def tear(self, target: torch.Tensor, *_: Any) -> None:
        """Stand in for `Packed.copy_to`: write half of it, and die."""
        target[: target.numel() // 2] = 0xEE
        self.strike("writing", self.state.step)

    def is_due(self, moment: str, step: int) -> bool:
        return (self.ctx.rank, step, moment) in self._faults and not self.mark(
            moment, step
        ).exists()

    def mark(self, moment: str, step: int) -> Path:
        return Path(self._marks, f"{self.ctx.rank}-{step}-{moment}")

    def strike(self, moment: str, step: int, number: int = signal.SIGKILL) -> None:
        if self.is_due(moment, step):
            self.mark(moment, step).touch(exist_ok=False)
            os.kill(os.getpid(), number)


MODELS: list[weakref.ref[nn.Module]] = []  # of this process


class Sharded(Replicated):
    def shard(self, ctx: WorkerContext) -> None:
        if any(each() is not None for each in MODELS):
            msg = "two models in memory"
            raise TrainingError(msg)
        MODELS.append(weakref.ref(self.model))
        fully_shard(self.model, mesh=init_device_mesh("cpu", (ctx.world_size,)))

    def wrap(self) -> None:
        self.net = self.model

    def train_step(self, step: int) -> Any:
        result = super().train_step(step)
        if step % 2:
            with torch.no_grad():  # no backward pass follows, after which FSDP2 would reshard
                self.net(torch.arange(BATCH))
        return result


class TensorParallel(Sharded):
    """Every rank has the same samples, and its columns or rows of two layers."""

    def shard(self, ctx: WorkerContext) -> None:
        del self.model[2:4]  # batch statistics and dropout, which want whole columns
        plan: Any = {"1": ColwiseParallel(), "3": RowwiseParallel()}
        parallelize_module(self.model, init_device_mesh("cpu", (ctx.world_size,)), plan)

    def train_step(self, step: int) -> Any:
        self.strike("begin", step)
        ids = sample_indices(self.plan.seed, step, 0, world_size=1, batch=BATCH, samples=SAMPLES)
        x = torch.tensor(ids)
        loss = nn.functional.cross_entropy(self.net(x), (x * 7) % SAMPLES)
        torch.autograd.backward(loss)
        self.strike("backward", step)
        return loss.item()


class Holding(Sharded):
    """Keeps its model in a second place, from the first step on."""

    held: Any = None

    def train_step(self, step: int) -> Any:
        self.held = self.held or self.model
        return super().train_step(step)


class Stepwise(Replicated):
    """Applies within `train_step`, as code does that was not written for this, and meets after."""

    def train_step(self, step: int) -> Any:
        result = super().train_step(step)
        super().apply()
        dist.barrier()
        return result

    def apply(self) -> None:
        pass


class Lazy(Replicated):
    """Draws samples from a loader that the first step makes."""

    def train_step(self, step: int) -> Any:
        data: Any = list(range(SAMPLES))
        self.batches = iter(DataLoader(data, shuffle=True))
        return super().train_step(step)


class Reshuffling(Replicated):
    """Counts epochs of two steps."""

    epoch = 0

    def train_step(self, step: int) -> Any:
        if step > 2 and step % 2:
            self.epoch += 1
        return super().train_step(step)


class Accumulating(Replicated):
    """Keeps the number of the micro-batch that it is at."""

    at: int | None = None

    def train_step(self, step: int) -> Any:
        results: list[Any] = []
        for self.at in range(3):
            results += super().train_step(step)
        return results


class Unfreezing(Replicated):
    """Has a layer that learns in some steps alone, and was wrapped with the others."""

    def wrap(self) -> None:
        self.net = replicate(self.model, bucket_cap_mb=0.01, find_unused_parameters=True)

    def train_step(self, step: int) -> Any:
        self.model[1].requires_grad_(step > 4)
        return super().train_step(step)


class Plateau(Replicated):
    """Leaves a schedule that wants a loss to the default `apply`."""

    apply = Trainer.apply

    def build(self, ctx: WorkerContext) -> State:
        state = super().build(ctx)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(state.optimizers["optimizer"])
        return State(model=self.model, plateau=plateau, **state.optimizers)


class Minimizing(Replicated):
    """Leaves an optimizer that wants a closure to the default `apply`."""

    apply = Trainer.apply

    def build(self, ctx: WorkerContext) -> State:
        super().build(ctx)
        return State(model=self.model, optimizer=torch.optim.LBFGS(self.model.parameters()))


class Replacing(Replicated):
    """Puts another parameter in place of one when the optimizer is there."""

    def wrap(self) -> None:
        part: Any = self.model[1]
        part.weight = nn.Parameter(part.weight.detach().clone())
        super().wrap()


class Dying(Replicated):
    """Dies in its first start."""

    def build(self, ctx: WorkerContext) -> State:
        mark = Path(self._marks) / f"built {ctx.rank}"
        if ctx.rank == 1 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().build(ctx)


class TwoInOne(torch.optim.SGD):
    """Has an optimizer with a state of its own in itself."""

    def __init__(self, parameters: Any) -> None:
        parameters = list(parameters)
        super().__init__(parameters, 1e-3)
        self.base = torch.optim.Adam(parameters, 1e-3)

    def step(self, closure: Any = None) -> Any:
        self.base.step()
        whole: Any = super()
        return whole.step(closure)


class Nesting(Replicated):
    """Gives one of two optimizers to `State`."""

    def build(self, ctx: WorkerContext) -> State:
        self.model = nn.Sequential(nn.Embedding(SAMPLES, 32), nn.Linear(32, SAMPLES))
        self.optimizer = TwoInOne(self.model.parameters())
        return State(model=self.model, optimizer=self.optimizer)


class Paired(Sharded):
    """Has DDP in a run whose ranks each keep a state of their own."""

    def shard(self, ctx: WorkerContext) -> None:
        pass

    def wrap(self) -> None:
        self.net = replicate(self.model, bucket_cap_mb=0.01)

    def train_step(self, step: int) -> Any:
        return Replicated.train_step(self, step)


class Broadcasting(Paired):
    """Has DDP that is sent the state of another rank when it is made."""

    def wrap(self) -> None:
        self.net = nn.parallel.DistributedDataParallel(self.model)


class Working(Replicated):
    """Works for a while in each step."""

    def train_step(self, step: int) -> Any:
        time.sleep(0.3)
        return super().train_step(step)


class Stateless(Replicated):
    """Builds no state."""

    def build(self, ctx: WorkerContext) -> Any:
        return super().build(ctx).modules


class Compressing(Replicated):
    """Has a module in a dict, with a hook that keeps what it has rounded away."""

    def join(self, ctx: WorkerContext) -> None:
        super().join(ctx)
        net = self.net
        net.register_comm_hook(powerSGD_hook.PowerSGDState(None), powerSGD_hook.powerSGD_hook)
        self.net = {"first": net}


class Mixing(Replicated):
    """Has a DDP that computes in another type."""

    def wrap(self) -> None:
        self.net = replicate(
            self.model, mixed_precision=_MixedPrecision(param_dtype=torch.bfloat16)
        )


class Evaluating(Replicated):
    """Is for a moment in another mode, and its results differ in size from rank to rank."""

    def train_step(self, step: int) -> Any:
        super().train_step(step)
        self.model.eval()
        self.model[0].requires_grad_(False)
        self.strike("evaluating", step)
        dist.barrier()
        self.model[0].requires_grad_(True)
        self.model.train()
        return torch.full((100 * (self.ctx.rank + 1),), float(step))


class Growing(Replicated):
    """Has a buffer that no new process has the size of."""

    def apply(self) -> None:
        super().apply()
        self.model.seen = torch.cat([cast("torch.Tensor", self.model.seen), torch.ones(1)])

    def shard(self, ctx: WorkerContext) -> None:
        self.model.register_buffer("seen", torch.zeros(0))


class FailingBackward(Replicated):
    """Raises in the backward pass of one step on every rank, once."""

    def train_step(self, step: int) -> Any:
        if not self.is_due("raising", step):
            return super().train_step(step)
        self.mark("raising", step).touch()

        def fail(*_: object) -> None:
            msg = "in the backward pass"
            raise ValueError(msg)

        handle = self.model[1].register_full_backward_hook(fail)
        try:
            return torch.autograd.backward(self.net(torch.arange(BATCH)).sum())
        finally:
            handle.remove()


class FailingShards(FailingBackward, Sharded):
    pass


class Unseen(Replicated):
    """Has DDP as it comes, where no search through attributes finds it."""

    @property
    def net(self) -> Any:
        return self.kept["net"]

    def wrap(self) -> None:
        net = nn.parallel.DistributedDataParallel(self.model, bucket_cap_mb=0.01)
        self.kept = MappingProxyType({"net": net})


class Hooked(Unseen):
    """Notes which parameters travel together, in the order in which their buckets do."""

    def wrap(self) -> None:
        super().wrap()
        places = {id(each): place for place, each in enumerate(self.model.parameters())}
        told = Path(self._marks, f"buckets-{self.ctx.rank}")

        def send(_: None, bucket: Any) -> Any:
            with told.open("a") as file:
                file.write(" ".join(str(places[id(each)]) for each in bucket.parameters()) + "\n")
            sending = cast("Any", dist).all_reduce(bucket.buffer(), async_op=True)
            return sending.get_future().then(lambda sent: sent.value()[0])

        send.__annotations__.clear()  # DDP wants none, or its own type, which is no text
        self.net.register_comm_hook(None, send)


class Full(Replicated):
    """Finds no room for its state once it has done four steps."""

    def apply(self) -> None:
        super().apply()
        if self.state.step == 3:
            cast("Any", self._buffers).write = self.refuse

    def refuse(self, *_: object) -> None:
        raise NoRoom("memory", 1, "none is left")


class Meeting(Replicated):
    """Meets the other ranks in `build`, which survivors do not run."""

    def shard(self, ctx: WorkerContext) -> None:
        dist.barrier()


class Remembering(Replicated):
    """Puts a buffer into its model when the state is there."""

    def wrap(self) -> None:
        self.model.register_buffer("seen", torch.zeros(1))
        super().wrap()


class Initializing(Replicated):
    """Changes a parameter in each process group."""

    def wrap(self) -> None:
        nn.init.zeros_(cast("Any", self.model[5]).bias)
        super().wrap()


class Rejoining(Replicated):
    """Tries its model out in each process group, and has steps change a mode for good."""

    def join(self, ctx: WorkerContext) -> None:
        super().join(ctx)
        self.model.train()
        self.model(torch.arange(BATCH))

    def train_step(self, step: int) -> Any:
        if step == 3:
            self.model[2].eval()
        return super().train_step(step)


class Calling(Replicated):
    """Has methods for between two steps."""

    def evaluate(self) -> None:
        self.model.eval()

    def tune(self) -> None:
        self.state.optimizers["optimizer"].param_groups[0]["lr"] = 1.0


def gate(x: torch.Tensor) -> torch.Tensor:
    return nn.functional.silu(nn.functional.gelu(x) * torch.sigmoid(x)).tanh()


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = cast("Any", torch.jit).script(gate)

    def forward(self, x: torch.Tensor) -> Any:
        return self.gate(x)


class Scripting(Replicated):
    """Has a part in TorchScript, which goes by what a process has seen."""

    def shard(self, ctx: WorkerContext) -> None:
        self.model[4] = Scripted()


class Centering(Replicated):
    """Has a buffer that its first step makes, and later ones change."""

    def shard(self, ctx: WorkerContext) -> None:
        self.model.register_buffer("center", None)

    def train_step(self, step: int) -> Any:
        seen = torch.full((1,), float(step))
        center = cast("Any", self.model).center
        self.model.center = seen if center is None else center + seen
        result = super().train_step(step)
        return [*result, [cast("Any", self.model).center.item()]]


class Renaming(Replicated):
    def wrap(self) -> None:
        wrapper: Any = checkpoint_wrapper
        self.model[1] = wrapper.checkpoint_wrapper(self.model[1])
        super().wrap()


class Scaling(Replicated):
    """Has a scaler that the default `apply` does not use."""

    def build(self, ctx: WorkerContext) -> State:
        super().build(ctx)
        return State(model=self.model, scaler=torch.amp.GradScaler("cpu"))

    apply = Trainer.apply


class Counting(Replicated):
    count = 1

    def train_step(self, step: int) -> Any:
        self.count += 1
        return super().train_step(step)


class Teaching(Replicated):
    """Averages into a module outside of its state."""

    def wrap(self) -> None:
        super().wrap()
        self.teacher = nn.Linear(1, 1)

    def train_step(self, step: int) -> Any:
        with torch.no_grad():
            self.teacher.weight.mul_(0.5)
        return super().train_step(step)


OPTIMIZERS: weakref.WeakKeyDictionary[nn.Module, torch.optim.Optimizer] = (
    weakref.WeakKeyDictionary()
)


class Outside(Replicated):
    """Has moments where no search through attributes finds them."""

    def apply(self) -> None:
        if self.model not in OPTIMIZERS:
            parameters = self.model.parameters()
            OPTIMIZERS[self.model] = torch.optim.SGD(parameters, 1e-3, momentum=0.9)
        OPTIMIZERS[self.model].step()


class Apart(Replicated):
    """Changes its state by a value that differs between ranks."""

    def apply(self) -> None:
        super().apply()
        self.state.optimizers["optimizer"].param_groups[0]["lr"] *= 1 + self.ctx.rank


class Drifting(Replicated):
    """Changes its state by a value that differs between ranks, some steps later."""

    def apply(self) -> None:
        super().apply()
        if self.state.step == 2:
            self.state.optimizers["optimizer"].param_groups[0]["lr"] *= 1 + self.ctx.rank


class Late(Replicated):
    """Wraps its model in DDP in the first step."""

    def join(self, ctx: WorkerContext) -> None:
        pass

    def train_step(self, step: int) -> Any:
        self.net = {"late": nn.parallel.DistributedDataParallel(self.model)}
        return step
