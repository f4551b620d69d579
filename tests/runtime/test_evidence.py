"""A kill is called out-of-memory from evidence, else it is a SIGKILL. Kills are real."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
from tests.actors.workers import Echo
from tests.runtime.limited_group import limited_group

from phalanx.actors import Executor
from phalanx.runtime.linux import cgroup
from phalanx.runtime.linux import oom as evidence
from phalanx.runtime.linux import oom as kernel_log
from phalanx.runtime.linux.oom import OomEvidence, OomSample
from phalanx.supervision import WorkerDied

Make = Callable[..., Executor[Any]]
LONG = 60.0
LIMIT = 192 << 20  # bytes


class Glutton(Echo):
    """Eats memory, in a control group with little of it."""

    def enter(self, group: str) -> None:
        (Path(group) / "cgroup.procs").write_text(str(os.getpid()))

    def eat(self) -> NoReturn:
        eaten = []
        while True:
            eaten.append(bytearray(8 << 20))

    def feed_a_child(self, group: str) -> int:
        """Have a grandchild killed for want of memory, and live on."""
        pid = os.fork()
        if not pid:
            try:
                self.enter(group)
                self.eat()
            finally:
                os._exit(3)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def limit_address_space(self) -> None:
        import resource

        now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (now + (256 << 20), hard))


@pytest.fixture
def tight() -> Iterator[Path]:
    """A memory control group of its own, with a limit."""
    with limited_group(LIMIT) as group:
        yield group


def count_in(path: Path, kills: int) -> None:
    path.write_text(f"oom 3\noom_kill {kills}\noom_group_kill 9\n")


@pytest.fixture
def counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The count of a control group, in a place where no kernel log can be had."""
    monkeypatch.setattr(evidence, "group_folders", lambda _: iter((tmp_path,)))
    monkeypatch.setattr(evidence, "_MACHINE", tmp_path / "absent")
    monkeypatch.setattr(kernel_log, "_LOG", str(tmp_path / "absent"))
    count_in(tmp_path / "memory.events", 5)
    return tmp_path / "memory.events"


def test_a_rise_of_the_count_is_evidence_for_one_death_only(counted: Path) -> None:
    seen = OomEvidence()
    before = seen.sample()
    assert seen.take(1, 0.0, before) == ""

    count_in(counted, 6)

    assert "oom_kill rose from 5 to 6" in seen.take(1, 0.0, before)
    assert seen.take(1, 0.0, before) == ""


