"""A folder of crash reports: whole files, the newest ones, and nothing that is none is harmed."""

from __future__ import annotations

import datetime as dt
import os
import time
from dataclasses import replace
from pathlib import Path
from unittest.mock import ANY

import pytest

from phalanx.runtime.observe.crash_report import CrashReport, Lost
from phalanx.runtime.observe.events import ReportNotWritten, ReportWritten, WorkerLabels
from phalanx.runtime.observe.report_folder import ReportFolder, read_report
from phalanx.supervision import ExitKind, ExitReason, SpecError

ROOT = Path(__file__).parents[3]


def report(second: int = 0, group: str = "embed") -> CrashReport:
    return CrashReport.of(
        WorkerLabels(child=f"{group}/1", group=group, rank=1, incarnation=3, pid=4711),
        ExitReason(ExitKind.KILLED, "SIGKILL", None, 9),
        at=f"2026-01-02T03:04:{second:02}.000000+00:00",
        at_monotonic=12.5,
        stderr="boom " * 1000,
    )


def written(folder: ReportFolder, told: CrashReport) -> Path:
    event = folder.write(told)
    assert isinstance(event, ReportWritten), event
    return Path(event.path)


def test_writing_leaves_one_whole_file_that_only_its_owner_reads(tmp_path: Path) -> None:
    folder = ReportFolder(tmp_path / "made" / "here")

    path = written(folder, report())

    assert list(folder.path.iterdir()) == [path]
    assert path.stat().st_mode & 0o777 == 0o600
    assert folder.path.stat().st_mode & 0o777 == 0o700
    assert read_report(path).report == report()


@pytest.mark.parametrize("group", ["../../etc/evil", "x" * 500, "\u5f3e" * 300, "a b\nc"])
def test_whatever_a_group_is_called_its_file_has_a_name_in_the_folder(
    tmp_path: Path, group: str
) -> None:
    path = written(ReportFolder(tmp_path), report(group=group))

    assert path.parent == tmp_path
    assert [each.report for each in ReportFolder(tmp_path).read()] == [report(group=group)]


def test_the_newest_are_kept_and_nothing_else_is_touched(tmp_path: Path) -> None:
    mine = tmp_path / "my-notes.json"
    mine.write_text("{}")
    abandoned, being_written = tmp_path / ".phalanx-report-a", tmp_path / ".phalanx-report-b"
    abandoned.touch()
    being_written.touch()
    long_ago = time.time() - 7200
    os.utime(abandoned, (long_ago, long_ago))
    folder = ReportFolder(tmp_path, keep=3)

    for second in (5, 1, 4, 2, 3):
        written(folder, report(second))

    found = [each.report.at[17:19] for each in folder.read() if each.report is not None]
    assert found == ["05", "04", "03"]
    assert mine.exists()
    assert being_written.exists()
    assert not abandoned.exists()


def test_what_is_written_after_the_clock_was_set_back_is_the_newest(tmp_path: Path) -> None:
    folder = ReportFolder(tmp_path, keep=3)
    ahead = dt.datetime.now(dt.UTC) + dt.timedelta(hours=1)
    written(folder, replace(report(), at=ahead.isoformat(timespec="microseconds")))

    for second in (5, 1, 4):
        written(folder, report(second))

    found = [each.report.at[17:19] for each in folder.read() if each.report is not None]
    assert found == ["04", "01", "05"]


def test_what_is_no_report_is_passed_over_with_the_reason(tmp_path: Path) -> None:
    folder = ReportFolder(tmp_path)
    whole = written(folder, report())
    (tmp_path / "torn.json").write_text(whole.read_text()[:200])
    (tmp_path / "foreign.json").write_text('{"name": "package"}')
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "empty.json").touch()
    (tmp_path / "folder.json").mkdir()
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "gone.json").symlink_to(tmp_path / "nowhere")
    with (tmp_path / "huge.json").open("w") as huge:
        huge.truncate(1 << 30)
    (tmp_path / "readme.txt").write_text("not JSON by name")

    found = {each.path.name: each for each in folder.read()}

    assert found.pop(whole.name).report == report()
    problems = {name: each.problem for name, each in found.items()}
    assert all(each.report is None for each in found.values())
    assert set(problems) == {
        *("torn.json", "foreign.json", "bytes.json", "empty.json", "folder.json", "pipe.json"),
        *("gone.json", "huge.json"),
    }
    assert "child is missing" in problems["foreign.json"]
    assert "not a crash report, or a torn one" in problems["torn.json"]
    assert problems["folder.json"] == problems["pipe.json"] == "is no file"
    assert problems["gone.json"] == "is not there"
    assert "too many" in problems["huge.json"]


def test_a_directory_that_cannot_be_made_is_told_and_not_raised(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    told = ReportFolder(tmp_path / "file" / "reports").write(report())

    assert isinstance(told, ReportNotWritten)
    assert told.directory == str(tmp_path / "file" / "reports")


@pytest.mark.parametrize("given", ["", 3, b"", ["a"], "/proc/reports", "~no-such-user/x", "a\0b"])
def test_what_is_no_folder_is_refused_at_once(given: object) -> None:
    with pytest.raises(SpecError, match="report_dir="):
        ReportFolder.of("report_dir", given)


@pytest.mark.parametrize("keep", [0, -1, True, 1.5, None])
def test_keeping_none_makes_no_sense(tmp_path: Path, keep: object) -> None:
    with pytest.raises(SpecError, match="keep="):
        ReportFolder(tmp_path, keep=keep)  # type: ignore[arg-type]  # what is tested


def test_a_completed_report_replaces_the_one_before_and_no_other_of_the_same_moment(
    tmp_path: Path,
) -> None:
    folder = ReportFolder(tmp_path)
    path, other = written(folder, report()), written(folder, replace(report(), pid=4712))
    complete = replace(report(), lost=Lost.NODE, node=2, fenced="its last word")

    assert folder.write(complete, str(path)) == ReportWritten(path=str(path), at=ANY)

    found = {each.path: each.report for each in folder.read()}
    assert found == {path: complete, other: replace(report(), pid=4712)}
