"""Each example, run as its user runs it, with ranks killed while they work."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
PIPELINES = ["embed_data_parallel", "embed_tensor_parallel", "embed_pipeline_parallel"]


def run(name: str, *argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py"), *argv],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.mark.parametrize("name", PIPELINES)
def test_help_names_every_option(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])

    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")

    said = capsys.readouterr().out
    for option in ("--ranks", "--kills", "--seed", "--passages", "--batch", "--query", "--json"):
        assert option in said


@pytest.mark.usefixtures("leak_check")
@pytest.mark.parametrize("name", PIPELINES)
def test_ranks_are_killed_at_work_and_the_result_is_that_of_one_process(name: str) -> None:
    argv = ["--ranks", "3", "--kills", "2", "--seed", "1", "--passages", "240", "--batch", "8"]

    done = run(name, *argv, "--query", "how do I open a file", "--json")

    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    assert result["ok"] is True
    assert (result["calls"], result["lost"], result["twice"], result["errors"]) == (31, 0, 0, [])
    assert result["kills"] == len(result["recoveries"]) == result["restarts"] == 2
    assert result["hits"] >= 1
    assert result["difference"] < 1e-5
    assert len(result["nearest"]) == 5


@pytest.mark.usefixtures("leak_check")
def test_the_smallest_program_loses_a_worker_and_gives_the_right_number() -> None:
    done = run("hello_phalanx")

    assert done.returncode == 0, done.stderr
    assert "killed rank 1" in done.stdout
    assert "17984 primes; restarts: 1" in done.stdout


def test_the_smallest_program_is_at_most_forty_lines() -> None:
    assert len((EXAMPLES / "hello_phalanx.py").read_text().splitlines()) <= 40
