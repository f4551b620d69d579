"""Trainer: the worker class of a training run; a step is a call, and any step can be done again.

- Before each step all random numbers are seeded from (seed, step, rank) and gradients are cleared.
- After a death all ranks continue from one state, which `agreement` chooses.
- A step that failed has no effect: it is begun again from the state before it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.nn.parallel import DistributedDataParallel

from phalanx.actors import WorkerActor, method

from .agreement import Claim, agree
from .buckets import check_hooks, fix_buckets, is_fixed
from .buffers import Paths, RankBuffers
from .errors import StateLost, TrainingError, WorldSizeChanged
from .packing import Packed, local_of, unpack
from .sampling import seed_step
from .untracked_state import Untouched, attributes_of, check_attributes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from phalanx.actors import WorkerContext

    from .agreement import Source
    from .state import State

dist: Any = torch.distributed  # its types are partly unknown
_CHUNK = 1 << 26  # bytes broadcast at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The settings that every rank of a run gets.

    Attributes:
        paths: Where the buffers are.
        every: Steps from one state in the buffers to the next.
        sharded: Whether each rank's state is its own.
        threads: Of torch on each rank; another number may sum in another order.
        timeout: Seconds for joining and for each collective operation; None takes torch's own.
    """

    paths: Paths
    seed: int
    every: int
    sharded: bool
    threads: int
    timeout: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """The ranks of an epoch go on from one state; sent by rank 0 through `WorkerContext.emit`.

    Attributes:
        step: The last step that is in it.
        redone: Steps that had been begun and are done again.
        source: ``"memory"`` of a survivor, ``"buffers"``, or ``"new"``.
        seconds: The time for joining and for exchanging the state.
        at: When it was done, in seconds of `time.monotonic`.
    """

    step: int
    redone: int
    source: str
    seconds: float
    epoch: int
    at: float


