"""`SupervisedExecutor`: vLLM's workers as a supervised rank group.

Guarantees: when the group has ended for good, every call fails with the report of its last death,
and the engine ends as it does without this plug-in. `recovery` brings new workers up, and `healing`
is mixed into the engine's scheduler, since the executor is made first.
"""

from __future__ import annotations

import pkgutil
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

import cloudpickle

from phalanx.supervision import GPU_WORKER, CallTimeout, Directive, SpecError, StartFailed

from .compat import EngineDeadError, VllmExecutor, check_installed, init_logger
from .engine_state import EngineEnded, EngineRecovering, EngineState, serve_states
from .group import start_group
from .healing import mix_in_healing
from .journal import Journal
from .policy import Policy, check_config
from .recovery import Recovery, weakly
from .steps import Steps
from .worker.shm_names import new_mark, remove_names

if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx.actors import Executor

    from .recovery import WeightsLost
    from .worker.engine_worker import EngineWorker

check_installed()
serve_states(EngineDeadError)

_TELLING = 60.0  # seconds at most for the reason of the end to arrive; it takes milliseconds
_HEALTH = 10.0  # seconds, as in vLLM's own executor
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
        self._state = EngineState()
        policy = Policy.of_config(config.additional_config)
        hook = _hook(policy.on_weights_lost)
        for_workers = cloudpickle.dumps(config)  # without the scheduler class
        mix_in_healing(config, self._state, self._forgive)
        self._mark = new_mark()
        self._end: Future[str] = Future()
        self._closed = False
        self._group = self._start_group(policy, for_workers)
        try:
            self._set_up(policy, hook)
        except BaseException:
            self.shutdown()
            raise

    def _set_up(self, policy: Policy, hook: Callable[[WeightsLost], object] | None) -> None:
        config = self.vllm_config
        self._group.register_failure_callback(weakly(self._fail))
        self._recovery = Recovery(
            self._group,
            Journal(policy.replay, policy.superseding, policy.harmless, most=policy.replay_bytes),
            limit=policy.start_timeout,
            ended=self._end_error,
            hook=hook,
            state=self._state,
            most=policy.intensity.max_restarts,
        )
        self._steps = Steps(
            self._group,
            self._recovery,
            output_rank=self._group.layout.output_rank,
            samples=config.model_config.runner_type != "pooling" and not config.is_mm_encoder_only,
            end_error=self._end_error,
        )
        self.execute_model = self._steps.execute_model
        self.sample_tokens = self._steps.sample_tokens
        self.take_draft_token_ids = self._steps.take_draft_token_ids

    def _start_group(self, policy: Policy, pickled: bytes) -> Executor[EngineWorker]:
        """Start the workers; after a CUDA error again, as often as they may be restarted."""
        left = policy.intensity.max_restarts
        while True:
            try:
                return start_group(self.vllm_config, policy, pickled=pickled, mark=self._mark)
            except BaseException as error:
                remove_names(self._mark)
                is_final = not left or not isinstance(error, StartFailed)
                if is_final or GPU_WORKER.directive(error) is not Directive.RESTART:
                    raise
                _logger.warning("phalanx.vllm_start_failed left=%d: %s", left, error)
            left -= 1

    def collective_rpc(
        self,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
    ) -> Any:
        """Call *method* of vLLM's worker on every rank, or a callable with the worker.

        After a death vLLM's own calls are made again, once the workers are back; others raise
        `WorkerDied`, with the crash report, since they may have had their effect. *timeout* is in
        seconds, for a recovery that has to come first as well; None for no limit.
        """
        name = ""
        if not isinstance(method, str):
            name = getattr(method, "__name__", type(method).__name__)
            method = cloudpickle.dumps(method)
        given = (method, timeout, args, dict(kwargs or {}))
        return self._recovery.call(*given, non_block=non_block, name=name)

    def check_health(self) -> None:
        """Return once every worker has answered.

        Raises:
            EngineRecovering: the workers are being restarted, and were not back after 10 seconds.
            EngineEnded: they have ended for good.
        """
        if self.is_failed:
            raise self._end_error()
        try:
            self.collective_rpc("check_health", timeout=_HEALTH)
        except CallTimeout as error:
            status = self._group.status()
            if status.phase == "serving" and status.epoch == self._recovery.epoch:
                raise  # a worker that does not answer, and is not restarted
            msg = f"the workers of this engine are being restarted; restarts: {status.restarts}"
            raise EngineRecovering(msg) from error

    def register_failure_callback(self, callback: Callable[[], None]) -> None:
        """Run *callback* once the workers have ended for good; at once if they have."""
        self._end.add_done_callback(lambda _end: callback())

    @property
    def is_failed(self) -> bool:
        """Whether the workers have ended for good other than by `shutdown`."""
        return self._end.done()

    @property
    def supervision(self) -> Executor[EngineWorker]:
        """The rank group: its ranks, its status, its events."""
        return self._group

    def shutdown(self) -> None:
        """End the workers, and release everything; may be repeated."""
        if "_group" not in vars(self) or self._closed:
            return
        self._closed = True
        self._group.close()
        if "_recovery" in vars(self):
            self._recovery.close()
        remove_names(self._mark)

    def _forgive(self, restarts: int) -> None:
        self._group.forgive_restarts(restarts)
        self._recovery.end_row()

    def _fail(self, reason: object) -> None:
        text = self._describe(reason)
        self._state.set("ended", text)  # before the callbacks, which end the engine core
        with suppress(InvalidStateError):  # it has failed before
            self._end.set_result(text)
            _logger.error("phalanx.vllm_ended %s", text)

    def _end_error(self, why: str = "") -> EngineEnded:
        """Return the error of every call from now on, and leave it for the client.

        *why* is a reason outside of the group, which is then ended too.
        """
        if why:
            self._fail(why)
            self._group.request_close()
        if self._group.is_failed:
            wait([self._end], _TELLING)  # this call may have learnt of the end first
        if self._end.done():
            return EngineEnded(self._end.result())
        text = self._describe("it was shut down")
        self._state.set("ended", text)
        return EngineEnded(text)

    def _describe(self, why: object) -> str:
        reports = self._group.status().reports
        last_death = f"; the last death:\n{reports[-1].render()}" if reports else ""
        return f"the workers of this engine have ended for good: {why}{last_death}"


def _hook(name: str | None) -> Callable[[WeightsLost], object] | None:
    """Return what the policy's ``on_weights_lost`` names, before anything is started."""
    if name is None:
        return None
    try:
        hook = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        remedy = f"name a function that the engine core can import: {error}"
        raise SpecError("on_weights_lost", name, remedy) from error
    if not callable(hook):
        raise SpecError("on_weights_lost", name, f"name a function; this is {hook!r}")
    return cast("Callable[[WeightsLost], object]", hook)
