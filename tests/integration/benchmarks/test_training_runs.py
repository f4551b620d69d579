"""A system that hangs or ends too early is given up, and nothing of it is left."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from benchmarks.harness.venvs import Environments
from benchmarks.training.systems import GaveUp, Run, System

pytestmark = [pytest.mark.usefixtures("phalanx_leak_check"), pytest.mark.timeout(120)]
SIZES = {"ranks": 2, "width": 32, "layers": 1}
# It leaves a process in another session behind, and does no step.
HANGS = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
print("I wait", flush=True)
open(sys.argv[1] + "/" + str(os.getpid()) + ".pid", "w").close()
time.sleep(600)
"""


def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, patience: float) -> Run:
    (tmp_path / "runs").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "runs"))
    (tmp_path / "script.py").write_text(script)
    system = System("one", ("cProfile", str(tmp_path / "script.py")), "nothing")
    return Run(system, SIZES, patience, Environments())


def test_one_that_does_no_step_is_given_up_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start(tmp_path, monkeypatch, HANGS, patience=3.0)
    try:
        with pytest.raises(GaveUp, match="no step for 3 s; last words: I wait"):
            run.wait_steps(1)
        pids = [int(path.stem) for path in Path(run.asked.folder).glob("*.pid")]
    finally:
        run.end()

    assert len(pids) == 2
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    assert os.listdir(tmp_path / "runs") == []  # noqa: PTH208  # names


def test_one_that_ends_too_early_is_given_up_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        start(tmp_path, monkeypatch, "raise ValueError('no such device')", patience=60.0) as run,
        pytest.raises(
            GaveUp, match="ended with exit code 1; last words: ValueError: no such device"
        ),
    ):
        run.wait_steps(1)
