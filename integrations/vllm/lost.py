"""What stands in for the output of a step that no worker lived to give.

Guarantees: the engine core takes it for an output, so that its loop goes on; the scheduler sees
that it is none, and of which epoch of the workers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.v1.outputs import ModelRunnerOutput

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass
class LostStep(ModelRunnerOutput):  # type: ignore[misc]  # vLLM need not be installed
    """An output without any tokens.

    Attributes:
        epoch: The epoch of the workers that were to compute it.
    """

    epoch: int = 0


def lost_step(epoch: int) -> LostStep:
    """Return the output of a step that was lost with the workers of *epoch*."""
    return LostStep(req_ids=[], req_id_to_index={}, sampled_token_ids=[], epoch=epoch)


class StepFuture:
    """What becomes of one step; offers what the engine core asks of a future.

    Args:
        wait: Returns the output, or raises; called once.
    """

    def __init__(self, wait: Callable[[], Any], done: Callable[[], bool]) -> None:
        self._wait = wait
        self._done = done
        self._known = False
        self._value: Any = None
        self._error: BaseException | None = None

    def result(self, timeout: float | None = None) -> Any:
        """Return the output, or a `LostStep`."""
        del timeout  # the limits of a step are those of supervision
        if not self._known:
            try:
                self._value = self._wait()
            except Exception as error:  # noqa: BLE001  # it is the step's outcome
                self._error = error
            self._known = True
        if self._error is not None:
            raise self._error
        return self._value

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the step's error, or None; waits for it."""
        try:
            self.result(timeout)
        except Exception:  # noqa: BLE001  # returned below
            return self._error
        return None

    def done(self) -> bool:
        """Whether `result` would return at once."""
        return self._known or self._done()

    def cancelled(self) -> bool:
        """A step is never withdrawn by the engine core."""
        return False
