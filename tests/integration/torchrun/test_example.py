"""The example script for torchrun ends with the same weights whether a rank has died or not."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "examples" / "torchrun_script.py"
pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("phalanx_leak_check")]


def weights(folder: Path, *words: str) -> tuple[str, str]:
    """Return what the script says of its weights, and all that it prints."""
    command = (sys.executable, "-m", "phalanx", "torchrun", "--nproc-per-node=2")
    checkpoint = str(folder / "checkpoint.pt")
    done = subprocess.run(
        [*command, "--max-restarts=1", str(SCRIPT), "--checkpoint", checkpoint, *words],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = re.search(r"^12 steps, weights (\w+)$", done.stdout, re.MULTILINE)
    assert found, done.stdout
    return found[1], done.stdout


@pytest.mark.soak
def test_a_script_goes_on_from_its_checkpoint_to_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    folders = [tmp_path / "killed", tmp_path / "whole"]
    for folder in folders:
        folder.mkdir()

    words = ("--steps=12", "--every=5", "--batch=4")
    killed, said = weights(folders[0], *words, "--die-at=7")
    whole, _ = weights(folders[1], *words)

    assert "round 1: from step 5" in said
    assert killed == whole
