"""`SupervisedExecutor`: vLLM's workers as a supervised rank group.

Guarantees: a step that was sent to workers that died ends as a `LostStep`, never as an error and
never twice; no step that was scheduled for one epoch of the workers runs in another; a new epoch is
brought to where the old one was (`journal`) before it is given anything; vLLM's own calls are made
again after a death, the user's are not. When the group has ended for good, every call fails with
the story of its last death, and the engine ends as it does without this plug-in.

Left to others: what becomes of requests (`healing`), which is mixed into the engine's scheduler
here, because the executor is made first and from the same configuration.

The engine core has one thread that schedules and takes outputs. What it believes about its workers
is kept as `_believed`: the epoch for which it schedules. It stops believing when it is handed the
first `LostStep` of that epoch, whereupon its scheduler begins every request again; and the next
step it sends belongs to the epoch that is there then.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, Any

import cloudpickle
from vllm.logger import init_logger
from vllm.v1.executor.abstract import Executor as VllmExecutor

from phalanx.actors import Executor, Layout, StopPolicy
from phalanx.runtime import GroupUp
from phalanx.supervision import ExecutorClosed, SpecError, WorkerDied

from .bell import FailureBell
from .early import EarlyHealing
from .healing import healed
from .journal import REPEATABLE, Journal
from .lost import StepFuture, lost_step
from .names import new_mark, remove_names
from .policy import Policy
from .processors import choose_processors
from .requirements import check_config, check_installed
from .story import EngineEnded, forget_story, tell_story
from .worker import EngineWorker, StaleEpoch

if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx.supervision import ExitReason

check_installed()

_TELLING = 5.0  # seconds for the reason of the end to arrive; it takes none
_LEAVING = 10.0  # seconds for threads that heal to hear that there is nothing left to be healed
_HEALTH = 10.0  # seconds, as the executor that this stands in for has it
_PRELOAD = (
    "torch",
    "phalanx.integrations.vllm.worker",
    "phalanx.integrations.vllm.warmth",
)
_FORGOTTEN = (
    "phalanx.vllm_calls_forgotten methods=%s: what these changed in the workers that died is lost; "
    "if any changed what a worker computes, name it in the policy's replay"
)
_logger = init_logger("vllm.phalanx")


class SupervisedExecutor(VllmExecutor):  # type: ignore[misc]  # vLLM need not be installed
    """Runs vLLM's workers as phalanx worker actors; give it as ``distributed_executor_backend``."""

    uses_ray = False
    supports_pp = True

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        """Whether steps may be scheduled before the outputs of earlier ones are there."""
        return True

    def _init_executor(self) -> None:
        config = self.vllm_config
        check_config(config)
        forget_story()
        policy = Policy.of_config(config.additional_config)
        parallel = config.parallel_config
        policy.check_size(parallel.world_size)
        for_workers = cloudpickle.dumps(config)  # before it names a class that they have no use for
        _mix_in_healing(config)
        self._journal = Journal(policy.replay)
        self._mark = new_mark()
        self._bell = FailureBell()
        self._early = EarlyHealing(self._heal_early)
        self._ended: ExitReason | None = None
        self._has_ended = threading.Event()
        self._closed = False
        self._healing = threading.RLock()
        self._prepared = 0
        self._believed = 0
        self._step_epoch = 0
        self._first_half: Any = None
        self._held: Any = None
        self._samples = (
            config.model_config.runner_type != "pooling" and not config.is_mm_encoder_only
        )
        layout = Layout(
            tensor=parallel.tensor_parallel_size,
            pipeline=parallel.pipeline_parallel_size,
            prefill_context=parallel.prefill_context_parallel_size,
        )
        self._output_rank = layout.output_rank
        chosen = choose_processors(config)
        self._group = Executor(
            EngineWorker,
            args=(
                for_workers,
                self._mark,
                chosen.numbers,
            ),
            layout=layout,
            name=f"vllm-{self._mark}",
            strategy=policy.strategy,
            intensity=policy.intensity,
            backoff=policy.backoff,
            devices=_devices(parallel.world_size),
            visibility="all",
            preload=(*_PRELOAD, *_modules_of(config), *policy.preload),
            launch=policy.launch,
            rank_env=chosen.environments,
            start_timeout=policy.start_timeout,
            # A survivor waits in a collective operation for the one that is gone; it hears nothing.
            stop=StopPolicy(hurry=0.0),
            async_output=bool(config.scheduler_config.async_scheduling),
            report_dir=policy.report_dir,
            hang_after=policy.hang_after or _step_limit(),
            stopped_after=policy.stopped_after,
            standby=policy.standby,
        )
        self._group.register_failure_callback(self._on_end)
        self._believed = self._prepared = self._ask_epoch()
        self._unsubscribe = self._group.events(self._on_event)

    # --- steps --------------------------------------------------------------------------

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        """Have the workers compute a step."""
        if not self._believed:
            self._believed = self._heal()
        self._step_epoch = self._believed
        self._first_half = self._held = None
        if not (non_block and self._samples and scheduler_output.total_num_scheduled_tokens):
            return self._step("execute_model", scheduler_output, non_block=non_block)
        # The engine core asks for a sample next, at once where there is no grammar to be looked up.
        if scheduler_output.has_structured_output_requests:
            self._step("execute_model", scheduler_output, non_block=True)
        else:
            self._held = scheduler_output
        return StepFuture(lambda: None, lambda: True)

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        """End the step that was begun by `execute_model`."""
        held, self._held = self._held, None
        if held is None:
            return self._step("sample_tokens", grammar_output, non_block=non_block)
        return self._step("step", held, non_block=non_block)

    def take_draft_token_ids(self) -> Any:
        """Return the tokens that were drafted in the last step; None where they died with it."""
        try:
            return self._send("rpc", self._step_epoch, "take_draft_token_ids", (), {}).result()
        except (WorkerDied, StaleEpoch):
            return None

    def _step(self, method: str, argument: Any, *, non_block: bool) -> Any:
        epoch = self._step_epoch
        if epoch != self._believed:  # its first half is lost already
            value = lost_step(epoch)
            return StepFuture(lambda: value, lambda: True) if non_block else value
        # The engine core looks at the first half of a step only where it has no second one: what
        # that half raised or returned is the outcome of the second.
        before = self._first_half
        if before is None and not non_block:
            return self._output(partial(self._ask, method, epoch, argument), epoch)
        self._first_half = future = self._send(method, epoch, argument)
        get = future.result if before is None else partial(_outcome, before, future)
        if non_block:
            return StepFuture(partial(self._output, get, epoch), future.done)
        return self._output(get, epoch)

    def _ask(self, method: str, epoch: int, argument: Any) -> Any:
        return self._group.collective_rpc(
            method, args=(epoch, argument), unique_reply_rank=self._output_rank
        )

    def _send(self, method: str, epoch: int, *args: Any) -> Any:
        try:
            return self._group.collective_rpc(
                method, args=(epoch, *args), non_block=True, unique_reply_rank=self._output_rank
            )
        except ExecutorClosed as error:
            raise self._story() from error

    def _output(self, get: Callable[[], Any], epoch: int) -> Any:
        try:
            return get()
        except (WorkerDied, StaleEpoch) as error:
            _logger.warning("phalanx.vllm_step_lost epoch=%d by=%s", epoch, type(error).__name__)
            if self._believed == epoch:
                self._believed = 0
            return lost_step(epoch)
        except ExecutorClosed as error:
            raise self._story() from error

    # --- other calls --------------------------------------------------------------------

    def collective_rpc(
        self,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
        unique_reply_rank: int | None = None,
    ) -> Any:
        """Call *method* of vLLM's worker on every rank, or a callable with the worker.

        A death makes calls of vLLM's own be made again, once the workers are back; another one
        raises `WorkerDied`, with the crash report, for it may have had its effect.
        """
        name = method if isinstance(method, str) else cloudpickle.dumps(method)
        named = dict(kwargs or {})
        if non_block:
            epoch = self._heal()
            return self._rpc(epoch, name, timeout, args, named, unique_reply_rank, non_block=True)
        while True:
            with self._healing:
                epoch = self._heal()
                try:
                    answers = self._rpc(epoch, name, timeout, args, named, unique_reply_rank)
                    self._journal.note(name, args, named, _listed(answers))
                except StaleEpoch:
                    continue  # nothing of it ran
                except WorkerDied:
                    if isinstance(method, str) and method in REPEATABLE:
                        continue
                    raise
                except ExecutorClosed as error:
                    raise self._story() from error
                return answers

    def execute_dummy_batch(self) -> None:
        """Have the workers compute a step that nobody asked for."""
        self.collective_rpc("execute_dummy_batch", unique_reply_rank=self._output_rank)

    def check_health(self) -> None:
        """Return once every worker has answered; a group that heals is waited for."""
        if self.is_failed:
            raise self._story()
        self.collective_rpc("check_health", timeout=_HEALTH)

    def register_failure_callback(self, callback: Callable[[], None]) -> None:
        """Run *callback* once the workers have ended for good; at once where they have."""
        self._bell.name(callback)

    @property
    def is_failed(self) -> bool:
        """Whether the workers have ended for good other than by `shutdown`."""
        return self._ended is not None

    @property
    def supervision(self) -> Executor[EngineWorker]:
        """The rank group: its ranks, its status, its events."""
        return self._group

    def shutdown(self) -> None:
        """End the workers, and give everything back; any number of times."""
        group: Executor[EngineWorker] | None = vars(self).get("_group")
        if group is None or self._closed:
            return
        self._closed = True
        self._early.refuse()
        unsubscribe: Callable[[], None] | None = vars(self).get("_unsubscribe")
        if unsubscribe is not None:
            unsubscribe()
        group.close()
        # Whatever it waits for ends with an error now that the group is closed.
        if not self._early.close(_LEAVING):
            _logger.warning("phalanx.vllm_heal_goes_on after=%g", _LEAVING)
        remove_names(self._mark)

    def _rpc(
        self,
        epoch: int,
        method: str | bytes,
        timeout: float | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        rank: int | None,
        *,
        non_block: bool = False,
    ) -> Any:
        return self._group.collective_rpc(
            "rpc",
            timeout,
            args=(epoch, method, args, kwargs, rank),
            non_block=non_block,
            unique_reply_rank=rank,
        )

    # --- healing ------------------------------------------------------------------------

    def _heal(self) -> int:
        """Return the epoch of the workers once they are where those before them were.

        Raises:
            EngineEnded: there are none any more.
        """
        with self._healing:
            while True:
                try:
                    epoch = self._ask_epoch()
                    if epoch != self._prepared:
                        entries = self._journal.entries()
                        self._group.collective_rpc("prepare", args=(epoch, entries))
                        self._prepared = epoch
                        if forgotten := self._journal.forgotten:
                            _logger.warning(_FORGOTTEN, ", ".join(forgotten))
                except (WorkerDied, StaleEpoch):
                    continue
                except ExecutorClosed as error:
                    raise self._story() from error
                return epoch

    def _ask_epoch(self) -> int:
        epoch: int = self._group.collective_rpc("epoch", unique_reply_rank=0)
        return epoch

    def _on_event(self, event: object) -> None:
        if isinstance(event, GroupUp) and event.epoch != self._prepared:
            # Now, and not when the next request comes: this thread may not wait, so another does.
            self._early.begin()

    def _heal_early(self) -> None:
        try:
            self._heal()
        except EngineEnded:
            return  # whoever sends the next step is told
        except Exception:
            _logger.exception("phalanx.vllm_heal_failed")

    def _on_end(self, reason: ExitReason) -> None:
        self._ended = reason
        self._has_ended.set()
        _logger.error("phalanx.vllm_ended %s", self._story())
        self._bell.ring()

    def _story(self) -> EngineEnded:
        """Return the error that every call ends with from now on, and leave it for the client."""
        if self._group.is_failed:
            self._has_ended.wait(_TELLING)  # who told this call may have been quicker
        reports = self._group.status().reports
        error = EngineEnded.of(self._ended, reports[-1] if reports else None)
        tell_story(str(error))
        return error


