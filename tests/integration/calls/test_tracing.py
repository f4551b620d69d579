"""Calls, starts and restarts as OpenTelemetry spans, from the caller to the ranks."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Lock
from typing import Any

import pytest
from opentelemetry import context, trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter as Spans
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import SpanKind, StatusCode
from tests.support.node_engine import LocalNodes
from tests.support.options import Make
from tests.support.programs import run_python
from tests.support.workers import Echo, Late, StartFails

from phalanx.actors import Executor, Launch, WorkerContext
from phalanx.actors.calls.call import Shape
from phalanx.actors.observe.tracing import GroupTrace
from phalanx.runtime import CrashReport, GroupUp, Runtime, WorkerCrashed, WorkerLabels
from phalanx.supervision import ExitKind, ExitReason, Intensity, StartFailed, Strategy

LONG = 30.0
KEYS = ("call", "method", "outcome")


class LineExporter(SpanExporter):
    """Appends each span to a file, which outlives the worker."""

    def __init__(self, path: str) -> None:
        self._path = path

    def export(self, spans: Any) -> SpanExportResult:
        for span in spans:
            with open(self._path, "a") as file:
                file.write(span.to_json(indent=None) + "\n")
        return SpanExportResult.SUCCESS


class Traced(Echo):
    """Has a provider of its own, as users set one up."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def on_start(self, ctx: WorkerContext) -> None:
        self.started_in = trace.get_current_span().get_span_context().trace_id
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(LineExporter(self.path)))
        trace.set_tracer_provider(provider)

    def trace_of_start(self) -> int:
        return self.started_in

    def inner(self) -> int:
        with trace.get_tracer("mine").start_as_current_span("inner") as span:
            return span.get_span_context().trace_id

    def count_to(self, end: int) -> Iterator[int]:
        yield from range(end)

    def later(self, value: Any) -> Late:
        return Late(value)


@pytest.fixture
def spans() -> Iterator[Spans]:
    """A provider for this process, as long as the test runs."""
    before = trace._TRACER_PROVIDER
    exporter = Spans()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace._TRACER_PROVIDER = provider
    yield exporter
    trace._TRACER_PROVIDER = before


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "spans"


