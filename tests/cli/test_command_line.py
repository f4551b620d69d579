"""The command line: mistakes are one line, and what it runs keeps its exit code."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from phalanx.cli import doctor

ROOT = Path(__file__).parents[2]

TARGETS = """
import sys
VALUE = 3
def add(a, b='0'): return f"{a}+{b}"
def seven(): return 7
def true(): return True
def fine(): pass
def from_phalanx(): raise __import__("phalanx").SpecError("size", -1, "must be positive")
def buggy(): raise KeyError("of the user's own")
"""


def phalanx(*words: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "phalanx.cli", *words],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        stdin=subprocess.DEVNULL,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "targets.py").write_text(TARGETS)
    (tmp_path / "misses.py").write_text("import something_nobody_has\n")
    return tmp_path


def test_version_names_phalanx_and_what_it_stands_on() -> None:
    told = phalanx("version")
    parsed = json.loads(phalanx("version", "--json").stdout)

    assert told.returncode == 0
    assert f"phalanx {parsed['phalanx']}" in told.stdout.splitlines()
    assert phalanx("--version").stdout == f"phalanx {parsed['phalanx']}\n"
    assert set(parsed) >= {"phalanx", "torch", "pykka", "pyzmq", "structlog", "cloudpickle"}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["run", "targets:absent"], "targets has no absent"),
        (["run", "targets:VALUE"], "must be callable"),
        (["run", "targets:"], "module:function"),
        (["run", "absent:main"], "there is no module absent"),
        (["run", "targets.below:main"], "there is no module targets.below"),
        (["run", "targets:add"], "missing a required argument: 'a'"),
        (["run", "targets:seven", "x", "y"], "cannot be called with x y"),
        (["run", "no_such_example"], "not an example ("),
        (["run", "targets:from_phalanx"], "size=-1: must be positive"),
        (["run"], "required"),
        (["nonsense"], "invalid choice"),
        ([], "required"),
    ],
)
def test_a_users_mistake_is_told_without_a_traceback(
    folder: Path, words: list[str], told: str
) -> None:
    done = phalanx(*words, cwd=folder)

    assert done.returncode == 2
    assert told in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("target", ["misses:main", "targets:buggy"])
def test_a_fault_of_the_users_own_code_keeps_its_traceback(folder: Path, target: str) -> None:
    done = phalanx("run", target, cwd=folder)

    assert done.returncode == 1
    assert "Traceback" in done.stderr


@pytest.mark.parametrize(
    ("words", "code", "printed"),
    [
        (["targets:add", "1", "--b"], 0, "1+--b\n"),
        (["targets:add", "1"], 0, "1+0\n"),
        (["targets:seven"], 7, ""),
        (["targets:true"], 0, "True\n"),
        (["targets:fine"], 0, ""),
    ],
)
def test_a_function_gets_the_words_after_it(
    folder: Path, words: list[str], code: int, printed: str
) -> None:
    done = phalanx("run", *words, cwd=folder)

    assert (done.returncode, done.stdout) == (code, printed), done.stderr


def test_an_example_runs_by_its_short_name_and_takes_its_own_options() -> None:
    done = phalanx("run", "embed_tensor_parallel", "--help")

    assert done.returncode == 0, done.stderr
    assert "--kills" in done.stdout


def test_doctor_finds_what_phalanx_needs() -> None:
    done = phalanx("doctor", "--json")

    report = json.loads(done.stdout)
    states = {finding["name"]: finding["state"] for finding in report["findings"]}
    assert {"torch", "devices", "start", "pidfd", "memfd", "subreaper", "zmq"} <= set(states)
    assert "missing" not in states.values(), report
    assert states["start"] == "ok"
    assert (done.returncode, report["ok"]) == (0, True)


def hang(_payload: bytes, _fds: object) -> None:
    time.sleep(1000)


def test_doctor_ends_although_the_process_that_it_starts_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doctor, "_ENTRY", f"{__name__}:hang")
    monkeypatch.setattr(doctor, "_START", 10.0)

    found = doctor._start("start")

    assert (found.state, found.found) == (
        "missing",
        "a process that was started did not answer within 10 s",
    )


def test_doctor_fails_and_says_what_to_do_where_something_essential_is_missing() -> None:
    # None in sys.modules is how Python notes that a module is not to be had.
    limited = (
        "import resource, sys; from phalanx.cli import main;"
        "sys.modules.update(torch=None, zmq=None);"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (500, 500));"
        "sys.exit(main(['doctor', '--json']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", limited],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )

    report = json.loads(done.stdout)
    found = {finding["name"]: finding for finding in report["findings"]}
    assert (done.returncode, report["ok"]) == (1, False)
    assert found["torch"]["state"] == "missing"
    assert found["zmq"]["state"] == "missing"
    assert found["open files"]["state"] == "note"
    assert "ulimit -n" in found["open files"]["remedy"]
    assert found["memfd"]["state"] == "ok"
