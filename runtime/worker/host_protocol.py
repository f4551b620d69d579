"""Host interface: what the layer above provides inside a worker process.

Every method is called on the worker's main thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from phalanx.runtime.wire.packet_encoder import Payload
    from phalanx.supervision import Directive, ExitReason

    from .tracing import ServerSpan


class Hosted(Protocol):
    """See the module."""

    @property
    def after_reply(self) -> Callable[[], None] | None:
        """Called after each answer; None for nothing."""
        ...

    def start(self) -> None:
        """Build the user's object and run its start hook."""
        ...

    def invoke(self, method: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run one call."""
        ...

    def span(self, method: Any, carrier: Mapping[str, str]) -> ServerSpan:
        """Begin the span of a call of *method* below that of *carrier*."""
        ...

    def end_copy(self) -> None:
        """End this process if it is a forked copy of the worker, which has left the user's code."""
        ...

    def adopt(self, epoch: int) -> None:
        """Note that the group around this worker has a new epoch."""
        ...

    def reform(self, order: Any) -> None:
        """Leave the process group of the last epoch and join that of the new one."""
        ...

    def save(self, call_id: int) -> Payload:
        """Store the user's state after *call_id*; return the message for the driver."""
        ...

    def stop(self, reason: ExitReason) -> None:
        """Run the user's stop hook."""
        ...

    def judge(self, error: BaseException) -> Directive:
        """Return the decider's directive for *error*, which a method raised."""
        ...

    def note_foreign(self) -> None:
        """Log that the call socket received a malformed packet."""
        ...

    def fail(self, error: BaseException) -> None:
        """Run the user's failure hook: *error* is about to end this worker."""
        ...
