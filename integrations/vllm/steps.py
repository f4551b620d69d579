"""The steps of one engine: each runs in the epoch that it was scheduled for, or it is lost.

Guarantees: a step that was sent to workers that died ends as a `LostStep`, never as an error and
never twice; no step that was scheduled for one epoch of the workers runs in another. When the group
has ended for good, a step fails with the report of its last death.

The engine core has one thread that schedules and takes outputs. The epoch for which it schedules is
`_believed`, until it takes the first `LostStep` of that epoch: then its scheduler begins every
request again, and the next step it sends belongs to the epoch that is there then.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from phalanx.supervision import ExecutorClosed, WorkerDied

from .compat import ModelRunnerOutput, init_logger
from .recovery import StaleEpoch

if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx.actors import Executor

    from .recovery import Recovery
    from .worker.engine_worker import EngineWorker

_logger = init_logger("vllm.phalanx")

# A device error or a broken process group then counts as the death that it leads to: what is sent
# again finds another epoch (`StaleEpoch`), and is never computed.
_AGAIN = 1


@dataclass
class LostStep(ModelRunnerOutput):  # type: ignore[misc]  # vLLM need not be installed
    """An output without any tokens, which the engine core takes for one.

    Attributes:
        epoch: The epoch of the workers that were to compute it.
        begun: Whether it may have been begun: those were not known to be dead when it was sent.
    """

    req_ids: list[str] = field(default_factory=list[str])
    req_id_to_index: dict[str, int] = field(default_factory=dict[str, int])
    epoch: int = 0
    begun: bool = True


class StepFuture(Future[Any]):
    """The future of one step; it is done once the engine core's thread has requested the output.

    Args:
        wait: Returns the output, or raises; called once.
    """

    def __init__(self, wait: Callable[[], Any]) -> None:
        super().__init__()
        self._wait = wait

    def result(self, timeout: float | None = None) -> Any:
        """Return the output, or a `LostStep`; the limits of a step are those of supervision."""
        if not self.done():
            try:
                self.set_result(self._wait())
            except Exception as error:  # noqa: BLE001  # it is the step's outcome
                self.set_exception(error)
        return super().result(timeout)


def _known(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


class Steps:
    """The steps that the engine core sends to its workers.

    Args:
        group: The workers.
        recovery: Brings the workers to the state of those before them.
        output_rank: Its answer is the step's.
        samples: Whether the engine core requests a sample after each step.
        end_error: Returns the error for the end of the group.
    """

    def __init__(
        self,
        group: Executor[EngineWorker],
        recovery: Recovery,
        *,
        output_rank: int,
        samples: bool,
        end_error: Callable[[], Exception],
    ) -> None:
        self._group = group
        self._output_rank = output_rank
        self._samples = samples
        self._recovery = recovery
        self._end_error = end_error
        self._believed = recovery.epoch
        self._step_epoch = 0
        self._step_begun = True
        self._first_half: Any = None
        self._held: Any = None

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        """Have the workers compute a step."""
        if not self._believed:
            self._believed = self._recovery.restore()
        self._step_epoch = self._believed
        self._step_begun = self._believed > self._recovery.down
        self._first_half = self._held = None
        if not (non_block and self._samples and scheduler_output.total_num_scheduled_tokens):
            return self._step("execute_model", scheduler_output, non_block=non_block)
        # The engine core requests a sample next, at once if there is no grammar to be looked up.
        if scheduler_output.has_structured_output_requests:
            self._step("execute_model", scheduler_output, non_block=True)
        else:
            self._held = scheduler_output
        return _known(None)

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        """End the step that was begun by `execute_model`."""
        held, self._held = self._held, None
        if held is None:
            return self._step("sample_tokens", grammar_output, non_block=non_block)
        return self._step("step", held, non_block=non_block)

    def take_draft_token_ids(self) -> Any:
        """Return the tokens that were drafted in the last step; None where they died with it."""
        try:
            return self._send("take_draft_token_ids", self._step_epoch, non_block=False)
        except (WorkerDied, StaleEpoch):
            return None

    def _step(self, method: str, argument: Any, *, non_block: bool) -> Any:
        epoch, begun = self._step_epoch, self._step_begun
        if epoch != self._believed:  # its first half is lost already
            value = LostStep(epoch=epoch, begun=begun)
            return _known(value) if non_block else value
        # The engine core looks at the first half of a step only where it has no second one: what
        # that half raised or returned is the outcome of the second.
        before = self._first_half
        if before is None and not non_block:
            return self._output(
                partial(self._send, method, epoch, argument, non_block=False), epoch, begun=begun
            )
        self._first_half = future = self._send(method, epoch, argument)
        get = future.result if before is None else partial(_outcome, before, future)
        if non_block:
            return StepFuture(partial(self._output, get, epoch, begun=begun))
        return self._output(get, epoch, begun=begun)

    def _send(self, method: str, epoch: int, *args: Any, non_block: bool = True) -> Any:
        try:
            return self._group.collective_rpc(
                method,
                args=(epoch, *args),
                non_block=non_block,
                unique_reply_rank=self._output_rank,
                retries=_AGAIN,
            )
        except ExecutorClosed as error:
            raise self._end_error() from error

    def _output(self, get: Callable[[], Any], epoch: int, *, begun: bool) -> Any:
        try:
            value = get()
        except (WorkerDied, StaleEpoch) as error:
            _logger.warning("phalanx.vllm_step_lost epoch=%d by=%s", epoch, type(error).__name__)
            if self._believed == epoch:
                self._believed = 0
            return LostStep(epoch=epoch, begun=begun)
        except ExecutorClosed as error:
            raise self._end_error() from error
        self._recovery.end_row()
        return value


def _outcome(first: Any, second: Any) -> Any:
    """Return what a step came to, of which *first* and *second* are the halves."""
    value = first.result()
    other = second.result()
    return other if value is None else value
