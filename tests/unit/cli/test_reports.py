"""`phalanx reports list` lists crash reports, `phalanx reports show` shows one."""

from __future__ import annotations

import datetime as dt
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from phalanx.cli import main
from phalanx.cli.reports import moment
from phalanx.runtime import CallInProgress, CrashReport, ExitEvidence, ReportFolder, WorkerLabels
from phalanx.supervision import ExitKind, ExitReason, SpecError

KILLED = ExitReason(ExitKind.KILLED, "SIGKILL; out of memory", None, 9)
HUNG = ExitReason(ExitKind.UNRESPONSIVE, "step ran for 5.0 s, hang_after=5 s", None, 9)
WHY = "one_for_all, number 1 of at most 3 restarts in 60 s"
LEFT = ExitReason(ExitKind.CRASH, "exit code 3", 3)


def report(minute: int, rank: int, reason: ExitReason, **more: Any) -> CrashReport:
    return CrashReport.of(
        WorkerLabels(child=f"root/tp/{rank}", group="tp", rank=rank, incarnation=2, pid=100 + rank),
        reason,
        at=f"2026-01-02T03:{minute:02}:05.000000+00:00",
        at_monotonic=12.5,
        decision="restart ranks 0, 1",
        why=WHY,
        **more,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    step = CallInProgress(method="step", call_id=42, running_for=5.0)
    reports = (
        report(1, 0, KILLED, call=step, evidence=ExitEvidence(signal=9, oom="oom_kill rose")),
        report(3, 1, LEFT, stderr="\x1b[2J\x07gone\n"),
        report(2, 1, HUNG, call=step, stacks="Thread 1\n  in step\n"),
    )
    for each in reports:
        ReportFolder(tmp_path).write(each)
    (tmp_path / "torn.json").write_text('{"child": "ro')
    return tmp_path


def told(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(words)
    seen = capsys.readouterr()
    return code, seen.out, seen.err


def test_the_list_has_a_line_per_death_the_newest_first_and_as_json_the_reports(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = told(capsys, "reports", str(folder))

    head, *lines = out.splitlines()
    assert code == 0
    assert head.split() == ["WHEN", "CHILD", "RANK", "#", "REASON", "IN", "CALL", "THEN", "FILE"]
    assert [line.split()[2:5] for line in lines] == [
        ["root/tp/1", "1", "2"],
        ["root/tp/1", "1", "2"],
        ["root/tp/0", "0", "2"],
    ]
    assert "crash (exit code 3)" in lines[0]
    assert "unresponsive" in lines[1]
    assert "killed (SIGKILL; out of memory)" in lines[2]
    assert "step" in lines[2]
    assert all("restart ranks 0, 1" in line for line in lines)
    assert err.startswith(f"passed over {folder}/torn.json: not a crash report, or a torn one")

    found = json.loads(told(capsys, "reports", str(folder), "--json")[1])
    assert [each["rank"] for each in found] == [1, 1, 0]
    assert found[2]["call"]["method"] == "step"
    again = CrashReport.from_json(Path(found[2]["file"]).read_text())
    assert again == CrashReport.from_json(json.dumps(found[2]))


@pytest.mark.parametrize(
    ("words", "minutes"),
    [
        (["--rank", "0"], ["01"]),
        (["--group", "tp"], ["03", "02", "01"]),
        (["--group", "dp"], []),
        (["--reason", "unresponsive"], ["02"]),
        (["--method", "step"], ["02", "01"]),
        (["--oom"], ["01"]),
        (["--limit", "2"], ["03", "02"]),
        (["--since", "2026-01-02T03:02:00+00:00"], ["03", "02"]),
        (["--since", "1s"], []),
        (["--since", "9999-12-31T23:59"], []),
        (["--method", "step", "--rank", "1"], ["02"]),
    ],
)
def test_only_those_asked_for_are_listed(
    folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], minutes: list[str]
) -> None:
    _, out, _ = told(capsys, "reports", str(folder), "--json", *words)

    assert [each["at"][14:16] for each in json.loads(out)] == minutes


def test_the_newest_report_is_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = told(capsys, "reports", "show", "latest", str(folder))
    old = told(capsys, "report", "latest", str(folder))

    assert code == 0
    assert err.startswith(f"passed over {folder}/torn.json: ")
    assert old == (0, out, f"phalanx report is now: phalanx reports show\n{err}")
    assert out.splitlines()[:3] == [
        "tp/1 #2 (root/tp/1) died: crash (exit code 3)",
        "  doing     nothing: it was between calls",
        f"  then      restart ranks 0, 1, because {WHY}",
    ]
    assert "\\x1b[2J\\x07gone" in out  # what a worker wrote does not command the terminal


def test_a_report_is_found_by_its_path_by_its_name_and_in_the_folder_of_the_environment(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, listed, _ = told(capsys, "reports", str(folder), "--reason", "unresponsive")
    name = listed.splitlines()[1].split()[-1]
    _, by_path, _ = told(capsys, "reports", "show", str(folder / name))
    _, by_name, _ = told(capsys, "reports", "show", name, str(folder))
    monkeypatch.setenv("HOME", str(folder.parent))
    monkeypatch.setenv("PHALANX_REPORT_DIR", f"~/{folder.name}")
    _, by_environment, _ = told(capsys, "reports", "show", name)
    _, as_json, _ = told(capsys, "reports", "show", name, "--json")

    assert by_path == by_name == by_environment
    assert "--- stacks before it was killed\n  Thread 1\n    in step\n" in by_path
    assert CrashReport.from_json(as_json).reason == HUNG


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["reports"], "set PHALANX_REPORT_DIR"),
        (["reports", "list", "{}/absent"], "absent': is not a folder"),
        (["reports", "list", "{}/" + 300 * "x"], "x': is not a folder"),
        (["reports", "show", 300 * "x", "{}"], "x': cannot be read: "),
        (["reports", "{}", "--since", "soon"], "--since='soon'"),
        (["reports", "{}", "--limit", "0"], "--limit=0"),
        (["reports", "show", "latest"], "set PHALANX_REPORT_DIR"),
        (["reports", "show", "latest", "{}/empty"], "has no crash reports"),
        (["reports", "show", "absent.json", "{}"], "absent.json': is not there"),
        (["reports", "show", "{}/torn.json"], "torn.json': not a crash report, or a torn one"),
        (["reports", "show", "torn.json", "{}"], "torn.json': not a crash report, or a torn one"),
    ],
)
def test_mistakes_are_one_line_that_names_the_file(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    problem: str,
) -> None:
    monkeypatch.delenv("PHALANX_REPORT_DIR", raising=False)
    (folder / "empty").mkdir()

    code, out, err = told(capsys, *(word.format(folder) for word in words))

    assert (code, out) == (2, "")
    assert problem in err
    assert err.count("\n") == 1


