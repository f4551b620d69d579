"""The scheduler's part: requests continue after the workers that ran them have died.

Guarantees: no result of a lost step becomes output; every request that had begun returns to its
place in the queue, with nothing computed and all of its tokens; one that cannot be continued
exactly ends alone, with an error that gives the reason. It works with any scheduler that derives
from vLLM's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from phalanx.supervision import SpecError

from .compat import (
    EngineCoreOutput,
    EngineCoreOutputs,
    Request,
    RequestStatus,
    Scheduler,
    init_logger,
)
from .policy import Policy
from .steps import LostStep
from .suspects import Suspects, with_siblings
from .worker.resumption import drop_in_flight, obstacle

if TYPE_CHECKING:
    from collections.abc import Callable

    from .engine_state import EngineState

_logger = init_logger("vllm.phalanx")

_POISON = "its workers died whenever they computed it, at last without another suspect beside it"


class Healing(Scheduler):  # type: ignore[misc]  # vLLM need not be installed
    """A scheduler that outlives its workers; mixed into the one that the engine would have had."""

    max_num_active_reqs: int
    engine_state: EngineState
    forgive: Callable[[int], None]
    _lost_epoch = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        policy = Policy.of_config(self.vllm_config.additional_config)
        self._suspects = Suspects(policy.suspect_after)
        self._tried: frozenset[str] = frozenset()

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Schedule a step; requests that begin again take their tokens along."""
        usual = self.max_num_active_reqs
        most = self._suspects.may_run([each.request_id for each in self.running], self.requests)
        if most is not None:
            self.max_num_active_reqs = min(usual, most + self.num_waiting_for_streaming_input)
        try:
            scheduled = super().schedule(*args, **kwargs)
        finally:
            self.max_num_active_reqs = usual
        for new in scheduled.scheduled_new_reqs:
            if new.prefill_token_ids is None:
                request = self.requests[new.req_id]
                if request.num_output_tokens:
                    new.prefill_token_ids = request.all_token_ids.copy()
        return scheduled

    def update_from_output(
        self, scheduler_output: Any, model_runner_output: Any
    ) -> dict[int, EngineCoreOutputs]:
        """Take the output of a step, or note that it is lost."""
        ended: list[Request] = []
        lost = model_runner_output.epoch if isinstance(model_runner_output, LostStep) else 0
        if lost > self._lost_epoch:
            self._lost_epoch = lost
            ended = self._begin_again(begun=model_runner_output.begun)
        elif not lost and self._suspects.is_watching:
            known = self.requests
            computed = [each for each in scheduler_output.num_scheduled_tokens if each in known]
            self._suspects.computed(computed, lambda each: known[each].num_computed_tokens)
        # Every request of a lost step is marked as one whose output is dropped, so that this only
        # counts what is in flight.
        outputs: dict[int, EngineCoreOutputs] = super().update_from_output(
            scheduler_output, model_runner_output
        )
        for request in ended:
            error = EngineCoreOutput(
                request_id=request.request_id,
                new_token_ids=[],
                finish_reason=request.get_finished_reason(),
                stop_reason=request.stop_reason,
                events=request.take_events(),
                trace_headers=request.trace_headers,
            )
            outputs.setdefault(request.client_index, EngineCoreOutputs()).outputs.append(error)
        return outputs

    def _begin_again(self, *, begun: bool) -> list[Request]:
        """Put every request back with nothing computed; return those that end.

        Of workers that died before the step was *begun* none of its requests is the cause.
        """
        ended = self._end_what_cannot_go_on(begun=begun)
        self.reset_prefix_cache(reset_running_requests=True)
        self.encoder_cache_manager.reset()
        again = sum(each.status == RequestStatus.PREEMPTED for each in self.requests.values())
        tried, self._tried = self._tried, self._suspects.suspects()
        self.engine_state.add(recomputed=again, ended=len(ended), suspects=len(self._tried - tried))
        for request in self.requests.values():
            drop_in_flight(request)
            if request.status == RequestStatus.PREEMPTED:
                # As a new one: vLLM resumes only what its workers have seen.
                request.status = RequestStatus.WAITING
        self.reset_preempted_req_ids.clear()
        return ended

    def _end_what_cannot_go_on(self, *, begun: bool) -> list[Request]:
        running = {each.request_id: each.num_computed_tokens for each in self.running}
        reasons: dict[str, str] = {}
        if begun and (killers := self._suspects.lose(running)):
            self.forgive(self._suspects.take_row())
            reasons = dict.fromkeys(with_siblings(killers, self.requests), _POISON)
        for request in self.requests.values():
            why = obstacle(
                request,
                is_running=request.status == RequestStatus.RUNNING,
                speculates=self.num_spec_tokens > 0,
                keeps_generators=not self.use_v2_model_runner,
            )
            if why is not None and not request.is_finished():
                reasons[request.request_id] = why
        ended = self.finish_requests(reasons, RequestStatus.FINISHED_ERROR) if reasons else []
        for request in ended:
            request.stop_reason = why = reasons[request.request_id]
            # vLLM's server reports an internal error to its client, without the reason.
            _logger.warning("phalanx.vllm_request_ended request=%s: %s", request.request_id, why)
        return ended


def mix_in_healing(config: Any, state: EngineState, forgive: Callable[[int], None]) -> None:
    """Replace the class of the engine's scheduler by one that heals, and says so in *state*.

    *forgive* is called with a number of restarts whose cause has been ended.
    """
    scheduler = config.scheduler_config
    base = scheduler.get_scheduler_cls()
    if not issubclass(base, Scheduler):
        raise SpecError("scheduler_cls", scheduler.scheduler_cls, "derive it from vLLM's Scheduler")
    bases = (base,) if issubclass(base, Healing) else (Healing, base)
    own = {"engine_state": state, "forgive": staticmethod(forgive)}
    scheduler.scheduler_cls = type(f"Healing{base.__name__}", bases, own)
