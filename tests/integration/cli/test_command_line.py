"""The command line: names, mistakes, exit codes; what doctor finds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import pytest
from tests.support.programs import run_python

from phalanx.cli import doctor, main


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    told = f"phalanx {version('phalanx')}\n"

    assert run_python("-m", "phalanx.cli", "--version").stdout == told
    with pytest.raises(SystemExit, match="0"):
        main(["version"])
    assert capsys.readouterr() == (told, "phalanx version is now: phalanx --version\n")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["run", "targets:fine"], "invalid choice: 'run'"),
        (["nonsense"], "invalid choice"),
        ([], "required"),
        (["chaos"], "the following arguments are required: module:factory"),
        (["chaos", "shrink"], "the following arguments are required: RUN"),
        (["chaos", "mine:build", "--runs", "3"], "unrecognized arguments: --runs 3"),
        (["reports", "show"], "the following arguments are required: FILE|latest"),
        (["reports", "--rank", "-1"], "argument --rank: '-1' is not a rank number"),
        (["logs", "--rank", "x"], "argument --rank: 'x' is not a rank number"),
    ],
)
def test_a_users_mistake_is_told_without_a_traceback(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)

    printed = capsys.readouterr()
    assert ended.value.code == 2
    assert told in printed.err
    assert printed.out == ""


@pytest.mark.parametrize("limit", ["nan", "inf", "-1", "0"])
def test_a_limit_that_makes_no_sense_is_no_failed_health_check(
    limit: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["health", "--timeout", limit]) == 2
    assert "phalanx health: --timeout=" in capsys.readouterr().err


def test_a_reader_may_leave_before_the_end() -> None:
    reads, writes = os.pipe()
    os.close(reads)
    with os.fdopen(writes, "w") as left:
        command = [sys.executable, "-m", "phalanx.cli", "metrics", "--print", "dashboard"]
        pipe = subprocess.PIPE
        done = subprocess.run(command, stdout=left, stderr=pipe, text=True, timeout=60, check=False)

    assert (done.returncode, done.stderr) == (1, "")


def test_doctor_finds_what_phalanx_needs() -> None:
    done = run_python("-m", "phalanx.cli", "doctor", "--json")

    report = json.loads(done.stdout)
    states = {finding["name"]: finding["state"] for finding in report["findings"]}
    assert {"torch", "devices", "start", "pidfd", "memfd", "subreaper", "zmq"} <= set(states)
    assert "missing" not in states.values(), report
    assert states["start"] == "ok"
    assert (done.returncode, report["ok"]) == (0, True)
    packages = {"phalanx", "torch", "pykka", "pyzmq", "structlog", "cloudpickle", "python"}
    assert set(report["versions"]) == packages


def hang(_payload: bytes, _fds: object) -> None:
    time.sleep(1000)


def test_doctor_ends_although_the_process_that_it_starts_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doctor, "_ENTRY", f"{__name__}:hang")
    monkeypatch.setattr(doctor, "_START", 5.0)
    monkeypatch.setattr(doctor, "_PRELOAD", ())  # to import torch may take longer than that

    found = doctor._start()

    told = "a started process did not answer within 5 s"
    assert (found.state, found.found) == ("missing", told)


def leave(_payload: bytes, _fds: object) -> int:
    return 3


def test_doctor_says_in_the_log_why_a_process_starts_slowly_and_that_it_has_ended(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    start = "threading.Thread(target=threading.Event().wait, daemon=True).start()"
    (tmp_path / "leaves_a_thread.py").write_text(f"import threading\n{start}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(doctor, "_ENTRY", f"{__name__}:leave")
    monkeypatch.setattr(doctor, "_PRELOAD", ("leaves_a_thread",))

    found = doctor._start()

    assert (found.state, found.found) == ("missing", "a started process ended without an answer")
    out, err = capfd.readouterr()
    assert "phalanx.fork_unsafe" in err
    assert out == ""


def test_doctor_fails_and_says_what_to_do_where_something_essential_is_missing() -> None:
    # None in sys.modules is how Python notes that a module is not to be had.
    limited = (
        "import resource, sys; from phalanx.cli import main;"
        "sys.modules.update(torch=None, zmq=None);"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (500, 500));"
        "sys.exit(main(['doctor', '--json']))"
    )
    done = run_python("-c", limited)

    report = json.loads(done.stdout)
    found = {finding["name"]: finding for finding in report["findings"]}
    assert (done.returncode, report["ok"]) == (1, False)
    assert found["torch"]["state"] == "note"
    assert "phalanx[torch]" in found["torch"]["remedy"]
    assert found["zmq"]["state"] == "missing"
    assert found["open files"]["state"] == "note"
    assert "ulimit -n" in found["open files"]["remedy"]
    assert found["memfd"]["state"] == "ok"