def served(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def calls(exporter: Spans) -> list[ReadableSpan]:
    return [span for span in exporter.get_finished_spans() if span.kind is SpanKind.CLIENT]


def awaited(exporter: Spans, name: str) -> ReadableSpan:
    """Return the last span called *name*, once it has ended on the thread that ends it."""
    deadline = time.monotonic() + LONG
    while True:
        found = [span for span in exporter.get_finished_spans() if span.name == name]
        if found:
            return found[-1]
        assert time.monotonic() < deadline, [s.name for s in exporter.get_finished_spans()]
        time.sleep(0.002)


def about(span: ReadableSpan) -> dict[str, Any]:
    assert span.attributes is not None
    return dict(span.attributes)


def place(span: Any) -> tuple[str, str]:
    """Return the numbers of its trace and of itself, as they stand in what workers write."""
    context = span.get_span_context()
    return f"0x{context.trace_id:032x}", f"0x{context.span_id:016x}"


def placed_above(each: dict[str, Any]) -> tuple[str, str]:
    """Return the trace of what a worker wrote, and the span above it."""
    return each["context"]["trace_id"], each["parent_id"]


def parent(span: ReadableSpan) -> int:
    assert span.parent is not None
    return span.parent.span_id


def test_a_call_is_a_span_and_each_rank_a_child_of_it_and_starts_are_spans_too(
    make: Make, spans: Spans, path: Path
) -> None:
    with trace.get_tracer("mine").start_as_current_span("set-up") as above:
        ex = make(Traced, 2, args=(str(path),), name="traced")
    with trace.get_tracer("mine").start_as_current_span("request") as request:
        assert ex.collective_rpc("echo", LONG, (1,)) == [1, 1]
    echoed = served(path)
    inner = ex.call("inner", LONG, rank=0)
    starts = ex.collective_rpc("trace_of_start", LONG)

    call = calls(spans)[0]
    assert parent(call) == request.get_span_context().span_id
    assert (call.name, call.status.status_code) == ("Traced/echo", StatusCode.UNSET)
    assert about(call) == {
        "rpc.system": "phalanx",
        "rpc.service": "Traced",
        "rpc.method": "echo",
        "phalanx.group": "traced",
        "phalanx.method": "echo",
        "phalanx.call": "collective",
        "phalanx.call_id": 1,
        "phalanx.epoch": 1,
        "phalanx.outcome": "ok",
    }
    assert sorted(each["attributes"]["phalanx.rank"] for each in echoed) == [0, 1]
    for each in echoed:
        assert placed_above(each) == place(call)
        assert (each["name"], each["kind"]) == ("Traced/echo", "SpanKind.SERVER")
        known = each["attributes"]
        assert (known["phalanx.group"], known["phalanx.epoch"]) == ("traced", 1)
        assert (known["phalanx.incarnation"], known["phalanx.outcome"]) == (1, "ok")
    assert f"0x{inner:032x}" == place(calls(spans)[1])[0]
    assert [each["name"] for each in served(path)][2:4] == ["inner", "Traced/inner"]
    assert starts == [above.get_span_context().trace_id] * 2
    started = awaited(spans, "Traced start")
    assert parent(started) == above.get_span_context().span_id
    assert sorted(each.name for each in started.events) == [
        *("phalanx.rank_ready", "phalanx.rank_ready"),
        *("phalanx.rank_started", "phalanx.rank_started"),
    ]
    assert started.status.status_code is StatusCode.UNSET


def test_a_call_that_fails_says_how(make: Make, spans: Spans, path: Path, gate: Path) -> None:
    ex = make(Traced, 1, args=(str(path),))
    fails: list[tuple[Callable[[], Any], str, str]] = [
        (lambda: ex.collective_rpc("fail", LONG), "error", "rank"),
        (lambda: ex.collective_rpc("echo", LONG, (Lock(),)), "error", "NotPicklable"),
        (lambda: ex.collective_rpc("gated", 0.05, (str(gate),)), "timeout", "CallTimeout"),
        (lambda: ex.collective_rpc("kill_self", LONG, (0,)), "died", "WorkerDied"),
    ]

    for number, (call, outcome, problem) in enumerate(fails, 1):
        with pytest.raises(Exception):  # noqa: B017  # which one, others test
            call()

        if outcome == "timeout":
            gate.touch()
        assert len(calls(spans)) == number
        span = calls(spans)[-1]
        assert about(span)["phalanx.outcome"] == outcome
        assert span.status.status_code is StatusCode.ERROR
        assert problem in str(span.status.description)

    assert about(calls(spans)[0])["phalanx.failed_rank"] == 0
    in_rank = served(path)[0]
    assert in_rank["status"]["status_code"] == "ERROR"
    assert in_rank["attributes"]["error.type"] == "ValueError"
    assert [event["name"] for event in in_rank["events"]] == ["exception"]


def test_a_gather_tells_which_ranks_have_no_value(make: Make, spans: Spans, path: Path) -> None:
    ex = make(Traced, 2, args=(str(path),), strategy=Strategy.ONE_FOR_ONE)

    ex.gather("kill_self", LONG, (1,))

    (call,) = calls(spans)
    assert about(call)["phalanx.outcome"] == "partial"
    assert about(call)["phalanx.failed_ranks"] == (1,)
    assert about(call)["phalanx.call"] == "gather"


def test_futures_streams_tells_and_awaits_end_their_spans_once(
    make: Make, spans: Spans, path: Path
) -> None:
    ex = make(Traced, 1, args=(str(path),))

    assert ex.collective_rpc("later", args=(5,), non_block=True).result(LONG) == [5]
    assert list(ex.stream("count_to", LONG, (3,), rank=0)) == [0, 1, 2]
    assert asyncio.run(ex.aio.call("echo", LONG, (7,), rank=0)) == 7
    with ex.stream("count_to", LONG, (10**6,), rank=0) as early:
        next(early)
    ex.tell("note", args=(str(path) + ".note", "told"))
    assert ex.submit("echo", args=(8,)).result(LONG) == 8
    ex.collective_rpc("echo", LONG)
    ex.close()

    ended = [tuple(about(span)[f"phalanx.{key}"] for key in KEYS) for span in calls(spans)]
    assert sorted(ended) == [
        ("collective", "echo", "ok"),
        ("collective", "later", "ok"),
        ("collective", "note", "ok"),
        ("pool", "echo", "ok"),
        ("single", "echo", "ok"),
        ("stream", "count_to", "cancelled"),  # it was the caller's wish, and so is no error
        ("stream", "count_to", "ok"),
    ]
    assert {span.status.status_code for span in calls(spans)} == {StatusCode.UNSET}
    assert [each["name"] for each in served(path)] == [
        *("Traced/later", "Traced/count_to", "Traced/echo", "Traced/count_to"),
        *("Traced/note", "Traced/echo", "Traced/echo"),
    ]


def test_a_death_is_an_event_of_the_call_and_the_restart_links_to_it(
    make: Make, spans: Spans, path: Path
) -> None:
    ex = make(Traced, 2, args=(str(path),), name="healing", intensity=Intensity(9, 60.0))

    assert ex.collective_rpc("kill_self", LONG, (0,), retries=1) == [2, 2]

    (call,) = calls(spans)
    (event,) = call.events
    assert event.name == "phalanx.rank_died"
    assert event.attributes is not None
    assert dict(event.attributes) == {
        "phalanx.group": "healing",
        "phalanx.rank": 0,
        "phalanx.incarnation": 1,
        "phalanx.epoch": 1,
        "phalanx.reason": "killed (SIGKILL)",
        "phalanx.decision": "restart ranks 0, 1",
        "phalanx.fate": "sent_again",
    }
    assert (about(call)["phalanx.outcome"], about(call)["phalanx.epoch"]) == ("ok", 2)
    assert about(call)["phalanx.deaths"] == 1
    restart = awaited(spans, "Traced restart")
    assert [link.context for link in restart.links] == [call.get_span_context()]
    names = [each.name for each in restart.events]
    assert sorted(names) == [
        "phalanx.rank_died",
        *("phalanx.rank_ready", "phalanx.rank_ready"),
        *("phalanx.rank_started", "phalanx.rank_started"),
    ]
    assert about(restart)["phalanx.epoch"] == 2
    again = [each for each in served(path) if each["attributes"]["phalanx.incarnation"] == 2]
    assert {placed_above(each) for each in again} == {place(call)}


def test_a_second_death_belongs_to_the_restart_that_is_under_way(
    spans: Spans,
) -> None:
    def of(rank: int) -> Any:
        made = told.call(told.telemetry.tracer, "step", Shape.SINGLE, 1, rank, is_stream=False)
        made.died(report, None)
        made.refused(RuntimeError("died"))
        return calls(spans)[-1].get_span_context()

    told = GroupTrace("g", "W")
    labels = WorkerLabels(child="g/0", group="g", rank=0)
    report = CrashReport.of(labels, ExitReason(ExitKind.KILLED), at="now", at_monotonic=0.0)

    first = of(0)
    told.on_event(WorkerCrashed(report=report, at=0.0))
    second = of(1)
    told.on_event(WorkerCrashed(report=report, at=0.0))
    told.on_event(GroupUp(group="g", epoch=2, world_size=2, took=1.0, at=1.0))

    restart = awaited(spans, "W restart")
    assert [link.context for link in restart.links] == [first, second]
    assert [event.name for event in restart.events] == ["phalanx.rank_died"] * 2


def test_a_start_that_fails_ends_its_spans_with_the_reason(make: Make, spans: Spans) -> None:
    with pytest.raises(StartFailed):
        make(StartFails, 1, args=("raise",))

    assert awaited(spans, "StartFails start").status.status_code is StatusCode.ERROR


def test_what_is_not_sampled_is_not_sampled_in_the_worker_either(
    make: Make, spans: Spans, path: Path
) -> None:
    trace._TRACER_PROVIDER = TracerProvider(sampler=ALWAYS_OFF)
    ex = make(Traced, 1, args=(str(path),))

    ex.collective_rpc("echo", LONG)

    assert calls(spans) == []
    assert served(path) == []


def test_without_a_provider_nothing_travels(make: Make, path: Path) -> None:
    ex = make(Traced, 1, args=(str(path),))

    ex.collective_rpc("inner", LONG)

    assert [each["name"] for each in served(path)] == ["inner"]
    assert context.get_current() == {}


def test_nothing_of_phalanx_imports_opentelemetry() -> None:
    code = """
import sys
from phalanx import Executor
from tests.support.workers import Echo
from tests.support.transport import TRANSPORT
from phalanx.runtime import Runtime
with Runtime(console=None, stream=False) as runtime:
    with Executor(Echo, 1, runtime=runtime, launch=dict(preload=(), transport=TRANSPORT)) as ex:
        def seen(worker):
            import sys
            return sorted(name for name in sys.modules if "opentelemetry" in name)
        print(ex.collective_rpc(seen), [n for n in sys.modules if "opentelemetry" in n])
"""
    done = run_python("-c", code, cwd=Path(__file__).parents[3])

    assert (done.returncode, done.stdout) == (0, "[[]] []\n"), done.stderr


def test_the_spans_of_ranks_on_several_nodes_are_children_of_their_call(
    runtime: Runtime, spans: Spans, path: Path
) -> None:
    cluster = LocalNodes(ranks_per_node=1, node_timeout=LONG)
    given: dict[str, Any] = {"cluster": cluster, "devices": "cpu", "launch": Launch(preload=())}
    with Executor(Traced, 2, args=(str(path),), runtime=runtime, **given) as ex:
        inner = ex.collective_rpc("inner", LONG)
        assert [node.ranks for node in ex.status().nodes] == [(0,), (1,)]
        awaited(spans, "Traced start")

    (call,) = calls(spans)
    ranks = [each for each in served(path) if each["name"] == "Traced/inner"]
    assert [f"0x{each:032x}" for each in inner] == [place(call)[0]] * 2
    assert sorted(each["attributes"]["phalanx.rank"] for each in ranks) == [0, 1]
    assert {placed_above(each) for each in ranks} == {place(call)}
    own = {each["parent_id"] for each in served(path) if each["name"] == "inner"}
    assert own == {each["context"]["span_id"] for each in ranks}
