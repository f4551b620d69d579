"""A kill is called out-of-memory from evidence, else it is a SIGKILL. Kills are real."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NoReturn

import pytest
from tests.support.memory_cgroup import limited_group
from tests.support.programs import run_python
from tests.support.workers import Echo

from phalanx.runtime.linux import cgroup
from phalanx.runtime.linux.cgroup import OomCounter, oom_count

LIMIT = 192 << 20  # bytes


class Glutton(Echo):
    """Eats memory."""

    def eat(self) -> NoReturn:
        eaten = []
        while True:
            eaten.append(bytearray(8 << 20))


def count_in(path: Path, kills: int) -> None:
    path.write_text(f"oom 3\noom_kill {kills}\noom_group_kill 9\n")


@pytest.fixture
def counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The count of a control group."""
    monkeypatch.setattr(cgroup, "group_folders", lambda _: iter((tmp_path,)))
    count_in(tmp_path / "memory.events", 5)
    return tmp_path / "memory.events"


def test_a_rise_of_the_count_since_a_start_is_evidence_for_one_death_only(counted: Path) -> None:
    seen = OomCounter()
    count_in(counted, 7)
    evidence = seen.watch()
    assert evidence() == ""

    count_in(counted, 8)

    assert "oom_kill rose from 7 to 8" in evidence()
    assert evidence() == ""


def test_a_group_that_is_named_as_the_host_names_it_is_the_one_at_the_mount(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container without a namespace of control groups."""
    mount = tmp_path / "memory"
    mount.mkdir()
    count_in(mount / "memory.oom_control", 7)
    own = tmp_path / "own"
    own.write_text("4:memory:/docker/1234\n")
    monkeypatch.setattr(cgroup, "MOUNTED", tmp_path)
    monkeypatch.setattr(cgroup, "OWN", own)
    folders = list(cgroup.group_folders("memory"))

    assert oom_count() == (mount / "memory.oom_control", 7)

    folders[0].mkdir(parents=True)  # to be seen, without accounts: those around it count others
    assert oom_count() is None


def test_without_a_count_that_can_still_be_read_there_is_no_evidence(
    counted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evidence = OomCounter().watch()
    counted.unlink()

    assert evidence() == ""

    monkeypatch.setattr(cgroup, "group_folders", lambda _: iter(()))

    assert oom_count() is None
    assert OomCounter().watch()() == ""


DRIVER = """
import json, sys
from pathlib import Path
from tests.privileged.test_oom_evidence import Glutton
from phalanx.actors import Executor
from phalanx.runtime import Runtime
from phalanx.supervision import WorkerDied
Path(sys.argv[1], "cgroup.procs").write_text("0")
with Runtime(console=None, stream=False) as runtime:
    with Executor(Glutton, 1, launch={'preload': ()}, runtime=runtime) as ex:
        for method, args in (("eat", ()), ("kill_self", (0, 9, 2))):
            try:
                ex.call(method, 60.0, args, rank=0)
            except WorkerDied as error:
                died = error.report
                print(json.dumps([str(died.reason), died.evidence.oom]))
"""


def test_a_real_kill_for_want_of_memory_is_told_from_a_plain_one() -> None:
    with limited_group(LIMIT) as tight:
        done = run_python("-c", DRIVER, str(tight), cwd=Path(__file__).parents[2])

    assert done.returncode == 0, done.stderr
    (starved, evidence), (killed, nothing) = map(json.loads, done.stdout.splitlines())
    assert starved == "killed (SIGKILL; out of memory)"
    assert "oom_kill rose from 0 to 1" in evidence
    assert (killed, nothing) == ("killed (SIGKILL)", "")
