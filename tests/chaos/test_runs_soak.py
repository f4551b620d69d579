"""Long chaos runs: `make soak`. Each is what anybody could run from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.support.programs import run_python

from phalanx.chaos import FAULTS, load_run
from phalanx.chaos.history.events import FaultMissed

ROOT = Path(__file__).parents[2]
LONG = 120  # seconds
EVERYTHING = (
    "kill,term,stop,segv,exit,raise,raise_before,hang,memory,slow,start_raise,grandchild,"
    "kill:group,kill:zygote,kill:guardian,kill:logs,kill:store,kill:driver"
)
MOMENTS = "before_send,queued,running,after_reply,restarting,closing"

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]


def chaos(out: Path, *words: str) -> None:
    done = run_python(
        "-m", "phalanx.cli", "chaos", *words, "--out", str(out), cwd=ROOT, timeout=800
    )

    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\nthe record is in {out}"


@pytest.mark.parametrize("seed", range(1, 22))
def test_kills_of_the_tensor_parallel_example_lose_nothing(tmp_path: Path, seed: int) -> None:
    words = ("tests.chaos.targets:tensor_parallel", "--duration", str(LONG), "--rate", "1")
    chaos(tmp_path / "run", *words, "--seed", str(seed))


@pytest.mark.parametrize("target", ["tests.chaos.targets:tensor_parallel", "examples.quickstart"])
@pytest.mark.parametrize("seed", range(3))
def test_faults_of_every_kind_at_every_moment_lose_nothing(
    tmp_path: Path, target: str, seed: int
) -> None:
    words = (target, "--duration", str(LONG), "--rate", "0.5", "--faults", EVERYTHING)
    chaos(tmp_path / "run", *words, "--at", MOMENTS, "--seed", str(seed))


@pytest.mark.parametrize("target", ["0", "group", "standby", "zygote", "logs", "driver"])
def test_every_fault_that_a_target_can_have_is_done_to_it(tmp_path: Path, target: str) -> None:
    faults = [
        each
        for each in FAULTS.values()
        if (target == "0" or target in each.targets) and not each.needs
    ]
    faults.sort(key=lambda each: each.lethal)  # what ends the driver ends what it was to do
    gap = 4.0 if target == "driver" else 1.5
    strikes = [
        {"at": 0.5 + gap * i, "fault": each.name, "target": target, "seconds": min(each.seconds, 2)}
        for i, each in enumerate(faults)
    ]
    (tmp_path / "list.json").write_text(json.dumps(strikes))
    words = ("--schedule", str(tmp_path / "list.json"), "--call-timeout", "2")
    duration = str(gap * len(faults) + 3)

    chaos(tmp_path / "run", "tests.chaos.targets:with_a_spare", *words, "--duration", duration)

    assert load_run(tmp_path / "run").history.every(FaultMissed) == ()
