"""Each example, run as its user runs it, with ranks killed while they work."""

from __future__ import annotations

import importlib
import json
import re
import runpy
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from minilm.arguments import Options
from minilm.run import Pipeline
from minilm.run import run as run_pipeline
from phalanx import Executor, Intensity

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = pytest.mark.timeout(300)  # seconds, on a crowded machine

PIPELINES = ["embed_data_parallel", "embed_tensor_parallel", "embed_pipeline_parallel"]


def run(name: str, *argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py"), *argv],
        capture_output=True,
        text=True,
        timeout=240,
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
    for option in fields(Options):
        has_it = option.name != "recover" or name == "embed_tensor_parallel"
        assert (f"--{option.name}" in said) == has_it


# The one that is left to the soak is killed in both of its ways of recovery below.
@pytest.mark.usefixtures("leak_check")
@pytest.mark.parametrize(
    "name",
    [
        "embed_data_parallel",
        "embed_pipeline_parallel",
        pytest.param("embed_tensor_parallel", marks=pytest.mark.soak),
    ],
)
def test_ranks_are_killed_at_work_and_the_result_is_that_of_one_process(name: str) -> None:
    argv = ["--ranks", "3", "--kills", "2", "--seed", "1", "--passages", "120", "--batch", "8"]

    done = run(name, *argv, "--query", "how do I open a file", "--json")

    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    assert result["ok"] is True
    assert (result["calls"], result["lost"], result["twice"], result["errors"]) == (16, 0, 0, [])
    assert result["kills"] == len(result["recoveries"]) == result["restarts"] == 2
    assert result["hits"] >= 1
    assert result["difference"] < 1e-5
    assert len(result["nearest"]) == 5


@pytest.mark.usefixtures("leak_check")
def test_shards_recover_in_two_ways_and_survivors_keep_their_weights() -> None:
    argv = ["--ranks", "3", "--kills", "2", "--seed", "2", "--passages", "120", "--batch", "8"]

    done = run("embed_tensor_parallel", *argv, "--recover", "both")

    assert done.returncode == 0, done.stderr
    table = dict(re.findall(r"^(.+?)  +(.+)$", done.stdout, re.MULTILINE))
    assert table["weights loaded again, all restarted"] == "by 3 ranks after 1 kills"
    kept = table["weights loaded again, survivors kept"]
    found = re.fullmatch(r"by (\d) ranks after 1 kills(?:, (\d) of them not told by gloo)?", kept)
    assert found, kept
    assert int(found[1]) == 1 + int(found[2] or 0)
    for way in ("all restarted", "survivors kept"):
        assert re.fullmatch(r"\d+\.\d\d s", table[f"recovery time per kill, {way}"])
    assert table["calls lost"] == table["calls answered twice"] == "0"


@pytest.mark.usefixtures("leak_check")
def test_a_group_that_gives_up_ends_the_run_with_its_calls_counted_as_lost() -> None:
    module = importlib.import_module("embed_data_parallel")

    def brittle(folder: str, _: Options) -> Executor[Any]:
        return Executor(module.Replica, 1, args=(folder,), intensity=Intensity(0, 60.0))

    pipeline: Pipeline = replace(module.PIPELINE, start=brittle)
    options = Options(
        ranks=1, kills=1, seed=1, passages=120, batch=4, device="cpu", query="open", json=True
    )

    outcome = run_pipeline(pipeline, options)

    assert (outcome.kills, outcome.recoveries) == (1, [])
    assert outcome.lost > 0
    assert outcome.errors
    assert not outcome.ok


@pytest.mark.usefixtures("leak_check")
def test_the_smallest_program_loses_a_worker_and_gives_the_right_number() -> None:
    done = run("hello_phalanx")

    assert done.returncode == 0, done.stderr
    assert "killed rank 1" in done.stdout
    assert "17984 primes; restarts: 1" in done.stdout


@pytest.mark.usefixtures("leak_check")
def test_workers_with_a_memory_count_every_word_once_and_go_on_in_the_next_run(
    tmp_path: Path,
) -> None:
    first = run("count_words", str(tmp_path / "states"))
    second = run("count_words", str(tmp_path / "states"))

    assert first.returncode == 0, first.stderr
    words, _, told = first.stdout.partition(" words from line 0 on, ")
    assert told.endswith("right=True\n")
    assert second.returncode == 0, second.stderr
    assert re.fullmatch(
        rf"{words} words from line \d\d+ on, 0 restarts: right=True\n", second.stdout
    )


def test_the_smallest_program_is_at_most_forty_lines() -> None:
    assert len((EXAMPLES / "hello_phalanx.py").read_text().splitlines()) <= 40
