"""After a restart an engine serves the weights of the last update, or nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

_PROGRAM = Path(__file__).parent / "updated_weights.py"


def said_by(folder: Path, how: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(_PROGRAM), str(folder), how],
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    said: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    assert len({str(answers) for answers in said["right"]}) == 6  # each version answers otherwise
    return said


@pytest.mark.timeout(1600)
@pytest.mark.parametrize("how", ["replay", "hook"])
def test_a_loop_that_updates_weights_goes_on_with_the_newest_ones(tmp_path: Path, how: str) -> None:
    said = said_by(tmp_path, how)

    assert said.get("killed") == said["right"], said.get("error")
    assert said["restarts"] == 6
    assert said["hook"] == (6 if how == "hook" else 0)


@pytest.mark.timeout(1600)
def test_without_a_replay_or_a_hook_the_first_restart_ends_the_engine(tmp_path: Path) -> None:
    said = said_by(tmp_path, "neither")

    assert "weights may have been set by set_weights, and died with its workers" in said["error"]
    assert "killed" not in said
    assert said["restarts"] == 1
