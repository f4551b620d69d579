"""`EngineWorker`: one of vLLM's workers, as a phalanx actor.

Guarantees: it is built as vLLM's own executor builds it, with the rendezvous of its epoch; a call
for another epoch raises `StaleEpoch`, so that a step for the worker before this one never runs
here; only the rank whose answer is wanted returns one.
"""

from __future__ import annotations

import os
import pickle
import time
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import cloudpickle

from phalanx.actors import AsyncOutput, WorkerActor, method
from phalanx.integrations.vllm import compat
from phalanx.integrations.vllm.recovery import NotRestored, StaleEpoch
from phalanx.supervision import GPU_WORKER, Directive, UnknownMethod

from .resumption import Resumption
from .shm_names import mark_names, marked_address, remove_names
from .zero_pages import ZeroPages

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from phalanx.actors import WorkerContext
    from phalanx.integrations.vllm.journal import Entry
    from phalanx.supervision import ExitReason

_FOREVER = float("inf")
_OF_ADAPTERS = frozenset(("add_lora", "pin_lora"))


class EngineWorker(WorkerActor):
    """One rank of an engine.

    Args:
        config: The pickled ``VllmConfig``.
        mark: Part of its names in ``/dev/shm``.
        cpus: The processors of each rank; empty if ranks are not bound.
    """

    def __init__(self, config: bytes, mark: str, cpus: Sequence[Sequence[int]] = ()) -> None:
        self._pickled = config
        self._mark = mark
        self._cpus = cpus
        self._config: Any = None
        self._worker: Any = None
        self._resumption: Resumption | None = None
        self._is_output = True
        self._is_prepared = False

    def on_standby(self) -> None:
        """Import what a rank needs."""
        self._unpickle()

    def on_start(self, ctx: WorkerContext) -> None:
        """Build vLLM's worker and load the weights."""
        began = time.monotonic()
        self._unpickle()
        _bind(self._cpus[ctx.rank] if self._cpus else ())
        remove_names(self._mark, ctx.epoch, before=True)
        mark_names(self._mark, ctx.epoch)
        config, place = self._config, ctx.rendezvous
        assert place is not None
        parallel = config.parallel_config
        if ctx.device.startswith("cuda"):
            # It sees the GPUs of its own engine, in their order.
            parallel.data_parallel_rank_local, parallel.assigned_physical_gpu_ids = 0, None
        _set_up_process(config, ctx.rank, _device_of(ctx))
        wrapper = compat.WorkerWrapperBase(rpc_rank=ctx.rank, global_rank=ctx.rank)
        arguments: list[dict[str, Any]] = [{} for _ in range(parallel.world_size)]
        arguments[ctx.rank] = {
            "vllm_config": config,
            "local_rank": _device_of(ctx),
            "rank": ctx.rank,
            # torch connects to the store there instead of starting one: the environment says so.
            "distributed_init_method": marked_address(
                place.address, place.port, self._mark, ctx.epoch
            ),
            "is_driver_worker": ctx.rank % parallel.tensor_parallel_size == 0,
            "shared_worker_lock": ctx.lock("vllm"),
        }
        wrapper.init_worker(arguments)
        built = time.monotonic()
        wrapper.init_device()
        met = time.monotonic()
        wrapper.load_model()
        _make_room_for_stages(wrapper.worker)
        compat.parallel_state.get_world_group().barrier()
        remove_names(self._mark, ctx.epoch)  # every rank has opened what they share
        compat.current_platform.update_block_size_for_backend(config)
        compat.envs.enable_envs_cache()
        self._worker = wrapper
        self._is_output = ctx.is_output
        runner = wrapper.worker.model_runner
        if not config.use_v2_model_runner:
            self._resumption = runner.requests = Resumption(runner)
        ctx.log.info(
            "phalanx.vllm_worker_started",
            built=built - began,
            met=met - built,
            loaded=time.monotonic() - met,
        )

    def on_stop(self, reason: ExitReason) -> None:
        """Shut vLLM's worker down, and the process groups it is in."""
        del reason
        if self._worker is None:
            return
        self._worker.shutdown()
        compat.distributed.destroy_model_parallel()
        compat.distributed.destroy_distributed_environment()

    def epoch(self) -> int:
        """Return the epoch of this worker's group."""
        return self.ctx.epoch

    @method(hang_after=_FOREVER)
    def prepare(self, epoch: int, entries: Sequence[Entry]) -> None:
        """Reach the state of the worker before: make the calls in *entries*."""
        self._check(epoch)
        if self._is_prepared:
            return
        try:
            self._replay(entries)
        except Exception as error:
            msg = f"replay of {', '.join(str(entry.method) for entry in entries)}: {error}"
            raise NotRestored(msg) from error
        if entries and epoch > 1:
            _reseed(self._config, epoch)
        self._is_prepared = True

    def _replay(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            if entry.method == "determine_available_memory":
                self._warm_up(entry)
                continue
            try:
                with ZeroPages() if entry.method == "initialize_from_config" else nullcontext():
                    self._run(entry.method, entry.args, entry.kwargs)
            except Exception as error:
                is_fatal = GPU_WORKER.directive(error) is Directive.RESTART
                if is_fatal or entry.method not in _OF_ADAPTERS:  # whose files are the user's
                    raise
                # vLLM loads it again for a request of it.
                self.ctx.log.warning("phalanx.vllm_adapter_lost", by=entry.method, error=str(error))

    @method(hang_after=_FOREVER)
    def rpc(
        self,
        epoch: int,
        method: str | bytes,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Call *method* of vLLM's worker, or a pickled callable with it."""
        self._check(epoch)
        value = self._run(method, args, kwargs)
        return value.get_output() if _is_async(value) else value

    def step(self, epoch: int, scheduled: Any) -> Any:
        """Run one step of the scheduler's, none of whose tokens is bound by a grammar."""
        self._check(epoch)
        value = self._execute(scheduled)
        return self._answer(self._worker.sample_tokens(None) if value is None else value)

    def execute_model(self, epoch: int, scheduled: Any) -> Any:
        """Begin one step of the scheduler's."""
        self._check(epoch)
        return self._answer(self._execute(scheduled))

    def sample_tokens(self, epoch: int, grammar: Any) -> Any:
        """End the step that `execute_model` began."""
        self._check(epoch)
        return self._answer(self._worker.sample_tokens(grammar))

    def take_draft_token_ids(self, epoch: int) -> Any:
        """Return the tokens that were drafted in the last step."""
        self._check(epoch)
        return self._worker.take_draft_token_ids()

    def _execute(self, scheduled: Any) -> Any:
        if self._resumption is not None:
            self._resumption.expect(scheduled)
        return self._worker.execute_model(scheduled)

    def _answer(self, value: Any) -> Any:
        if value is None or not self._is_output:
            return None
        device = getattr(self._worker.worker, "device", None)
        return _Later(value, device) if _is_async(value) else value

    def _check(self, epoch: int) -> None:
        if epoch != self.ctx.epoch:
            raise StaleEpoch(f"made for epoch {epoch}, this is {self.ctx.epoch}")

    def _run(self, method: str | bytes, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if isinstance(method, bytes):
            return partial(cloudpickle.loads(method), self._worker)(*args, **kwargs)
        try:
            call = getattr(self._worker, method)
        except AttributeError as error:
            raise UnknownMethod(str(error)) from error
        return call(*args, **kwargs)

    def _warm_up(self, entry: Entry) -> None:
        """Compile and profile as the first worker did, and keep to the memory that it found."""
        worker = self._worker.worker
        if hasattr(worker, "_should_warm_up_model"):  # the CPU's, which would measure again
            if worker._should_warm_up_model():  # noqa: SLF001  # as its own method does
                worker.model_runner.warming_up_model()
            return
        worker.cache_config.kv_cache_memory_bytes = entry.answers[self.ctx.rank]
        worker.determine_available_memory()

    def _unpickle(self) -> None:
        if self._config is None:
            self._config = pickle.loads(self._pickled)
            worker = self._config.parallel_config.worker_cls
            import_module(worker.rpartition(".")[0])


class _Later(AsyncOutput):
    """An output that is being copied from the device."""

    def __init__(self, output: Any, device: Any) -> None:
        self._output = output
        self._device = device

    def get_output(self) -> object:
        """Return it."""
        if self._device is not None and self._device.type != "cpu":
            # A thread begins on the first device, and would start a context there.
            compat.current_platform.set_device(self._device)
        return self._output.get_output()


def _is_async(value: Any) -> bool:
    return isinstance(value, compat.AsyncModelRunnerOutput)


def _device_of(ctx: WorkerContext) -> int:
    """Return vLLM's number of this rank's device."""
    _, _, number = ctx.device.partition(":")
    return int(number) if number else ctx.local_rank


def _set_up_process(config: Any, rank: int, local_rank: int) -> None:
    """Do what vLLM's own worker process does before it makes its worker."""
    if config.logging_config is not None:
        compat.configure_logging(config.logging_config)
    compat.set_worker_net_device(local_rank, config)
    compat.maybe_init_worker_tracer("vllm.worker", "worker", f"Worker_{rank}")
    if not compat.current_platform.is_cpu() and "OMP_NUM_THREADS" not in os.environ:
        threads = compat.startup_omp_num_threads(config.parallel_config.world_size)
        os.environ["OMP_NUM_THREADS"] = str(threads)  # for what loads OpenMP later
        import_module("torch").set_num_threads(threads)


def _bind(cpus: Sequence[int]) -> None:
    """Run on *cpus*, with a thread on each.

    Ranks spin while they wait for each other: as batch processes they do not preempt the driver,
    which is about to wake the next one.
    """
    if not cpus:
        return
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    os.sched_setaffinity(0, cpus)
    import_module("torch").set_num_threads(len(cpus))


def _make_room_for_stages(worker: Any) -> None:
    """Make the buffers of a later stage, which vLLM does only when it profiles a model."""
    state = compat.parallel_state
    runner = worker.model_runner
    if state.get_pp_group().is_first_rank or getattr(runner, "intermediate_tensors", 0) is not None:
        return
    runner.intermediate_tensors = runner.get_model().make_empty_intermediate_tensors(
        batch_size=runner.max_num_tokens, dtype=runner.dtype, device=runner.device
    )


def _reseed(config: Any, epoch: int) -> None:
    """Give requests without a seed other numbers than those the engine began with."""
    seed = (config.model_config.seed or 0) + epoch * 0x9E37_79B1
    compat.set_random_seed(seed % 2**31)
