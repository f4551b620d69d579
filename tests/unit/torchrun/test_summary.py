"""The summary of a failed run: what an error file says, and what is said without one."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from phalanx.integrations.torchrun.logs import LogPlan, LogSpec
from phalanx.integrations.torchrun.summary import Failure, pass_on, root_cause, summary
from phalanx.runtime import WorkerExited
from phalanx.supervision import ExitKind, ExitReason


def exited(rank: int, code: int | None = None, number: int | None = None) -> WorkerExited:
    return WorkerExited(
        child="",
        group="",
        rank=rank,
        incarnation=1,
        epoch=1,
        pid=100 + rank,
        reason=ExitReason(ExitKind.CRASH, code=code, signal=number),
        ran_for=1.0,
        at=time.monotonic(),
    )


@pytest.fixture
def logs(tmp_path: Path) -> LogPlan:
    for rank in range(2):
        (tmp_path / "attempt_0" / str(rank)).mkdir(parents=True)
    return LogPlan(LogSpec(redirects=(0, 0), tee=(0, 0)), tmp_path)


def test_a_summary_has_the_first_failure_apart_and_its_traceback(logs: LogPlan) -> None:
    record = {
        "message": "E: b",
        "extraInfo": {"py_callstack": "line 1\nE: b\x1b[2J\x9b", "timestamp": "86400"},
    }
    Path(logs.error_file(1, 0)).write_text(json.dumps({"message": record}))

    first = Failure.of(exited(1, code=3), logs)
    other = Failure.of(exited(0, number=signal.SIGTERM), logs)
    assert first is not None
    assert other is not None
    assert root_cause([other, first]) is first
    text = summary("train.py", [other, first], first)

    others, _, root = text.partition("Root Cause (first observed failure):\n")
    assert "train.py FAILED\n" in others
    assert "[0]:\n" in others
    assert "  exitcode  : -15 (pid: 100)  (SIGTERM)\n" in others
    assert "  traceback : Signal 15 (SIGTERM) received by PID 100\n" in others
    assert root.startswith("[1]:\n  time      : 1970-01-0")
    assert "  exitcode  : 3 (pid: 101) \n" in root
    assert f"  error_file: {logs.error_file(1, 0)}\n" in root
    assert "  traceback : line 1\n  E: b\\x1b[2J\\x9b\n" in root


def test_a_rank_that_has_succeeded_is_no_failure(logs: LogPlan) -> None:
    assert Failure.of(exited(0, code=0), logs) is None


def test_an_error_of_a_round_before_is_not_that_of_a_rank_that_ends_at_its_start(
    tmp_path: Path,
) -> None:
    file = tmp_path / "error"
    file.write_text('{"message": "text"}')
    logs = LogPlan(LogSpec(redirects=(0,), tee=(0,)), None, (str(file),))

    own = Failure.of(exited(0, code=1), logs)
    os.utime(file, (0, 0))
    before = Failure.of(exited(0, code=1), logs)

    assert own is not None
    assert before is not None
    assert (own.message, before.record) == ("text", None)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "no traceback"),
        ("[1]", "no traceback"),
        ('{"message": "text", "timestamp": "x"}', "text"),
        ('{"message": {"message": "text", "extraInfo": 5}}', "text"),
        ('{"message": {"extraInfo": {"timestamp": null}}}', "<N/A>"),
        ('{"message": "text", "timestamp": 1e300}', "text"),
        ('{"message": "text", "timestamp": "inf"}', "text"),
        ('{"message": "text", "timestamp": NaN}', "text"),
    ],
)
def test_an_error_file_may_hold_anything(logs: LogPlan, content: str, message: str) -> None:
    Path(logs.error_file(0, 0)).write_text(content)

    failure = Failure.of(exited(0, code=1), logs)

    assert failure is not None
    assert failure.message.startswith(message)
    assert abs(failure.at - time.time()) < 60


def test_the_first_error_reaches_the_launchers_own_launcher(logs: LogPlan, tmp_path: Path) -> None:
    record: dict[str, Any] = {"message": {"message": "E: b", "extraInfo": {}}}
    Path(logs.error_file(0, 0)).write_text(json.dumps(record))
    first = Failure.of(exited(0, code=9), logs)
    assert first is not None

    pass_on(first, str(tmp_path / "mine.json"))

    record["message"]["errorCode"] = 9
    assert json.loads((tmp_path / "mine.json").read_text()) == record
