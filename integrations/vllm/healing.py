"""The scheduler's part: requests go on after the workers that knew them are gone.

Guarantees: of the steps that were lost nothing is taken; every request that had begun is put back
in its place in the queue, with nothing computed and all of its tokens, and none is generated twice;
what has been finished stays so. A request that cannot go on as it would have ends alone, with an
error that says why.

Left to others: noticing the loss (`executor`), and taking requests up where they stopped
(`resumption`). Works on any scheduler that derives from vLLM's: see `healed`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.request import Request, RequestStatus

from phalanx.supervision import SpecError

from .losses import drop_in_flight, obstacle
from .lost import LostStep

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput

_logger = init_logger("vllm.phalanx")


class Healing(Scheduler):  # type: ignore[misc]  # vLLM need not be installed
    """A scheduler that outlives its workers; mixed into the one that the engine would have had."""

    _lost_epoch = 0

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Schedule a step, and give the tokens of each request that begins again along with it."""
        scheduled = super().schedule(*args, **kwargs)
        for new in scheduled.scheduled_new_reqs:
            if new.prefill_token_ids is None:
                request = self.requests[new.req_id]
                if request.num_output_tokens:
                    new.prefill_token_ids = request.all_token_ids.copy()
        return scheduled

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Take the output of a step, or note that it is lost."""
        ended: list[Request] = []
        lost = model_runner_output.epoch if isinstance(model_runner_output, LostStep) else 0
        if lost > self._lost_epoch:
            self._lost_epoch = lost
            ended = self._begin_again()
        # Of a step that is lost every request is marked as one whose output is to be dropped, so
        # that this only counts what is in flight.
        outputs: dict[int, EngineCoreOutputs] = super().update_from_output(
            scheduler_output, model_runner_output
        )
        for request in ended:
            of_client = outputs.setdefault(request.client_index, EngineCoreOutputs())
            of_client.outputs.append(_error_of(request))
        return outputs

    def _begin_again(self) -> list[Request]:
        """Put every request back to where nothing of it is computed; return those that end."""
        ended = self._end_what_cannot_go_on()
        self.reset_prefix_cache(reset_running_requests=True)
        self.encoder_cache_manager.reset()
        for request in self.requests.values():
            drop_in_flight(request)
            if request.status == RequestStatus.PREEMPTED:
                # As a new one: resuming is for workers that have seen it before.
                request.status = RequestStatus.WAITING
        self.reset_preempted_req_ids.clear()
        return ended

    def _end_what_cannot_go_on(self) -> list[Request]:
        reasons: dict[str, str] = {}
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
            # vLLM's server tells its client of an internal error, and no more.
            _logger.warning("phalanx.vllm_request_ended request=%s: %s", request.request_id, why)
        return ended


def healed(scheduler: type[Any]) -> type[Healing]:
    """Return *scheduler* with `Healing` mixed in."""
    if issubclass(scheduler, Healing):
        return scheduler
    return type(f"Healing{scheduler.__name__}", (Healing, scheduler), {})


def mix_in_healing(config: Any) -> None:
    """Have the engine build a scheduler that heals, of the class it would have built."""
    scheduler = config.scheduler_config
    try:
        scheduler.scheduler_cls = healed(scheduler.get_scheduler_cls())
    except TypeError as error:
        raise SpecError(
            "scheduler_cls", scheduler.scheduler_cls, "derive it from vLLM's Scheduler"
        ) from error


def _error_of(request: Request) -> EngineCoreOutput:
    return EngineCoreOutput(
        request_id=request.request_id,
        new_token_ids=[],
        finish_reason=request.get_finished_reason(),
        stop_reason=request.stop_reason,
        events=request.take_events(),
        trace_headers=request.trace_headers,
    )
