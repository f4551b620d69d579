"""Trainer: the worker class of a training run; a step is a call, and any step can be done again.

- Before each step all random numbers are seeded from (seed, step, rank) and gradients are cleared.
- After a death all ranks continue from one state, which `agreement` chooses.
- A step that failed has no effect: it is begun again from the state before it.
"""

from __future__ import annotations

import gc
import os
import time
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from math import inf
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from phalanx.actors import WorkerActor, method

from .agreement import Claim, agree, difference, is_due
from .buckets import fix_buckets, hook_with_state, is_fixed, is_replica, note_replicas
from .buffers import Paths, RankBuffers
from .errors import HiddenState, NoRoom, StateLost, TrainingError, WorldSizeChanged
from .packing import unpack
from .sampling import seed_step
from .state import State
from .untracked_state import Untouched, attributes_of, check_attributes

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from torch.nn.parallel import DistributedDataParallel

    from phalanx.actors import WorkerContext

    from .agreement import Source

dist: Any = torch.distributed  # its types are partly unknown
_CHUNK = 1 << 26  # bytes broadcast at once
_WATCHED = 2  # steps after build in which hidden writes are looked for by value
_OWN = ("_failed", "_is_midway", "_steps_to_watch", "_done_in_epoch", "_made", "_new_replicas")


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
            changes, and on which no later step depends: ``("losses", "sampler.drawn")``.
    """

    state: State
    without_state: Sequence[str] = ()
    _untouched: Untouched

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._buffers: RankBuffers | None = None
        self._failed = self._is_midway = False
        self._steps_to_watch = self._done_in_epoch = 0
        self._made: set[str] = set()  # attributes that build, join and steps have made
        self._new_replicas: list[DistributedDataParallel] = []  # made since they were looked at
        self._optimizers_used: WeakKeyDictionary[Optimizer, float] = WeakKeyDictionary()

    # --- for users ------------------------------------------------------------------------

    def build(self, ctx: WorkerContext) -> State:
        """Return modules, optimizers and so on, new, on ``ctx.device``.

        Run in every new process, where survivors do not run it: a collective operation is possible
        only if the state is sharded. Then survivors run it again, and the process group has been
        joined; what `build`, `join` and steps have made before is gone. Torch is seeded alike on
        all ranks.
        """
        raise NotImplementedError

    def join(self, ctx: WorkerContext) -> None:
        """Run whenever an epoch has been joined and the state is whole: wrap the model here.

        It runs again after each death, at whatever step: no step may depend on what it takes from
        parameters or ``state.step``. Modes, batch statistics and the like are those of the state
        again after it, but for the first step. Torch is seeded alike on all ranks.
        """

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
            if isinstance(other, LRScheduler):
                other.step()

    # --- for the driver -------------------------------------------------------------------

    @method(idempotent=True)
    def advance(self, step: int) -> Any:
        """Do the steps that are missing up to *step*; return the result of that one."""
        while self.state.step < step:
            self.ctx.report_progress()  # each has the limit of a call
            self._run(self.state.step + 1)
        return self.state.result

    @method(idempotent=True)
    def position(self) -> int:
        """Return the last step that was done."""
        return self.state.step

    @method(idempotent=True)
    def call_at(self, step: int, name: str, args: tuple[Any, ...]) -> Any:
        """Do the steps that are missing up to *step*; return what the method *name* returns."""
        self.advance(step)
        with self.state.unchanged(name):
            return getattr(self, name)(*args)

    @method(idempotent=True)
    def digest(self) -> str:
        """Return the SHA-256 of this rank's state, in hex."""
        return self.state.digest()

    # --- inside ---------------------------------------------------------------------------

    def on_start(self, ctx: WorkerContext) -> None:
        """Join the first epoch of this process."""
        _make_deterministic(self.plan.threads)
        note_replicas(self._new_replicas)
        register_optimizer_step_pre_hook(self._check_optimizer)
        self._form(ctx, new=True)

    def on_reform(self, ctx: WorkerContext) -> None:
        """Join the next epoch as a survivor."""
        self._form(ctx, new=self.plan.sharded)

    def _form(self, ctx: WorkerContext, *, new: bool) -> None:
        """Join an epoch; the driver gets an error that every successor would raise again."""
        try:
            with self._noting_attributes():
                self._take_part(ctx, new=new)
        except TrainingError as error:
            ctx.emit(error)
            raise

    def _take_part(self, ctx: WorkerContext, *, new: bool) -> None:
        began = time.monotonic()
        sharded, world = self.plan.sharded, len(self.plan.paths.slots)
        if ctx.world_size != world:
            raise WorldSizeChanged(world, ctx.world_size)
        if self._buffers is None:
            self._buffers = RankBuffers(self.plan.paths, ctx.rank, spread=not sharded)
        limit: dict[str, Any] = {} if self.plan.timeout is None else {"timeout": self.plan.timeout}
        self._new_replicas.clear()
        self._is_midway = (self._is_midway or self._failed) and not new
        self._failed, self._done_in_epoch = False, 0
        if sharded:
            ctx.init_process_group(**limit)
        whole = False
        if new:
            self._build_state(ctx)
        else:
            whole = self.state.is_committed
            self.state.roll_back()
        if not sharded:  # so that a collective operation in build fails at once, and not at a death
            ctx.init_process_group(**limit)
        source, redone = self._resume(ctx, whole=whole)
        self._wrap()
        if self._is_midway:  # the values are what an interrupted step has left
            self._untouched.forget_values()
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

    def _build_state(self, ctx: WorkerContext) -> None:
        if self._made:  # or there would be two models in memory
            for name in self._made & vars(self).keys():
                delattr(self, name)
            gc.collect()
        if ctx.device.startswith("cuda"):
            torch.cuda.set_device(ctx.device)
            # The first random operation on a DTensor is a collective one: in survivors as well.
            cast("Any", import_module("torch.distributed.tensor._random"))._rng_tracker = None  # noqa: SLF001
        seed_step(self.plan.seed, 0, 0)
        built = cast("Any", self.build(ctx))
        if not isinstance(built, State):
            raise TrainingError(f"build() returned {type(built).__name__}: return a State(...)")
        self.state, self._steps_to_watch = built, _WATCHED
        self.state.check_device(ctx.device)
        if not self.plan.sharded:
            self.state.check_replicated()
        if type(self).apply is Trainer.apply and "apply" not in vars(self):
            for each in (*self.state.optimizers.values(), *self.state.others.values()):
                if remedy := _apply_for(each):
                    raise TrainingError(f"a {type(each).__qualname__} needs {remedy}")

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
            try:
                buffers.write(source.step, self.state.packed())
            except NoRoom:  # the next write tells it
                if source.kind == "new":
                    raise
        return source, max(0, begun - source.step)

    def _exchange(self, ctx: WorkerContext, source: Source, *, has_it: bool) -> None:
        """Have the leader's state on every rank."""
        packed = self.state.packed() if ctx.rank == source.leader else None
        note: list[Any] = [packed and (packed.meta, packed.size)]
        dist.broadcast_object_list(note, src=source.leader)
        meta, size = note[0]
        data = packed.to_bytes() if packed else torch.empty(size, dtype=torch.uint8, device="cpu")
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
            msg = f"step {step} has failed; call restart() of the executor before it is done again"
            raise StateLost(msg)
        self._failed = True
        buffers.begin(step)
        if is_due(self._done_in_epoch) and not self.plan.sharded:
            self._check_equal()
        seed_step(self.plan.seed, step, self.ctx.rank, state.generators.values())
        state.clear_gradients()
        state.begin(watch=self._steps_to_watch > 0 and not self.plan.sharded)
        with self._noting_attributes():
            result = self.train_step(step)
            self._check_replicas()
            if not self.plan.sharded:
                state.share_buffers()
            self._await_collectives()
            state.touch()
            self.apply()
        self._untouched.check()
        if self._done_in_epoch == 0 or is_due(step):
            before = self._untouched
            self._check_hidden()
            self._untouched.check_since(before)
        self._steps_to_watch = max(0, self._steps_to_watch - 1)
        state.commit(step, result)
        self._failed = self._is_midway = False
        self._done_in_epoch += 1
        if step % self.plan.every == 0:
            buffers.write(step, state.packed())

    @contextmanager
    def _noting_attributes(self) -> Generator[None]:
        """Note the attributes that appear meanwhile: they may refer to this model."""
        before = {*vars(self)}
        try:
            yield
        finally:
            self._made |= vars(self).keys() - before

    def _await_collectives(self) -> None:
        """Return when the operations of this step are done; raise if NCCL was aborted meanwhile.

        An aborted operation of NCCL leaves undefined gradients and no error.
        """
        if self.ctx.device.startswith("cuda"):
            torch.cuda.synchronize()
            if not dist.is_initialized():
                msg = "the process group was aborted during the step"
                raise RuntimeError(msg)

    def _wrap(self) -> None:
        state = self.state
        before, had, values = state.names(), state.trained(), state.values()
        seed_step(self.plan.seed, 0, 0, state.generators.values())
        with state.as_built():
            self.join(self.ctx)
        has = state.refresh()
        if replaced := [name for name, each in had.items() if has.get(name, each) is not each]:
            msg = f"join() replaces {replaced[0]}, which an optimizer has: do it in build()"
            raise TrainingError(msg)
        if other := {*before} ^ {*state.names()}:
            msg = f"join() adds or renames {min(other)}, when the state is there: do it in build()"
            raise TrainingError(msg)
        if changed := dict(values.items() - state.values().items()):
            raise TrainingError(f"join() changes {min(changed)}: do it in build()")
        self._check_hidden()
        for wrapped in self._new_replicas:
            if self.plan.sharded and not is_replica(wrapped):
                name = self._name_of(wrapped)
                raise TrainingError(f"{name}: make it by replicate(...), which sends no state")
            if kind := hook_with_state(wrapped):
                name, remedy = (
                    f"a hook of {self._name_of(wrapped)}",
                    "register one without, or none, nor mixed_precision: use torch.autocast",
                )
                raise HiddenState(name, kind, remedy)
            fix_buckets(wrapped)  # the ranks meet in it, in the order in which they were made
        self._new_replicas.clear()

    def _check_replicas(self) -> None:
        for wrapped in self._new_replicas:
            if not is_fixed(wrapped):
                msg = f"{self._name_of(wrapped)}: wrapped in DDP by a step: wrap it in join()"
                raise TrainingError(msg)
        self._new_replicas.clear()

    def _name_of(self, wanted: object) -> str:
        found = (name for name, value in attributes_of(self, (), _OWN) if value is wanted)
        return next(found, type(wanted).__name__)

    def _check_hidden(self) -> None:
        allowed = (*self.without_state, *_OWN)
        self._untouched = check_attributes(self, self._kept(), allowed, self.state.tensors())

    def _kept(self) -> tuple[object, ...]:
        state = self.state
        kinds = (state.modules, state.optimizers, state.generators, state.others)
        return (state, *(each for kind in kinds for each in kind.values()))

    def _check_optimizer(self, optimizer: Optimizer, *_: object) -> None:
        """Refuse, before its second step, an optimizer that is nowhere to be found."""
        if torch.compiler.is_compiling() or not self._failed:  # no step is under way
            return
        state = self.state
        is_later = self._optimizers_used.setdefault(optimizer, state.step) < state.step
        kept = state.optimizers.values()
        if not (is_later and optimizer.state) or any(optimizer.state is o.state for o in kept):
            return
        holders = (each for each in state.others.values() if not isinstance(each, LRScheduler))
        # What the trainer has was looked at, or is allowed; not what an optimizer in `State` has.
        looked_at = [attributes_of(self, self._kept()), *map(attributes_of, holders)]
        if any(value is optimizer for found in looked_at for _, value in found):
            self._optimizers_used[optimizer] = inf
            return
        kind, remedy = type(optimizer).__qualname__, "give it to State(...)"
        raise HiddenState("the optimizer that a step uses", kind, remedy)

    def _check_equal(self) -> None:
        """End the run if the ranks, which have had one state, have changed it differently."""
        rows: list[dict[str, int]] = [{} for _ in range(self.ctx.world_size)]
        dist.all_gather_object(rows, self.state.checksums())
        if odd := difference(rows):
            error = TrainingError(f"{odd}: change it alike on all ranks, or give sharded=True")
            self.ctx.emit(error)
            raise error


