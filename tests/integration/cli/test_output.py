"""What users and workers have written is printed, whatever stdout can take."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.cli import main
from phalanx.runtime import CrashReport, ReportFolder, WorkerLabels, safe_text
from phalanx.supervision import ExitKind, ExitReason

TEXT = "ValueError: \udcff.bin \ud800 é"


def phalanx(folder: Path, *words: str, encoding: str) -> tuple[int, bytes, bytes]:
    done = subprocess.run(
        [sys.executable, "-m", "phalanx.cli", *words],
        cwd=folder,
        env={**os.environ, "PYTHONIOENCODING": encoding},
        capture_output=True,
        stdin=subprocess.DEVNULL,
        timeout=100,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


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
def test_what_the_encoding_lacks_is_escaped(folder: Path, words: list[str], encoding: str) -> None:
    code, out, err = phalanx(folder, *words, encoding=encoding)

    assert (code, err) == (0, b"")
    assert rb"\udcff.bin \ud800" in out
    assert ("é".encode() if "utf-8" in encoding else rb"\xe9") in out


def test_stdout_is_as_strict_as_before_when_a_command_has_ended(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="strict")
    monkeypatch.setattr(sys, "stdout", stdout)

    assert main(["reports", str(folder / "crashes")]) == 0

    assert stdout.errors == "strict"


def test_a_stdout_that_is_closed_is_no_mistake(folder: Path) -> None:
    done = subprocess.run(
        ["/bin/sh", "-c", '"$0" -m phalanx.cli reports crashes >&-', sys.executable],
        cwd=folder,
        capture_output=True,
        timeout=100,
        check=False,
    )

    assert (done.returncode, done.stderr) == (0, b"")


def test_half_a_character_is_not_safe_to_show() -> None:
    assert safe_text("a\udcffb\x9bc\x1b[31m") == "a\\udcffb\\x9bc\\x1b[31m"
