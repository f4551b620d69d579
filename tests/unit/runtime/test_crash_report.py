"""A crash report is complete, survives travel, and is read in ten seconds."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.runtime.event import fields
from phalanx.runtime.observe.console_text import render
from phalanx.runtime.observe.crash_report import (
    CallFate,
    CallInProgress,
    CrashReport,
    ExitEvidence,
    Fate,
    Lost,
)
from phalanx.runtime.observe.events import WorkerCrashed, WorkerLabels
from phalanx.runtime.observe.log_channel import encode_record
from phalanx.supervision import ExitKind, ExitReason

LABELS = WorkerLabels(
    child="root/embed/1",
    group="embed",
    rank=1,
    incarnation=3,
    epoch=4,
    coordinates="tp=1",
    pid=4711,
    device="cuda:0",
)


def report(**more: Any) -> CrashReport:
    known: dict[str, Any] = {
        "at": "2026-01-02T03:04:05+00:00",
        "at_monotonic": 12.5,
        "ran_for": 61.0,
        "call": CallInProgress(method="forward", call_id=42, running_for=0.25),
        "logs": ('{"event": "step", "level": "info", "loss": 0.5}',),
        "stdout": "out\n",
        "stderr": "Traceback...\nboom\n",
        "last_words": "Fatal Python error: Aborted\n",
        "evidence": ExitEvidence(signal=9, oom="it rose", rusage={"ru_maxrss": 2048.0}),
        "host": "here",
        "driver": 4000,
    }
    reason = ExitReason(ExitKind.KILLED, "SIGKILL", None, 9)
    return CrashReport.of(LABELS, reason, **{**known, **more})


FATES = (
    CallFate(method="forward", call_id=42, fate=Fate.FAILED),
    CallFate(method="step", call_id=43, fate=Fate.SENT_AGAIN, retries_left=1),
    CallFate(method="step", call_id=44, fate=Fate.SENT_AGAIN, begun=False),
    CallFate(method="go", call_id=46, fate=Fate.SENT_AGAIN, retries_left=(1 << 30) - 1),
    CallFate(method="who", call_id=45, fate=Fate.KEPT),
)
CALLS = (
    "failed: forward (call 42); sent again: step (call 43, 1 retry left), step (call 44, no rank "
    "had begun it), go (call 46); answers of the other ranks kept: who (call 45); not sent yet, "
    "and waiting: 2"
)
texts = st.text(max_size=30)


@given(
    texts,
    texts,
    st.lists(texts),
    st.sampled_from(ExitKind),
    st.none() | st.integers(-(2**63), 2**63 - 1),
)
def test_a_report_survives_json_and_pickle(
    stdout: str, detail: str, logs: list[str], kind: ExitKind, code: int | None
) -> None:
    reason = ExitReason(kind, detail, code)
    sent = replace(report(stdout=stdout, logs=tuple(logs)), reason=reason)
    sent = replace(sent, decision=detail, why=stdout).settled(FATES, 3)

    assert CrashReport.from_json(sent.to_json()) == sent
    assert pickle.loads(pickle.dumps(sent)) == sent


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "or a torn one: Expecting value"),
        ("null", "the report is a NoneType, not dict"),
        ("[]", "the report is a list, not dict"),
        ("{}", "child is missing"),
        ('{"reason": 3}', "child is missing"),
        ("[" * 100_000, "recursion"),
        ('{"schema": "other/1"}', "its schema is 'other/1'"),
        ('{"schema": "phalanx.crash_report/9"}', "a later phalanx wrote it"),
    ],
)
def test_what_is_no_report_is_a_value_error(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        CrashReport.from_json(text)


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("group", 3, "group is a int, not str, in CrashReport"),
        ("rank", True, "rank is a bool"),
        ("rank", "1", "rank is a str"),
        ("reason", "killed", "reason is a str, not dict"),
        ("reason", {"kind": "bored"}, "'bored' is not a valid ExitKind, in ExitReason"),
        ("reason", {}, "kind is missing in ExitReason"),
        ("logs", "text", "logs is a str, not list"),
        ("logs", [3], "logs is a int"),
        ("calls", [{"method": "m", "call_id": 1, "fate": "lost"}], "is not a valid Fate"),
        ("evidence", {"rusage": {"ru_maxrss": "much"}}, "rusage is a str"),
        ("call", [], "call is a list, not dict"),
        ("schema", ["deep"], "its schema is .*deep"),
        ("reason", {"kind": ["deep"]}, "kind is a list"),
        ("ran_for", 10**400, "ran_for is out of range"),
        ("epoch", 2**63, "epoch is out of range"),
        ("at_monotonic", float("nan"), "at_monotonic is out of range"),
        ("evidence", {"rusage": {"ru_maxrss": 10**400}}, "rusage is out of range"),
    ],
)
def test_a_report_that_was_altered_is_refused_by_the_name_of_the_field(
    field: str, value: object, problem: str
) -> None:
    altered = {**json.loads(report().to_json()), field: value}

    with pytest.raises(ValueError, match=problem):
        CrashReport.from_json(json.dumps(altered))


def test_reports_of_earlier_and_later_versions_are_read() -> None:
    known = json.loads(report().to_json())
    later = {**known, "moods": ["grim"], "evidence": {**known["evidence"], "phase": "of the moon"}}
    earlier = {k: v for k, v in known.items() if k not in ("schema", "calls", "host", "waiting")}

    assert CrashReport.from_json(json.dumps(later)) == report()
    assert CrashReport.from_json(json.dumps(earlier)) == replace(report(), host="")


def test_the_first_lines_say_who_died_why_during_what_and_what_happens_next() -> None:
    why = "strategy one_for_all, 1 of 3 restarts in 60 s"
    told = report(decision="restart all ranks", why=why).settled(FATES, 2)

    head = told.render().splitlines()[:7]

    assert head == [
        "embed/1 #3 (root/embed/1) died: killed (SIGKILL)",
        "  doing     forward (call 42, running for 0.250 s)",
        "  then      restart all ranks, because strategy one_for_all, 1 of 3 restarts in 60 s",
        f"  calls     {CALLS}",
        "  evidence  SIGKILL; out of memory: it rose; at most 2.0 MiB resident",
        "  process   pid 4711, epoch 4, tp=1, cuda:0, ran for 61.000 s, on here",
        "  when      2026-01-02T03:04:05+00:00",
    ]


def test_a_name_with_a_newline_does_not_split_the_heading() -> None:
    told = replace(report(), group="em\nbed", child="root/em\nbed/1").render().splitlines()

    assert told[0] == r"em\x0abed/1 #3 (root/em\x0abed/1) died: killed (SIGKILL)"
    assert told[1].startswith("  doing ")


def test_of_many_calls_the_first_are_named_and_the_rest_counted() -> None:
    many = tuple(CallFate(method="step", call_id=n, fate=Fate.FAILED) for n in range(500))

    told = report().settled(many, 0)

    assert "step (call 7) and 92 more" in told.render()


def test_of_long_output_the_end_is_shown_and_the_rest_counted() -> None:
    text = report(stderr="".join(f"line {n}\n" for n in range(100))).render()

    assert "(60 lines before these)" in text
    assert "line 99" in text
    assert "line 59\n" not in text


def test_log_records_are_shown_without_what_the_head_says_already() -> None:
    record = {"event": "step", "level": "info", "rank": 1, "loss": 0.5}
    record["timestamp"] = "2026-01-02T03:04:05.678901+00:00"

    text = report(logs=(json.dumps(record), "[1]", "no json")).render()

    assert text.endswith("\n  03:04:05.678 info step loss=0.5\n  [1]\n  no json\n")


def test_a_log_record_that_is_nested_too_deeply_is_shown_as_it_is() -> None:
    deep = '{"event": ' + "[" * 100_000 + "]" * 100_000 + "}"

    assert deep in report(logs=(deep,)).render()


def test_a_worker_that_said_nothing_says_so() -> None:
    silent = report(call=None, logs=(), stdout="", stderr="", last_words="")

    text = silent.render()

    assert "doing     nothing: it was between calls" in text
    assert text.endswith("It left no output.\n")


def test_the_brief_form_fits_into_a_log_record_however_odd_its_texts_are() -> None:
    odd = "\x01" * 100_000
    big = report(stdout=odd, stderr=odd, last_words=odd, stacks=odd, logs=(odd, "\x02" * 1500))

    data = encode_record(fields(WorkerCrashed(report=big, at=0.0)))

    assert "truncated" not in json.loads(data)
    assert json.loads(data)["report"]["logs"] == ["\x02" * 1500]


def test_a_report_that_is_too_long_for_a_log_record_is_cut_and_stays_a_report() -> None:
    odd = "\U0001f525" * 100_000
    big = replace(
        report(stdout=odd, stderr=odd, last_words=odd, stacks=odd),
        reason=ExitReason(ExitKind.CRASH, "a key is missing; " * 10_000, 1),
    )

    record = json.loads(encode_record(fields(WorkerCrashed(report=big, at=0.0))))

    told = CrashReport.from_json(json.dumps(record["report"]))
    assert (told.rank, told.pid, told.reason.kind) == (1, 4711, ExitKind.CRASH)
    assert told.reason.detail.startswith("a key is missing; a key")


def test_the_event_of_a_crash_holds_the_report_as_json_can_and_shows_it_as_people_read_it() -> None:
    record = fields(WorkerCrashed(report=report(), at=12.5))

    shown = render(record, "[embed/1 #3 4711]").decode().splitlines()

    assert (record["event"], record["level"]) == ("phalanx.worker_crashed", "error")
    assert CrashReport.from_json(json.dumps(record["report"])) == report()
    assert shown[0].endswith("error    [embed/1 #3 4711] phalanx.worker_crashed")
    assert shown[1:] == [f"[embed/1 #3 4711]   {line}" for line in report().render().splitlines()]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, ""),
        ({"node": 2}, "the rank alone, on node 2"),
        ({"lost": Lost.LINK}, "the link to it"),
        ({"lost": Lost.NODE, "node": 2}, "node 2, with all of its ranks; not yet fenced"),
        ({"lost": Lost.NODE, "node": 2, "fenced": "its last word"}, "fenced: its last word"),
    ],
)
def test_a_report_says_which_of_rank_link_and_node_was_lost(
    given: dict[str, Any], told: str
) -> None:
    whole = report(**given)

    lines = [line for line in whole.render().splitlines() if line.startswith("  lost ")]

    assert CrashReport.from_json(whole.to_json()) == whole
    assert len(lines) == bool(told)
    assert told in "".join(lines)
