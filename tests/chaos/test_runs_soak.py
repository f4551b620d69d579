"""Long chaos runs: `make soak`. Each is what anybody could run from the command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LONG = 120  # seconds
EVERYTHING = (
    "kill,term,stop,segv,exit,raise,unpicklable,hang,gil,memory,slow,start_raise,grandchild,"
    "descriptors,large,kill:group,kill:zygote,kill:logs,kill:store,kill:driver,clock,clock:driver"
)
MOMENTS = "before_send,queued,running,after_reply,restarting,closing"

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]


def chaos(out: Path, *words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "phalanx.cli", "chaos", *words, "--out", str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )

    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\nthe record is in {out}"


@pytest.mark.parametrize("seed", range(1, 22))
def test_kills_of_the_tensor_parallel_example_lose_nothing(tmp_path: Path, seed: int) -> None:
    words = ("examples.embed_tensor_parallel", "--duration", str(LONG), "--rate", "1")
    chaos(tmp_path / "run", *words, "--seed", str(seed))


@pytest.mark.parametrize("target", ["embed_tensor_parallel", "hello_phalanx"])
@pytest.mark.parametrize("seed", range(3))
def test_faults_of_every_kind_at_every_moment_lose_nothing(
    tmp_path: Path, target: str, seed: int
) -> None:
    words = (target, "--duration", str(LONG), "--rate", "0.5", "--faults", EVERYTHING)
    chaos(tmp_path / "run", *words, "--at", MOMENTS, "--seed", str(seed))
