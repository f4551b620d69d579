"""OpenTelemetry spans of a group: its calls as their callers see them, its starts and restarts.

- A call's span begins when the call is made and ends when the call has its outcome.
- A death is an event of the spans of the calls that it touches, and of the restart, whose span has
  a link to each of those calls. Starts of ranks are events of the span of the start or restart.
- Without a tracer provider no spans are made (`Telemetry`). No exporter runs under a phalanx lock.

The worker's side is `runtime.worker.tracing`.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from concurrent.futures import CancelledError
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from phalanx.actors.calls.call import Shape
from phalanx.actors.spec.results import OutcomeKind
from phalanx.runtime import (
    Frame,
    GroupDown,
    GroupEnded,
    GroupUp,
    Kind,
    Telemetry,
    WorkerCrashed,
    WorkerReady,
    WorkerStarted,
    carried,
)
from phalanx.supervision import CallTimeout, ExecutorClosed, WorkerDied

if TYPE_CHECKING:
    from phalanx.actors.calls.call import Call
    from phalanx.runtime import CallFate, CrashReport

_GOOD = (OutcomeKind.OK, Kind.REPLY)


def _api() -> Any:
    """Return `opentelemetry.trace`, which is imported if there is a tracer."""
    return sys.modules["opentelemetry.trace"]


class CallSpan:
    """The span of one call, from its caller's side.

    Attributes:
        carrier: The context that travels to the ranks.
    """

    def __init__(self, trace: GroupTrace, tracer: Any, name: str, about: dict[str, Any]) -> None:
        self._trace = trace
        self._open = threading.Lock()  # taken by the first that ends the span
        self._settled_at: int | None = None
        self._span = tracer.start_span(name, kind=_api().SpanKind.CLIENT, attributes=about)
        self.carrier = carried(_api().set_span_in_context(self._span))

    def died(self, report: CrashReport, fate: CallFate | None) -> None:
        """Note a death that touches the call. Under the plane's lock: must not block."""
        about = _about_death(report)
        if fate is not None:
            about["phalanx.fate"] = str(fate.fate)
        self._span.add_event("phalanx.rank_died", about)
        self._trace.interrupted.append(self._span.get_span_context())

    def settled(self, _call: Call) -> None:
        """Note when the call got its outcome. Under the plane's lock: must not block."""
        self._settled_at = time.time_ns()

    def end(self, call: Call) -> None:
        """End it with the outcome of *call*, which is done; only the first end counts."""
        self._end(*outcome_of(call))

    def refused(self, error: BaseException) -> None:
        """End it by *error*: the call was not accepted, or was abandoned."""
        self._end(kind_of(error), {}, f"{type(error).__name__}: {error}")

    def _end(self, outcome: str, about: dict[str, Any], problem: str) -> None:
        if not self._open.acquire(blocking=False):
            return
        self._span.set_attributes({"phalanx.outcome": outcome, **about})
        if problem:
            self._span.set_status(_api().StatusCode.ERROR, problem)
        self._span.end(self._settled_at)