def _apply_for(value: object) -> str:
    """Return what takes the place of the default `apply` for an object in `State`, if it must."""
    kind: Any = type(value)
    match value:
        case torch.amp.GradScaler() if value.is_enabled():
            return "an apply() with scaler.step(optimizer) and scaler.update()"
        case ReduceLROnPlateau() if kind.step is cast("Any", ReduceLROnPlateau).step:
            return "an apply() with its step(loss), the same loss on all ranks"
        case torch.optim.LBFGS() if kind.step is cast("Any", torch.optim.LBFGS).step:
            return "a train_step with its step(closure), and an empty apply()"
        case _:
            return ""


def _make_deterministic(threads: int) -> None:
    torch.set_num_threads(threads)
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(mode=True)
    deterministic: Any = torch.utils.deterministic
    deterministic.fill_uninitialized_memory = False  # it only costs time
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or each product on a GPU raises
    # TorchScript would compute otherwise after the first call in a process.
    cast("Any", torch)._C._set_graph_executor_optimize(False)  # noqa: SLF001  # no other name
    # What torch.compile makes of a shape is not to depend on those before it.
    dynamo: Any = import_module("torch._dynamo.config")  # an optimizer imports it anyway
    dynamo.automatic_dynamic_shapes, dynamo.fail_on_recompile_limit_hit = False, True
