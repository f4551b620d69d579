"""`phalanx logs` follows a driver from outside and ends with it."""

from __future__ import annotations

import argparse
import itertools
import json
import select
import subprocess
import sys
import time
import uuid
from typing import Any

import pytest

from phalanx.cli import main
from phalanx.cli.driver_selection import choose
from phalanx.cli.logs import add_arguments, is_wanted
from phalanx.runtime import DriverStream
from phalanx.runtime.output.collector_client import OutputCollector
from phalanx.runtime.process.launcher import Launcher
from phalanx.supervision import SpecError

LONG = 60


def driver_at(pid: int, name: str = "") -> DriverStream:
    return DriverStream(pid=pid, name=name, started_at=0.0, address="nowhere")


def test_it_shows_what_the_driver_says_and_ends_with_it(launcher: Launcher) -> None:
    name = f"logs-{uuid.uuid4().hex[:8]}"  # other tests have drivers on this machine, too
    command = [sys.executable, "-m", "phalanx.cli", "logs", name, "--json"]
    with (
        OutputCollector(launcher, console=None, name=name) as collector,
        subprocess.Popen(command, stdout=subprocess.PIPE) as logs,
    ):
        assert logs.stdout is not None
        deadline = time.monotonic() + LONG
        said = itertools.count()
        while not select.select([logs.stdout], [], [], 0.1)[0]:  # a subscription takes a moment
            assert time.monotonic() < deadline
            collector.log.info("said", number=(number := next(said)))
            collector.log.debug("murmured", number=number)
        collector.close()
        seen, _ = logs.communicate(timeout=LONG)
    code = logs.returncode

    records = [json.loads(line) for line in seen.splitlines()]
    assert code == 0
    assert {record["event"] for record in records} == {"said", "phalanx.stream_closed"}
    numbers = [record["number"] for record in records[:-1]]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))


def test_a_driver_is_chosen_by_pid_by_name_or_by_being_the_only_one() -> None:
    one, two = driver_at(11, "train"), driver_at(22)

    assert choose([one], "") == one
    assert choose([one, two], "22") == two
    assert choose([one, two], "train") == one
    assert choose([two, later := driver_at(22, "later")], "") == later  # two runtimes of a process
    assert choose([two, later], "22") == later
    with pytest.raises(SpecError, match=r"name one by its pid; running: 11 \(train\), 22"):
        choose([one, two], "")
    with pytest.raises(SpecError, match="running: 22"):
        choose([two], "train")


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["logs"], "running: 1 (a\\x1b[2J), 2"),
        (["logs", "--list", "--json"], "--list=True: give it alone"),
        (["top", "--list", "--once"], "--list=True: give it alone"),
        (["top", "--list", "2"], "--list=True: give it alone"),
    ],
)
def test_a_mistake_is_one_line_that_does_not_command_the_terminal(
    words: list[str],
    problem: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    drivers = [driver_at(1, "a\x1b[2J"), driver_at(2)]
    monkeypatch.setattr("phalanx.cli.driver_selection.find_drivers", lambda: drivers)

    code, said = main(words), capsys.readouterr()

    assert (code, said.out, said.err.count("\n")) == (2, "", 1)
    assert problem in said.err


@pytest.mark.parametrize(
    ("words", "record", "wanted"),
    [
        ([], {"kind": "stdout", "text": "x"}, True),
        ([], {"kind": "log", "level": "debug"}, False),
        (["--level", "debug"], {"kind": "log", "level": "debug"}, True),
        (["--level", "error"], {"kind": "stderr", "text": "x"}, True),
        (["--rank", "0"], {"kind": "stdout", "rank": 0}, True),
        (["--rank", "0"], {"kind": "stdout", "rank": 1}, False),
        (["--rank", "0"], {"kind": "event", "level": "info"}, False),
        (["--rank", "2"], {"kind": "event", "level": "error", "report": {"rank": 2}}, True),
        (["--group", "tp"], {"kind": "log", "group": "dp"}, False),
        (["--rank", "2"], {"kind": "log", "rank": 2, "report": "a user's own"}, True),
        (["--rank", "2"], {"kind": "log", "rank": 2, "report": {"loss": 0.1}}, True),
        (["--kind", "event"], {"kind": "log", "level": "error"}, False),
    ],
)
def test_only_what_was_asked_for_is_shown(
    words: list[str], record: dict[str, Any], wanted: bool
) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)

    assert is_wanted(record, parser.parse_args(words)) == wanted