class GroupTrace:
    """The spans of one group; that of its start is a child of the one current where it is built.

    Attributes:
        telemetry: Where the tracer is, if there is a provider.
        interrupted: The spans of calls, to which the next restart gets a link. For any thread.
    """

    def __init__(self, group: str, worker: str) -> None:
        self._group = group
        self._worker = worker
        self.telemetry = Telemetry()
        self.interrupted: deque[Any] = deque()
        self._span: Any = None  # of the start or restart under way
        self._context: Any = None
        if self.telemetry.tracer is not None:
            self._context = sys.modules["opentelemetry.context"].get_current()

    def call(
        self, tracer: Any, name: str, shape: Shape, seq: int, rank: int | None, *, is_stream: bool
    ) -> CallSpan:
        """Return the span of call number *seq*, which is being made."""
        # By its contract a provider raises nothing. One that does fails the call, unsent.
        about: dict[str, Any] = {
            "rpc.system": "phalanx",
            "rpc.service": self._worker,
            "rpc.method": name,
            "phalanx.group": self._group,
            "phalanx.method": name,
            "phalanx.call_id": seq,
            "phalanx.call": "stream" if is_stream else shape.name.lower(),
        }
        if rank is not None:
            about["phalanx.rank"] = rank
        return CallSpan(self, tracer, f"{self._worker}/{name}", about)

    def starting(self) -> dict[str, str]:
        """Return the context of the start or restart for the ranks that are about to be started."""
        tracer = self.telemetry.tracer
        if tracer is not None:
            with suppress(Exception):  # as above
                if self._span is None:
                    self._open(tracer, "start", self._context)
                return carried(_api().set_span_in_context(self._span))
        return {}

    def on_event(self, event: Any) -> None:
        """Record *event*, which the group publishes."""
        tracer = self.telemetry.tracer
        if tracer is None:
            return
        with suppress(Exception):  # a provider that breaks its contract must not end the group
            match event:
                case WorkerStarted() | WorkerReady() if self._span is not None:
                    done = "ready" if isinstance(event, WorkerReady) else "started"
                    rank = -1 if event.rank is None else event.rank
                    about = {"phalanx.rank": rank, "phalanx.incarnation": event.incarnation}
                    self._span.add_event(f"phalanx.rank_{done}", about)
                case WorkerCrashed(report=report) if report.rank is not None:
                    span = self._open(tracer, "restart", None)
                    span.add_event("phalanx.rank_died", _about_death(report))
                case GroupDown():
                    self._open(tracer, "restart", None)
                case GroupUp():
                    about = {"phalanx.epoch": event.epoch, "phalanx.ranks": event.world_size}
                    self._close(about, "")
                case GroupEnded():
                    self._close({}, event.cause)
                case _:
                    pass

    def _open(self, tracer: Any, what: str, context: Any) -> Any:
        interrupted = [self.interrupted.popleft() for _ in range(len(self.interrupted))]
        if self._span is not None:  # a further death in the same restart
            for each in interrupted:
                self._span.add_link(each)
        else:
            self._span = tracer.start_span(
                f"{self._worker} {what}",
                context=context,
                attributes={"phalanx.group": self._group},
                links=[_api().Link(each) for each in interrupted],
            )
        return self._span

    def _close(self, about: dict[str, Any], problem: str) -> None:
        span, self._span = self._span, None
        if span is not None:
            span.set_attributes(about)
            if problem:
                span.set_status(_api().StatusCode.ERROR, problem)
            span.end()


def _about_death(report: CrashReport) -> dict[str, Any]:
    return {
        "phalanx.group": report.group,
        "phalanx.rank": -1 if report.rank is None else report.rank,
        "phalanx.incarnation": report.incarnation,
        "phalanx.epoch": report.epoch,
        "phalanx.reason": str(report.reason),
        "phalanx.decision": report.decision,
    }


def outcome_of(call: Call) -> tuple[str, dict[str, Any], str]:
    """Return the outcome's name, further attributes, and the error; decodes no value."""
    about: dict[str, Any] = {}
    epochs = [each.epoch for each in call.answers.values() if isinstance(each, Frame)]
    if epochs:
        about["phalanx.epoch"] = max(epochs)
    if call.reports:
        about["phalanx.deaths"] = len(call.reports)
    if call.rank is not None:
        about["phalanx.rank"] = call.rank
    if call.error is not None:
        kind = kind_of(call.error)
        message = "" if kind == "cancelled" else f"{type(call.error).__name__}: {call.error}"
        return kind, about, message
    if call.failed is not None:
        about["phalanx.failed_rank"] = call.failed[1]
        return "error", about, f"rank {call.failed[1]} raised"
    if call.shape is Shape.GATHER:
        failed = sorted(rank for rank, each in call.answers.items() if each.kind not in _GOOD)
        if failed:
            about["phalanx.failed_ranks"] = failed
            return "partial", about, f"no value from ranks {', '.join(map(str, failed))}"
    return "ok", about, ""


def kind_of(error: BaseException) -> str:
    """Return the name of the outcome of a call that ends in *error*."""
    match error:
        case WorkerDied():
            return "died"
        case CallTimeout():
            return "timeout"
        case ExecutorClosed():
            return "closed"
        case Exception() if not isinstance(error, CancelledError):
            return "error"
        case _:  # asyncio's cancel, and Ctrl-C, are no exceptions
            return "cancelled"
