"""A crash report is complete, survives travel, and is read in ten seconds."""

from __future__ import annotations

import errno
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.runtime.console import render_record
from phalanx.runtime.events import ReportNotWritten, ReportWritten, WorkerCrashed, fields
from phalanx.runtime.labels import WorkerLabels
from phalanx.runtime.logs import encode_record
from phalanx.runtime.report import CallInProgress, CrashReport, ExitEvidence
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
        "evidence": ExitEvidence(signal=9, oom="oom_kill rose by 1", rusage={"ru_maxrss": 9.5}),
    }
    reason = ExitReason(ExitKind.KILLED, "SIGKILL", None, 9)
    return CrashReport.of(LABELS, reason, **{**known, **more})


texts = st.text(max_size=30)


@given(texts, texts, st.lists(texts), st.sampled_from(ExitKind), st.none() | st.integers())
def test_a_report_survives_json_and_pickle(
    stdout: str, detail: str, logs: list[str], kind: ExitKind, code: int | None
) -> None:
    sent = report(stdout=stdout, logs=tuple(logs)).decided(detail, stdout)
    sent = CrashReport.from_json(sent.to_json()) if code is None else sent

    assert CrashReport.from_json(sent.to_json()) == sent
    assert pickle.loads(pickle.dumps(sent)) == sent


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", '{"reason": 3}', '{"reason": {}}'])
def test_what_is_no_report_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError):
        CrashReport.from_json(text)


def test_the_first_lines_say_who_died_why_during_what_and_what_happens_next() -> None:
    told = report().decided("restart all ranks", "strategy one_for_all, 1 of 3 restarts in 60 s")

    head = told.render().splitlines()[:6]

    assert head == [
        "embed/1 #3 (root/embed/1) died: killed (SIGKILL)",
        "  doing     forward (call 42, running for 0.250 s)",
        "  then      restart all ranks, because strategy one_for_all, 1 of 3 restarts in 60 s",
        "  process   pid 4711, epoch 4, tp=1, cuda:0, ran for 61.000 s",
        "  when      2026-01-02T03:04:05+00:00",
        "  evidence  signal 9, out of memory: oom_kill rose by 1, ru_maxrss=9.5",
    ]


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


def test_a_worker_that_said_nothing_says_so() -> None:
    silent = report(call=None, logs=(), stdout="", stderr="", last_words="")

    text = silent.render()

    assert "doing     nothing: it was between calls" in text
    assert text.endswith("It left no output.\n")


def test_writing_leaves_one_whole_file_that_only_its_owner_reads(tmp_path: Path) -> None:
    folder = tmp_path / "made" / "here"

    written = report().write(folder)

    assert isinstance(written, ReportWritten)
    assert [str(path) for path in folder.iterdir()] == [written.path]
    assert Path(written.path).stat().st_mode & 0o777 == 0o600
    assert CrashReport.from_json(Path(written.path).read_text()) == report()


def test_a_name_that_is_a_path_does_not_leave_the_directory(tmp_path: Path) -> None:
    told = CrashReport.of(
        WorkerLabels(child="x", group="../../etc/evil", rank=0),
        ExitReason(ExitKind.CRASH),
        at="now",
        at_monotonic=0.0,
    )

    written = told.write(tmp_path)

    assert isinstance(written, ReportWritten)
    assert Path(written.path).parent == tmp_path


def test_a_directory_that_cannot_be_made_is_told_and_not_raised(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    told = report().write(tmp_path / "file" / "reports")

    assert isinstance(told, ReportNotWritten)
    assert told.directory == str(tmp_path / "file" / "reports")


def test_a_full_disk_is_told_and_leaves_no_half_file(tmp_path: Path) -> None:
    # A limit on the size of files stands for the disk: the write fails half-way.
    code = f"""
import resource, signal, sys
from pathlib import Path
from phalanx.runtime.logs import encode_record
from phalanx.runtime.report import CrashReport
report = CrashReport.from_json(sys.stdin.read())
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))
told = report.write({str(tmp_path)!r})
print(type(told).__name__, told.problem, sep="|")
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=report().to_json(),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )

    kind, _, problem = done.stdout.strip().partition("|")
    assert kind == "ReportNotWritten"
    assert os.strerror(errno.EFBIG) in problem
    assert list(tmp_path.iterdir()) == []


def test_the_brief_form_fits_into_a_log_record_however_odd_its_texts_are() -> None:
    odd = "\x01" * 100_000
    big = report(stdout=odd, stderr=odd, last_words=odd, stacks=odd, logs=(odd, "\x02" * 1500))

    data = encode_record(fields(WorkerCrashed(report=big, at=0.0)))

    assert "truncated" not in json.loads(data)
    assert json.loads(data)["report"]["logs"] == ["\x02" * 1500]


def test_a_crash_on_the_console_is_the_report_as_people_read_it() -> None:
    record = fields(WorkerCrashed(report=report(), at=12.5))

    shown = render_record("[embed/1 #3 4711]", record).decode().splitlines()

    assert shown[0].endswith("error    [embed/1 #3 4711] phalanx.worker_crashed")
    assert shown[1:] == [f"[embed/1 #3 4711]   {line}" for line in report().render().splitlines()]


def test_the_event_of_a_crash_holds_the_report_as_json_can() -> None:
    record = fields(WorkerCrashed(report=report(), at=12.5))

    assert record["event"] == "phalanx.worker_crashed"
    assert record["level"] == "error"
    assert CrashReport.from_json(json.dumps(record["report"])) == report()
