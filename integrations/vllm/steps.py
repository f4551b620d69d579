"""The steps of one engine: each runs in the epoch that it was scheduled for, or it is lost.

Guarantees: a step that was sent to workers that died ends as a `LostStep`, never as an error and
never twice; no step that was scheduled for one epoch of the workers runs in another. When the group
has ended for good, a step fails with the story of its last death.

Left to others: bringing the workers to where those before them were (`executor`); what becomes of
requests (`healing`).

The engine core has one thread that schedules and takes outputs. What it believes about its workers
is kept as `_believed`: the epoch for which it schedules. It stops believing when it is handed the
first `LostStep` of that epoch, whereupon its scheduler begins every request again; and the next
step it sends belongs to the epoch that is there then.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from phalanx.supervision import ExecutorClosed, WorkerDied

from .lost import StepFuture, lost_step
from .worker import StaleEpoch

if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx.actors import Executor

    from .worker import EngineWorker

_logger = init_logger("vllm.phalanx")


class Steps:
    """What the engine core has its workers compute.

    Args:
        group: The workers.
        epoch: The one of theirs for which the engine core schedules at first.
        output_rank: Whose answer is the step's.
        samples: Whether the engine core asks for a sample after each step.
        heal: Returns the epoch of the workers, once they are where those before them were.
        story: Returns the error for the end of the group.
    """

    def __init__(
        self,
        group: Executor[EngineWorker],
        epoch: int,
        *,
        output_rank: int,
        samples: bool,
        heal: Callable[[], int],
        story: Callable[[], Exception],
    ) -> None:
        self._group = group
        self._output_rank = output_rank
        self._samples = samples
        self._heal = heal
        self._story = story
        self._believed = epoch
        self._step_epoch = 0
        self._first_half: Any = None
        self._held: Any = None

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


def _outcome(first: Any, second: Any) -> Any:
    """Return what a step came to, of which *first* and *second* are the halves."""
    value = first.result()
    other = second.result()
    return other if value is None else value
