"""`SupervisedExecutor`: vLLM's workers as a supervised rank group.

Guarantees: a new epoch is brought to the state of the old one (`journal`) before it gets any other
call; vLLM's own calls are made again after a death, the user's are not. When the group has ended
for good, every call fails with the report of its last death, and the engine ends as it does without
this plug-in.

`healing` is mixed into the engine's scheduler here, since the executor is made first and from the
same configuration.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import cloudpickle

from phalanx.runtime import GroupUp
from phalanx.supervision import ExecutorClosed, WorkerDied

from .compat import VllmExecutor, init_logger
from .group import start_group
from .healing import mix_in_healing
from .journal import REPEATABLE, Journal
from .lifecycle import EarlyHealing
from .policy import Policy
from .requirements import check_config, check_installed
from .steps import Steps
from .story import EngineEnded, forget_story, tell_story
from .worker.engine_worker import StaleEpoch
from .worker.shm_names import new_mark, remove_names

if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx.actors import Executor
    from phalanx.supervision import ExitReason

    from .worker.engine_worker import EngineWorker

check_installed()

_TELLING = 5.0  # seconds for the reason of the end to arrive; it takes milliseconds
_LEAVING = 10.0  # seconds for threads that heal to end
_HEALTH = 10.0  # seconds, as in vLLM's own executor
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
        """Whether steps may be scheduled before earlier ones have their outputs."""
        return True

    def _init_executor(self) -> None:
        config = self.vllm_config
        check_config(config)
        forget_story()
        policy = Policy.of_config(config.additional_config)
        policy.check_size(config.parallel_config.world_size)
        for_workers = cloudpickle.dumps(config)  # without the scheduler class
        mix_in_healing(config)
        self._journal = Journal(policy.replay)
        self._mark = new_mark()
        self._early = EarlyHealing(self._heal_early)
        self._ended: ExitReason | None = None
        self._has_ended = threading.Event()
        self._closed = False
        self._healing = threading.RLock()
        self._prepared = 0
        self._group = start_group(config, policy, pickled=for_workers, mark=self._mark)
        self._group.register_failure_callback(self._on_end)
        self._prepared = self._ask_epoch()
        self._steps = Steps(
            self._group,
            self._prepared,
            output_rank=self._group.layout.output_rank,
            samples=config.model_config.runner_type != "pooling" and not config.is_mm_encoder_only,
            heal=self._heal,
            story=self._story,
        )
        self._unsubscribe = self._group.subscribe(self._on_event)

    # --- steps --------------------------------------------------------------------------

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        """Have the workers compute a step."""
        return self._steps.execute_model(scheduler_output, non_block)

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        """End the step that was begun by `execute_model`."""
        return self._steps.sample_tokens(grammar_output, non_block)

    def take_draft_token_ids(self) -> Any:
        """Return the tokens that were drafted in the last step; None where they died with it."""
        return self._steps.take_draft_token_ids()

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

        After a death vLLM's own calls are made again, once the workers are back; others raise
        `WorkerDied`, with the crash report, since they may have had their effect.
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
        """Have the workers compute a step without requests."""
        self.collective_rpc("execute_dummy_batch", unique_reply_rank=self._group.layout.output_rank)

    def check_health(self) -> None:
        """Return once every worker has answered; a group that heals is waited for."""
        if self.is_failed:
            raise self._story()
        self.collective_rpc("check_health", timeout=_HEALTH)

    def register_failure_callback(self, callback: Callable[[], None]) -> None:
        """Run *callback* once the workers have ended for good; at once if they have."""
        self._group.register_failure_callback(lambda _reason: callback())

    @property
    def is_failed(self) -> bool:
        """Whether the workers have ended for good other than by `shutdown`."""
        return self._ended is not None

    @property
    def supervision(self) -> Executor[EngineWorker]:
        """The rank group: its ranks, its status, its events."""
        return self._group

    def shutdown(self) -> None:
        """End the workers, and release everything; may be repeated."""
        group: Executor[EngineWorker] | None = vars(self).get("_group")
        if group is None or self._closed:
            return
        self._closed = True
        self._early.refuse()
        unsubscribe: Callable[[], None] | None = vars(self).get("_unsubscribe")
        if unsubscribe is not None:
            unsubscribe()
        group.close()
        # What it waits for ends with an error, since the group is closed.
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
        """Bring the workers to the state of those before them; return their epoch.

        Raises:
            EngineEnded: the group has ended for good.
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
            # Now, and not with the next request. This thread may not block.
            self._early.begin()

    def _heal_early(self) -> None:
        try:
            self._heal()
        except EngineEnded:
            return  # the next step raises it
        except Exception:
            _logger.exception("phalanx.vllm_heal_failed")

    def _on_end(self, reason: ExitReason) -> None:
        self._ended = reason
        self._has_ended.set()
        _logger.error("phalanx.vllm_ended %s", self._story())

    def _story(self) -> EngineEnded:
        """Return the error of every call from now on, and leave it for the client."""
        if self._group.is_failed:
            self._has_ended.wait(_TELLING)  # this call may have learnt of the end first
        reports = self._group.status().reports
        error = EngineEnded.of(self._ended, reports[-1] if reports else None)
        tell_story(str(error))
        return error


def _listed(answers: Any) -> tuple[Any, ...]:
    return tuple(answers) if isinstance(answers, list) else (answers,)
