"""What a group tells of itself in spans: calls as their callers see them, starts and restarts.

Guarantees: a call's span begins when the call is made and ends when it has its outcome, whoever
asks for that; a death that touches a call is an event of its span, and the restart that follows has
a span of its own with a link to every call it interrupted. Without tracing nothing is made
(`Telemetry`). No exporter runs under a lock of ours.

Left to others: the worker's side (`runtime.telemetry`), and where spans go.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import CancelledError
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from phalanx.actors.calls.call import Shape
from phalanx.actors.spec.results import Outcome, OutcomeKind
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
    from collections.abc import Mapping

    from phalanx.actors.calls.call import Call
    from phalanx.runtime import CallFate, CrashReport


class CallSpan:
    """The span of one call, from its caller's side.

    Attributes:
        carrier: What tells the ranks whom they work for.
    """

    def __init__(self, trace: GroupTrace, tracer: Any, name: str, about: dict[str, Any]) -> None:
        import opentelemetry.trace as api  # noqa: PLC0415  # it is imported: somebody traces

        self._api = api
        self._trace = trace
        self._lock = threading.Lock()
        self._ended = False
        # What is set meanwhile, the wall clock, makes no call longer, or end before it began.
        self._clock_at_zero = time.time_ns() - time.monotonic_ns()
        self._settled_at: int | None = None
        self._span = tracer.start_span(
            name, kind=api.SpanKind.CLIENT, attributes=about, start_time=self._now()
        )
        self.carrier = carried(api.set_span_in_context(self._span))

    def sent_as(self, seq: int) -> None:
        """Note the number of the call."""
        self._span.set_attribute("phalanx.call_id", seq)

    def died(self, report: CrashReport, fate: CallFate | None) -> None:
        """A death has touched the call. Under the plane's lock: quick."""
        about = _about_death(report)
        if fate is not None:
            about["phalanx.fate"] = str(fate.fate)
        self._span.add_event("phalanx.rank_died", about)
        self._trace.interrupted(self._span.get_span_context())

    def settled(self, _call: Call) -> None:
        """The call has its outcome. Under the plane's lock: quick."""
        self._settled_at = self._now()

    def end(self, call: Call) -> None:
        """End it with the outcome of *call*, which is done; once."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
        outcome, about, problem = _outcome_of(call)
        self._finish(outcome, about, problem)

    def refused(self, error: BaseException) -> None:
        """End it by *error*: the call was not accepted, or nobody waits for it any more."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
        self._finish(_kind_of(error), {}, f"{type(error).__name__}: {error}")

    def _finish(self, outcome: str, about: Mapping[str, Any], problem: str) -> None:
        self._span.set_attribute("phalanx.outcome", outcome)
        self._span.set_attributes(dict(about))
        if problem:
            self._span.set_status(self._api.StatusCode.ERROR, problem)
        self._span.end(self._now() if self._settled_at is None else self._settled_at)

    def _now(self) -> int:
        return self._clock_at_zero + time.monotonic_ns()


