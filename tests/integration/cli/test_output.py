"""What users and workers have written is printed, whatever stdout can take."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from tests.support.programs import run_program

from phalanx.cli import main
from phalanx.runtime import CrashReport, ReportFolder, WorkerLabels, safe_text
from phalanx.supervision import ExitKind, ExitReason

TEXT = "ValueError: \udcff.bin \ud800 é"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    labels = WorkerLabels(child="root/tp/0", group="tp", rank=0, incarnation=2, pid=100)
    at = "2026-01-02T03:04:05.000000+00:00"
    reason = ExitReason(ExitKind.CRASH, TEXT, 1)
    ReportFolder(tmp_path / "crashes").write(
        CrashReport.of(labels, reason, at=at, at_monotonic=1.0)
    )
    return tmp_path


@pytest.mark.parametrize(
    ("words", "encoding"),
    [
        (["reports", "crashes"], "ascii:strict"),
        (["reports", "show", "latest", "crashes"], "utf-8:strict"),
        (["reports", "list", "crashes"], "utf-8:surrogateescape"),
    ],
)
def test_what_the_encoding_lacks_is_escaped_and_stdout_is_as_strict_as_before_afterwards(
    folder: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], encoding: str
) -> None:
    encoding, errors = encoding.split(":")
    written = io.BytesIO()
    stdout = io.TextIOWrapper(written, encoding=encoding, errors=errors)
    monkeypatch.setattr(sys, "stdout", stdout)
    monkeypatch.chdir(folder)

    assert main(words) == 0

    assert stdout.errors == errors
    stdout.flush()
    out = written.getvalue()
    assert rb"\udcff.bin \ud800" in out
    assert ("é".encode() if encoding == "utf-8" else rb"\xe9") in out


def test_a_stdout_that_is_closed_is_no_mistake(folder: Path) -> None:
    command = '"$0" -m phalanx.cli reports crashes >&-'
    done = run_program(["/bin/sh", "-c", command, sys.executable], cwd=folder)

    assert (done.returncode, done.stderr) == (0, "")


def test_half_a_character_is_not_safe_to_show() -> None:
    assert safe_text("a\udcffb\x9bc\x1b[31m") == "a\\udcffb\\x9bc\\x1b[31m"