class Trainer(WorkerActor):
    """Subclass it: say what the state is, and what a step does.

    Define `build` and `train_step`; `join` where something must be made for each epoch, such as the
    DDP wrapper; `apply` where a step does not end with one step of each optimizer and scheduler.

    Attributes:
        state: What `build` returned.
        without_state: Names of attributes that look as if they had hidden state, or that a step
            changes in place, and on which no later step depends.
    """

    state: State
    without_state: Sequence[str] = ()
    _untouched: Untouched

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._buffers: RankBuffers | None = None
        self._failed = self._is_first = False

    # --- for users ------------------------------------------------------------------------

    def build(self, ctx: WorkerContext) -> State:
        """Return modules, optimizers and so on, new, on ``ctx.device``.

        Run in every new process, and again in survivors where the state is sharded. The process
        group has been joined, and torch is seeded alike on all ranks.
        """
        raise NotImplementedError

    def join(self, ctx: WorkerContext) -> None:
        """Run whenever an epoch has been joined and the state is whole: wrap the model here."""

    def train_step(self, step: int) -> Any:
        """Compute the gradients of *step* (1 for the first); return what the driver is to get.

        It must depend on the state, the seed, the step and the rank only, and return the same on
        every rank, or at least what is wanted from any. Any collective operation belongs here.
        """
        raise NotImplementedError

    def apply(self) -> None:
        """Change the state, without any collective operation: optimizers, then schedulers."""
        for optimizer in self.state.optimizers.values():
            optimizer.step()
        for other in self.state.others.values():
            if isinstance(other, torch.optim.lr_scheduler.LRScheduler):
                other.step()

    # --- for the driver -------------------------------------------------------------------

    @method(idempotent=True)
    def advance(self, step: int) -> Any:
        """Do the steps that are missing up to *step*; return the result of that one."""
        while self.state.step < step:
            self._run(self.state.step + 1)
        return self.state.result

    @method(idempotent=True)
    def position(self) -> int:
        """Return the last step that was done."""
        return self.state.step

    @method(idempotent=True)
    def digest(self) -> str:
        """Return the SHA-256 of this rank's state, in hex."""
        return self.state.digest()

    # --- inside ---------------------------------------------------------------------------

    def on_start(self, ctx: WorkerContext) -> None:
        """Join the first epoch of this process."""
        world = len(self.plan.paths.slots)
        if ctx.world_size != world:
            raise WorldSizeChanged(world, ctx.world_size)
        _make_deterministic(self.plan.threads)
        spread = not self.plan.sharded
        self._buffers = RankBuffers(self.plan.paths, ctx.rank, spread=spread)
        self._form(ctx, new=True)

    def on_reform(self, ctx: WorkerContext) -> None:
        """Join the next epoch as a survivor."""
        self._form(ctx, new=self.plan.sharded)

    def _form(self, ctx: WorkerContext, *, new: bool) -> None:
        """Join an epoch; the driver gets an error that every successor would raise again."""
        try:
            self._take_part(ctx, new=new)
        except TrainingError as error:
            ctx.emit(error)
            raise

    def _take_part(self, ctx: WorkerContext, *, new: bool) -> None:
        began = time.monotonic()
        limit: dict[str, Any] = {} if self.plan.timeout is None else {"timeout": self.plan.timeout}
        ctx.init_process_group(**limit)
        if new:
            seed_step(self.plan.seed, 0, 0)
            self.state = self.build(ctx)
            self.state.check_device(ctx.device)
            if not self.plan.sharded:
                self.state.check_replicated()
            whole = False
        else:
            whole = self.state.is_committed
            self.state.roll_back()
        self._failed, self._is_first = False, True
        source, redone = self._resume(ctx, whole=whole)
        self._wrap()
        dist.barrier()
        if ctx.rank == 0:
            now = time.monotonic()
            ctx.emit(
                Resumed(
                    step=source.step,
                    redone=redone,
                    source=source.kind,
                    seconds=now - began,
                    epoch=ctx.epoch,
                    at=now,
                )
            )

    def _resume(self, ctx: WorkerContext, *, whole: bool) -> tuple[Source, int]:
        """Have the state that all ranks go on from."""
        buffers = cast("RankBuffers", self._buffers)
        mine = Claim(self.state.step if whole else -1, buffers.steps())
        rows: list[Any] = [None] * ctx.world_size
        dist.all_gather_object(rows, (mine, buffers.begun, buffers.is_used))
        claims = [row[0] for row in rows]
        source = agree(claims, sharded=self.plan.sharded, used=any(row[2] for row in rows))
        begun = max(row[1] for row in rows)
        if source.kind == "buffers":
            self.state.load(buffers.read(source.step))
        elif not self.plan.sharded and any(each.step != source.step for each in claims):
            self._exchange(ctx, source, has_it=mine.step == source.step)
        buffers.agree(source.complete, source.step)
        if source.step > source.complete:
            buffers.write(source.step, Packed(self.state.tree()))
        return source, max(0, begun - source.step)

    def _exchange(self, ctx: WorkerContext, source: Source, *, has_it: bool) -> None:
        """Have the leader's state on every rank."""
        packed = Packed(self.state.tree()) if ctx.rank == source.leader else None
        note: list[Any] = [packed and (packed.meta, packed.size)]
        dist.broadcast_object_list(note, src=source.leader)
        meta, size = note[0]
        data = torch.empty(size, dtype=torch.uint8) if packed is None else packed.to_bytes()
        for begin in range(0, size, _CHUNK):
            piece = data[begin : begin + _CHUNK]
            sent = piece.to(ctx.device)
            dist.broadcast(sent, src=source.leader)
            if sent is not piece:
                piece.copy_(sent)
        if not has_it and packed is None:
            self.state.load(unpack(meta, data))

    def _run(self, step: int) -> None:
        state, buffers = self.state, cast("RankBuffers", self._buffers)
        if self._failed:
            if not state.is_committed:
                msg = (
                    f"step {step} failed after it had changed parameters; call restart() of the "
                    "executor, which continues from the last complete state"
                )
                raise StateLost(msg)
            state.roll_back()
            self._wrap()  # DDP cannot go on after a step that it has not ended
        self._failed = True
        buffers.begin(step)
        rank = self.ctx.rank
        seed_step(self.plan.seed, step, rank, state.generators.values())
        state.clear_gradients()
        result = self.train_step(step)
        if self._is_first:  # it makes attributes, too
            self._check_hidden()
            self._check_replicas(fix=False)
            self._is_first = False
        if not self.plan.sharded:
            self._share_buffers()
        self._await_collectives()
        self.apply()
        self._untouched.check()
        state.commit(step, result)
        self._failed = False
        if step % self.plan.every == 0:
            buffers.write(step, Packed(state.tree()))

    def _await_collectives(self) -> None:
        """Return when the operations of this step are done; raise if NCCL was aborted meanwhile.

        An aborted operation of NCCL leaves undefined gradients and no error.
        """
        if self.ctx.device.startswith("cuda"):
            torch.cuda.synchronize()
            if not dist.is_initialized():
                msg = "the process group was aborted during the step"
                raise RuntimeError(msg)

    def _share_buffers(self) -> None:
        """Have rank 0's batch statistics everywhere, as DDP would before the next step."""
        buffers = [local_of(each) for each in self.state.buffers()]
        buffers.sort(key=lambda each: -each.itemsize)  # so that each is aligned among the bytes
        if not buffers:
            return
        # As bytes: not every backend knows every type.
        flat = torch.cat([each.reshape(-1).view(torch.uint8) for each in buffers])
        dist.broadcast(flat, src=0)
        parts = torch.split(flat, [each.numel() * each.itemsize for each in buffers])
        for each, part in zip(buffers, parts, strict=True):
            each.copy_(part.view(each.dtype).view_as(each))

    def _check_hidden(self) -> None:
        state = self.state
        kinds = (state.modules, state.optimizers, state.generators, state.others)
        kept = (state, *(each for kind in kinds for each in kind.values()))
        self._untouched = check_attributes(self, kept, self.without_state, state.tensors())

    def _wrap(self) -> None:
        self.join(self.ctx)
        self.state.refresh()
        self._check_hidden()
        self._check_replicas(fix=True)

    def _check_replicas(self, *, fix: bool) -> None:
        for name, value in attributes_of(self):
            if isinstance(value, DistributedDataParallel):
                if self.plan.sharded:
                    msg = f"{name}: replicated state; build the run with sharded=False"
                    raise TrainingError(msg)
                check_hooks(name, value)
                if fix:
                    fix_buckets(value)
                elif not is_fixed(value):
                    raise TrainingError(f"{name}: wrapped in DDP by a step: wrap it in join()")


def _make_deterministic(threads: int) -> None:
    torch.set_num_threads(threads)
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(mode=True)
    deterministic: Any = torch.utils.deterministic
    deterministic.fill_uninitialized_memory = False  # it only costs time
