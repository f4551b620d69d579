"""The leaks of a run: files that the run was seen to create."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from phalanx.chaos.instrumentation import leaks
from phalanx.chaos.instrumentation.leaks import RunLeaks


def test_a_temporary_file_of_the_run_was_left_whatever_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leaks, "_PATIENCE", 0.1)
    run = RunLeaks(tmp_path, own=False)

    with run.tracking():
        kept = tempfile.mkdtemp(dir=tmp_path)
        removed = tempfile.mkdtemp(dir=tmp_path)
    later = tempfile.mkdtemp(dir=tmp_path)
    Path(removed).rmdir()

    found = [each.name for each in run.left()]
    assert kept in found
    assert removed not in found
    assert later not in found