def test_a_group_that_is_named_as_the_host_names_it_is_the_one_at_the_mount(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container without a namespace of control groups."""
    mount = tmp_path / "memory"
    mount.mkdir()
    count_in(mount / "memory.oom_control", 7)
    own = tmp_path / "own"
    own.write_text("4:memory:/docker/1234\n")
    folders = list(cgroup.group_folders("memory", tmp_path, own))
    monkeypatch.setattr(evidence, "group_folders", lambda _: iter(folders))
    monkeypatch.setattr(evidence, "nearest", lambda each: cgroup.nearest(each, tmp_path))

    assert OomEvidence().sample().counter == mount / "memory.oom_control"

    folders[0].mkdir(parents=True)  # to be seen, without accounts: those around it count others
    assert OomEvidence().sample().counter is None


def test_what_rose_before_a_start_is_no_evidence(counted: Path) -> None:
    seen = OomEvidence()
    count_in(counted, 8)

    assert seen.take(1, 0.0, seen.sample()) == ""


def test_a_count_that_cannot_be_read_any_more_is_no_evidence(counted: Path) -> None:
    before = OomEvidence().sample()
    counted.unlink()

    assert OomEvidence().take(1, 0.0, before) == ""


def test_the_count_of_the_machine_alone_is_no_evidence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evidence, "group_folders", lambda _: iter(()))
    monkeypatch.setattr(evidence, "_MACHINE", tmp_path / "vmstat")
    monkeypatch.setattr(kernel_log, "_LOG", str(tmp_path / "absent"))
    (tmp_path / "vmstat").write_text("pgfault 7\noom_kill 1\n")
    before = OomEvidence().sample()
    (tmp_path / "vmstat").write_text("pgfault 9\noom_kill 2\n")

    assert before == OomSample(machine=1)
    assert OomEvidence().take(1, 0.0, before) == ""


@pytest.mark.parametrize(
    ("named", "told"),
    [
        ("4711", "kernel log: Memory cgroup out of memory: Killed process 4711 (python) anon"),
        ("4712", ""),
    ],
)
def test_a_log_that_can_be_read_decides(
    counted: Path, monkeypatch: pytest.MonkeyPatch, named: str, told: str
) -> None:
    text = f"Memory cgroup out of memory: Killed process {named} (python) anon"
    monkeypatch.setattr(kernel_log, "_records", lambda: iter([(99.0, text)]))
    monkeypatch.setattr(kernel_log, "_names_our_processes", lambda: True)
    seen = OomEvidence()
    before = seen.sample()
    count_in(counted, 6)

    assert seen.take(4711, 98.0, before) == told


def test_a_line_from_before_the_start_is_about_another_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    line = "Out of memory: Killed process 4711 (python)"
    monkeypatch.setattr(kernel_log, "_records", lambda: iter([(99.0, line)]))
    monkeypatch.setattr(kernel_log, "_names_our_processes", lambda: True)
    monkeypatch.setattr(kernel_log, "_drift", lambda: 1.0)

    assert kernel_log.killed_for_memory(4711, 99.5) == line
    assert kernel_log.killed_for_memory(4711, 200.0) == ""


def test_the_kernels_log_is_read_to_its_end_where_it_may_be() -> None:
    if not os.access("/dev/kmsg", os.R_OK):
        pytest.skip("the kernel's log may not be read here")

    records = list(kernel_log._records())

    assert records
    assert all(at >= 0 and isinstance(text, str) for at, text in records)


DRIVER = """
import json, sys
from pathlib import Path
from tests.runtime.test_evidence import Glutton
from phalanx.actors import Executor
from phalanx.runtime import Runtime
from phalanx.supervision import WorkerDied
Path(sys.argv[1], "cgroup.procs").write_text("0")
with Runtime(console=None, stream=False) as runtime:
    with Executor(Glutton, 1, preload=(), runtime=runtime) as ex:
        for method, args in (("eat", ()), ("kill_self", (0, 9, 2))):
            try:
                ex.call(0, method, 60.0, args)
            except WorkerDied as error:
                died = error.report
                print(json.dumps([str(died.reason), died.pid, died.evidence.oom]))
"""


def test_a_real_kill_for_want_of_memory_is_told_from_a_plain_one(tight: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, str(tight)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    (starved, pid, oom), (killed, _, nothing) = map(json.loads, done.stdout.splitlines())
    assert starved == "killed (SIGKILL; out of memory)"
    # Where the log cannot be read, or has other numbers, there is the count of the control group.
    assert f"Killed process {pid} " in oom or "oom_kill rose from 0 to 1" in oom
    assert (killed, nothing) == ("killed (SIGKILL)", "")


def test_the_kill_of_a_grandchild_does_not_explain_a_later_one(make: Make, tight: Path) -> None:
    if not kernel_log.is_kernel_log_told():
        pytest.skip("the kernel's log may not be read here, or knows processes by other numbers")
    ex = make(Glutton, 1)
    assert ex.call(0, "feed_a_child", LONG, (str(tight),)) == -signal.SIGKILL

    with pytest.raises(WorkerDied) as killed:
        ex.call(0, "kill_self", LONG, (0,))

    assert str(killed.value.report.reason) == "killed (SIGKILL)"


def test_a_limit_on_address_space_is_an_exception_and_no_death(make: Make) -> None:
    ex = make(Glutton, 1)
    ex.call(0, "limit_address_space", LONG)
    pid = ex.ranks[0].pid

    with pytest.raises(MemoryError):
        ex.call(0, "eat", LONG)

    assert ex.ranks[0].pid == pid
    assert ex.call(0, "echo", LONG, ("still here",)) == "still here"
    assert ex.status().reports == ()