def _mix_in_healing(config: Any) -> None:
    """Have the engine build a scheduler that heals, of the class it would have built."""
    scheduler = config.scheduler_config
    try:
        scheduler.scheduler_cls = healed(scheduler.get_scheduler_cls())
    except TypeError as error:
        raise SpecError(
            "scheduler_cls", scheduler.scheduler_cls, "derive it from vLLM's Scheduler"
        ) from error


def _modules_of(config: Any) -> list[str]:
    """Return the modules of vLLM's that its workers and this model are made of."""
    from vllm.model_executor.models import ModelRegistry  # noqa: PLC0415  # slow where it is first

    known = (ModelRegistry.models.get(name) for name in config.model_config.architectures)
    models = [str(getattr(each, "module_name", "")) for each in known]
    # What others have registered may do anything when it is imported: its owner may name it.
    ours = [name for name in models if name.startswith("vllm.")]
    return [config.parallel_config.worker_cls.rpartition(".")[0], *ours]


def _devices(world_size: int) -> Any:
    from vllm.platforms import current_platform  # noqa: PLC0415  # asks the machine, once imported

    return list(range(world_size)) if current_platform.is_cuda_alike() else "cpu"


def _step_limit() -> float:
    from vllm import envs  # noqa: PLC0415  # as above

    return float(envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS)


def _outcome(first: Any, second: Any) -> Any:
    """Return what a step came to, of which *first* and *second* are the halves."""
    value = first.result()
    other = second.result()
    return other if value is None else value


def _listed(answers: Any) -> tuple[Any, ...]:
    return tuple(answers) if isinstance(answers, list) else (answers,)