def test_an_empty_folder_is_no_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = told(capsys, "reports", str(tmp_path))
    as_json = told(capsys, "reports", str(tmp_path), "--json")

    assert (code, out, err) == (0, "", f"no crash reports in {tmp_path}\n")
    assert as_json == (0, "[]\n", "")


def test_times_are_relative_or_absolute() -> None:
    now = dt.datetime(2026, 1, 2, 12, tzinfo=dt.UTC)

    assert now - moment("90m", now) == dt.timedelta(minutes=90)
    assert moment("2026-01-02T11:00:00Z", now) == dt.datetime(2026, 1, 2, 11, tzinfo=dt.UTC)
    with pytest.raises(SpecError):
        moment("90 minutes", now)


@pytest.mark.parametrize("zone", ["Asia/Tokyo", "America/New_York"])
@pytest.mark.parametrize(
    "words",
    [
        ["--since", "99999999999999d"],
        ["--since", "9" * 5000 + "s"],
        ["--since", "0001-01-01"],
        ["--limit", "9" * 30],
    ],
    ids=["days", "digits", "first day", "limit"],
)
def test_what_is_beyond_all_dates_and_numbers_is_everything(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    zone: str,
) -> None:
    undated = replace(report(4, 0, KILLED), at="once upon a time")
    (folder / "undated.json").write_text(undated.to_json())
    with monkeypatch.context() as patch:
        patch.setenv("TZ", zone)
        time.tzset()
        code, out, _ = told(capsys, "reports", str(folder), *words)
    time.tzset()

    assert (code, len(out.splitlines())) == (0, 1 + 4)
