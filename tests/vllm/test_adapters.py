"""Adapters (LoRA) are there again after a death, and one whose files are gone ends nobody else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

_PROGRAM = Path(__file__).parent / "adapters.py"


@pytest.mark.timeout(1600)
def test_requests_with_adapters_are_continued_with_them(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(_PROGRAM), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )

    assert done.returncode == 0, done.stderr[-4000:]
    said = json.loads(done.stdout.strip().splitlines()[-1])
    assert said["added"] == [True] * 3
    assert said["right"][0] != said["right"][1]
    assert said["killed"] == said["without_files"] == said["right"]
    assert said["listed"] == [1, 2, 3]
    assert said["left"] == [1, 2]