class GroupTrace:
    """The spans of one group. Made in the thread that builds it; its start is that one's child."""

    def __init__(self, group: str, worker: str) -> None:
        self._group = group
        self._worker = worker
        self._telemetry = Telemetry()
        self._lock = threading.Lock()
        self._links: list[Any] = []
        self._span: Any = None  # of the start or restart that is under way
        self._ranks: dict[tuple[int | None, int], Any] = {}
        self._context: Any = None
        if self._telemetry.tracer is not None:
            from opentelemetry import context  # noqa: PLC0415  # as above

            self._context = context.get_current()

    # --- calls --------------------------------------------------------------------------

    def call(
        self, name: str, shape: Shape, rank: int | None, *, is_stream: bool = False
    ) -> CallSpan | None:
        """Return the span of a call that is being made, None where nobody traces."""
        tracer = self._telemetry.tracer
        if tracer is None:
            return None
        # A provider, by its contract, raises nothing. One that does fails the call, unsent.
        about: dict[str, Any] = {
            "rpc.system": "phalanx",
            "rpc.service": self._worker,
            "rpc.method": name,
            "phalanx.group": self._group,
            "phalanx.method": name,
            "phalanx.call": "stream" if is_stream else shape.name.lower(),
        }
        if rank is not None:
            about["phalanx.rank"] = rank
        return CallSpan(self, tracer, f"{self._worker}/{name}", about)

    def interrupted(self, context: Any) -> None:
        """Note that the restart that follows interrupts the span of *context*."""
        with self._lock:
            self._links.append(context)

    # --- starts -------------------------------------------------------------------------

    def starting(self) -> dict[str, str]:
        """Return what tells ranks that are about to be started which start they belong to."""
        tracer = self._telemetry.tracer
        if tracer is None:
            return {}
        with suppress(Exception):  # as above
            import opentelemetry.trace as api  # noqa: PLC0415  # as above

            if self._span is None:
                self._open(tracer, "start", self._context)
            span: Any = self._span
            return carried(api.set_span_in_context(span))
        return {}

    def hear(self, event: Any) -> None:
        """Make of *event*, which the group publishes, what it is in spans."""
        tracer = self._telemetry.tracer
        if tracer is None:
            return
        with suppress(Exception):  # a provider that breaks its contract must not end the group
            self._hear(tracer, event)

    def _hear(self, tracer: Any, event: Any) -> None:
        match event:
            case WorkerStarted():
                self._rank_started(tracer, event)
            case WorkerReady():
                self._end_rank((event.rank, event.incarnation), "")
            case WorkerCrashed(report=report) if report.rank is not None:
                self._crashed(tracer, report)
            case GroupDown():
                self._open(tracer, "restart", None)
            case GroupUp():
                self._close({"phalanx.epoch": event.epoch, "phalanx.ranks": event.world_size}, "")
            case GroupEnded():
                self._close({}, event.cause)
            case _:
                pass

    def _open(self, tracer: Any, what: str, context: Any) -> None:
        import opentelemetry.trace as api  # noqa: PLC0415  # as above

        with self._lock:
            interrupted, self._links = self._links, []
        if self._span is not None:  # one more death within the same restart
            for each in interrupted:
                self._span.add_link(each)
            return
        self._span = tracer.start_span(
            f"{self._worker} {what}",
            context=context,
            attributes={"phalanx.group": self._group},
            links=[api.Link(each) for each in interrupted],
        )

    def _close(self, about: dict[str, Any], problem: str) -> None:
        for key in list(self._ranks):
            self._end_rank(key, problem or "it was stopped before it was ready")
        span, self._span = self._span, None
        if span is not None:
            span.set_attributes(about)
            _end(span, problem)

    def _rank_started(self, tracer: Any, event: WorkerStarted) -> None:
        import opentelemetry.trace as api  # noqa: PLC0415  # as above

        above = None if self._span is None else api.set_span_in_context(self._span)
        about: dict[str, Any] = {
            "phalanx.group": self._group,
            "phalanx.epoch": event.epoch,
            "phalanx.incarnation": event.incarnation,
            "phalanx.device": event.device,
            "process.pid": event.pid or 0,
        }
        if event.rank is not None:
            about["phalanx.rank"] = event.rank
        span = tracer.start_span(
            f"{self._worker} start rank {event.rank}", context=above, attributes=about
        )
        self._ranks[event.rank, event.incarnation] = span

    def _crashed(self, tracer: Any, report: CrashReport) -> None:
        self._end_rank((report.rank, report.incarnation), str(report.reason))
        self._open(tracer, "restart", None)
        self._span.add_event("phalanx.rank_died", _about_death(report))

    def _end_rank(self, key: tuple[int | None, int], problem: str) -> None:
        span = self._ranks.pop(key, None)
        if span is not None:
            _end(span, problem)


def _end(span: Any, problem: str) -> None:
    import opentelemetry.trace as api  # noqa: PLC0415  # as above

    if problem:
        span.set_status(api.StatusCode.ERROR, problem)
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


def _outcome_of(call: Call) -> tuple[str, dict[str, Any], str]:
    """Return the outcome's name, what else is known, and what is wrong; decodes nothing."""
    about: dict[str, Any] = {}
    answers = [each for each in call.answers.values() if isinstance(each, Frame)]
    if answers:
        about["phalanx.epoch"] = max(each.epoch for each in answers)
    if call.reports:
        about["phalanx.deaths"] = len(call.reports)
    if call.rank is not None:
        about["phalanx.rank"] = call.rank
    if call.error is not None:
        kind = _kind_of(call.error)
        told = "" if kind == "cancelled" else f"{type(call.error).__name__}: {call.error}"
        return kind, about, told
    if call.failed is not None:
        about["phalanx.failed_rank"] = call.failed[1]
        return "error", about, f"rank {call.failed[1]} raised"
    if call.shape is Shape.GATHER:
        failed = sorted(rank for rank, each in call.answers.items() if _is_bad(each))
        if failed:
            about["phalanx.failed_ranks"] = failed
            return "partial", about, f"no value from ranks {', '.join(map(str, failed))}"
    return "ok", about, ""


def _is_bad(answer: Frame | Outcome) -> bool:
    if isinstance(answer, Outcome):
        return answer.kind is not OutcomeKind.OK
    return answer.kind == Kind.ERROR


def _kind_of(error: BaseException) -> str:
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
