"""``phalanx chaos``: what it prints, what it leaves, what its exit code says."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.processes import wait_until

from phalanx.chaos import load_run, render_page

KILL_SOON = '[{"at": 0.1, "fault": "kill", "target": 0}]'
KILL_LATE = '[{"at": 500, "fault": "kill"}]'
KILL_BOTH = '[{"at": 0.1, "fault": "kill"}, {"at": 500, "fault": "kill", "target": "driver"}]'

TARGETS = """
from phalanx import Executor, WorkerActor

class Echo(WorkerActor):
    pass

class Liar(WorkerActor):
    def one(self):
        print("on my own stdout", flush=True)
        return 2

def build():
    return Executor(Echo, 2, launch=dict(preload=()))

def lying():
    def traffic(executor, chance):
        assert executor.call("one", rank=0) == 1, "one is not one \\udcff é"
    return Executor(Liar, 1, launch=dict(preload=())), traffic
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(TARGETS)
    return tmp_path


def chaos(folder: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "phalanx.cli", "chaos", *words],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii:strict"},
    )


def test_a_run_ends_with_the_table_and_leaves_its_record(folder: Path) -> None:
    words = ("--duration", "1.5", "--rate", "2", "--seed", "3", "--report", "page.html")
    run = chaos(folder, "mine:build", *words)
    out, err = run.communicate(timeout=100)

    assert run.returncode == 0, err
    assert "seed 3" in out
    assert "PASS: every invariant held" in out
    (record,) = (folder / "chaos-runs").iterdir()
    assert str(record) in out
    assert load_run(record).ok
    assert "phalanx.worker_crashed" in (record / "output.log").read_text()
    assert (folder / "page.html").read_text() == render_page(load_run(record))


def test_a_violation_is_exit_code_1_with_the_history_that_shows_it(folder: Path) -> None:
    words = ("--duration", "1", "--callers", "1", "--seed", "4", "--out", "found", "--json")
    run = chaos(folder, "mine:lying", *words)
    out, err = run.communicate(timeout=100)

    assert run.returncode == 1, err
    told = json.loads(out)
    assert told["ok"] is False
    assert {each["invariant"] for each in told["violations"]} == {"right_answers"}
    assert "one is not one" in out
    assert "on my own stdout" in (folder / "found" / "output.log").read_text()

    shrink = chaos(
        folder, "shrink", "found", "--repeat", "1", "--runs", "5", "--report", "page.html"
    )
    out, err = shrink.communicate(timeout=100)

    assert shrink.returncode == 0, err
    assert "shrunk to 0 in" in out  # it lies without any fault
    assert "had failed in 3 of 3 replays" in out
    assert "one is not one \\udcff \\xe9" in out
    assert "one is not one \\udcff é" in (folder / "page.html").read_text(encoding="utf-8")
    assert f"--schedule {folder}/found-shrunk/schedule.json --duration 1 --seed 4" in out
    assert (folder / "found-shrunk" / "schedule.json").read_text() == "[]"


def test_a_run_without_a_stderr_prints_its_table(folder: Path) -> None:
    words = "chaos mine:build --duration 1 --rate 2 --seed 3"
    run = subprocess.run(
        ["sh", "-c", f"exec {sys.executable} -m phalanx.cli {words} 2>&-"],
        cwd=folder,
        stdout=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        timeout=100,
        check=False,
    )

    assert run.returncode == 0
    assert "PASS: every invariant held" in run.stdout


def test_ctrl_c_ends_it_in_good_order_and_prints_the_table(folder: Path) -> None:
    run = chaos(folder, "mine:build", "--duration", "600", "--rate", "2", "--out", "cut")
    assert run.stderr is not None
    while "serving" not in run.stderr.readline():
        assert run.poll() is None

    run.send_signal(signal.SIGINT)
    out, err = run.communicate(timeout=100)

    assert run.returncode == 130, err
    assert "held       nothing_left" in out
    assert "(interrupted)" in out
    assert load_run(folder / "cut").summary().endswith("(interrupted)")


SLOW = """
import time
from pathlib import Path
from phalanx import Executor, StopPolicy, WorkerActor

class Slow(WorkerActor):
    def __init__(self, hook, incarnation):
        self.hook = hook
        self.incarnation = incarnation

    def on_start(self, ctx):
        self.sleep("on_start")

    def on_stop(self, reason):
        self.sleep("on_stop")

    def sleep(self, hook):
        if self.hook == hook and self.ctx.incarnation >= self.incarnation:
            Path("slow").touch()
            time.sleep(600)

def build(hook, incarnation):
    stop = StopPolicy(ask=600.0)
    args = (hook, incarnation)
    return Executor(Slow, 1, args=args, launch=dict(preload=()),
        limits=dict(start=600.0, stop=stop))

def start(): return build("on_start", 1)
def restart(): return build("on_start", 2)
def stop(): return build("on_stop", 1)
"""


@pytest.mark.parametrize("faults", ["kill", "kill,kill:driver"])
@pytest.mark.parametrize("factory", ["start", "restart"])
def test_ctrl_c_does_not_wait_for_a_start(folder: Path, factory: str, faults: str) -> None:
    (folder / "slow.py").write_text(SLOW)
    (folder / "kill.json").write_text(KILL_SOON if faults == "kill" else KILL_BOTH)
    run = chaos(folder, f"slow:{factory}", "--duration", "600", "--schedule", "kill.json")
    wait_until((folder / "slow").exists)

    run.send_signal(signal.SIGINT)
    out, err = run.communicate(timeout=60)

    assert run.returncode == 130, err
    assert "held       nothing_left" in out
    assert "(interrupted)" in out


def test_a_second_ctrl_c_does_not_wait_for_a_stop_and_prints_the_table(folder: Path) -> None:
    (folder / "slow.py").write_text(SLOW)
    (folder / "kill.json").write_text(KILL_LATE)
    run = chaos(folder, "slow:stop", "--duration", "600", "--schedule", "kill.json")
    assert run.stderr is not None
    while "serving" not in run.stderr.readline():
        assert run.poll() is None

    run.send_signal(signal.SIGINT)
    wait_until((folder / "slow").exists)
    run.send_signal(signal.SIGINT)
    out, err = run.communicate(timeout=60)

    assert run.returncode == 130, err
    assert "fault         done  missed" in out
    assert "(interrupted twice: leaks were not searched for)" in out
