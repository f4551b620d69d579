"""The nemesis, with processes that stand for ranks: whom a fault hits, and what ends it."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.chaos.history.events import FaultInjected, FaultMissed
from phalanx.chaos.history.journal import Journal, read_history
from phalanx.chaos.nemesis import nemesis as of_driver
from phalanx.chaos.nemesis import processes
from phalanx.chaos.nemesis.nemesis import Nemesis
from phalanx.chaos.nemesis.processes import TargetProcess
from phalanx.chaos.nemesis.schedule import ScheduledFault
from phalanx.chaos.nemesis.worker_faults import Orders
from phalanx.runtime import process_tree, procfs
from phalanx.supervision import Phase

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def ranks() -> Iterator[list[subprocess.Popen[bytes]]]:
    with ExitStack() as stack:
        started = [stack.enter_context(subprocess.Popen(["sleep", "1000"])) for _ in range(2)]
        for each in started:
            stack.callback(each.kill)
        yield started


def group_of(ranks: list[subprocess.Popen[bytes]], name: str = "g") -> Any:
    infos = [SimpleNamespace(rank=i, pid=p.pid, incarnation=1) for i, p in enumerate(ranks)]
    view = SimpleNamespace(phase=Phase.SERVING, ranks=infos)
    shared = SimpleNamespace(view=view, nodes=lambda: ())
    return SimpleNamespace(name=name, spec=SimpleNamespace(name=name, cluster=None), shared=shared)


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with closing(Journal(tmp_path, "driver-1")) as journal:
        yield journal


def nemesis_of(journal: Journal, *groups: Any) -> Nemesis:
    return Nemesis(journal._path.parent, journal, lambda: [*groups], lambda: None)


def test_a_fault_of_one_rank_waits_at_its_point_for_that_rank(
    tmp_path: Path, journal: Journal, ranks: list[subprocess.Popen[bytes]]
) -> None:
    group = group_of(ranks)
    nemesis = nemesis_of(journal, group)
    fault = {"at": 0.0, "fault": "kill", "target": "1", "point": "before_send"}
    nemesis.inject(ScheduledFault(number=1, **fault))  # type: ignore[arg-type]

    nemesis.reached("before_send", group, ((0, 1),))

    assert read_history(tmp_path).every(FaultInjected) == ()

    nemesis.reached("before_send", group, ((0, 1), (1, 1)))

    assert ranks[1].wait(30) == -signal.SIGKILL
    assert [each.rank for each in read_history(tmp_path).every(FaultInjected)] == [1]


def test_a_rank_that_is_dead_and_not_collected_is_missed(
    tmp_path: Path, journal: Journal, ranks: list[subprocess.Popen[bytes]]
) -> None:
    ranks[0].kill()
    os.waitid(os.P_PID, ranks[0].pid, os.WEXITED | os.WNOWAIT)

    fault = ScheduledFault(number=1, at=0.0, fault="kill", target="0")
    nemesis_of(journal, group_of(ranks)).inject(fault)

    assert [each.number for each in read_history(tmp_path).every(FaultMissed)] == [1]


def test_an_interrupted_stop_goes_on_with_what_is_left(journal: Journal) -> None:
    ended: list[int] = []
    nemesis = nemesis_of(journal)

    def interrupted() -> None:
        ended.append(2)
        if ended == [2]:
            raise KeyboardInterrupt

    nemesis._ends += [lambda: ended.append(1), interrupted]
    with pytest.raises(KeyboardInterrupt):
        nemesis.stop()
    nemesis.close()

    assert ended == [2, 2, 1]


def test_a_stop_that_would_last_beyond_the_run_leaves_nothing_behind(
    journal: Journal, ranks: list[subprocess.Popen[bytes]]
) -> None:
    before = {*threading.enumerate()}
    nemesis = nemesis_of(journal, group_of(ranks))
    fault = ScheduledFault(number=1, at=0.0, fault="stop", target="0", seconds=1000.0)
    nemesis.inject(fault)
    (waiting,) = {*threading.enumerate()} - before  # for the process that would continue it
    os.waitpid(ranks[0].pid, os.WUNTRACED)

    nemesis.close()

    stopped_and_continued(ranks[0])
    waiting.join(30)
    assert not waiting.is_alive()


def test_a_rank_that_has_stopped_itself_continues_at_the_end_of_the_run(
    tmp_path: Path, journal: Journal, ranks: list[subprocess.Popen[bytes]]
) -> None:
    nemesis = nemesis_of(journal, group_of(ranks))
    fault = {"at": 0.0, "fault": "stop", "target": "0", "point": "running", "seconds": 1000.0}
    nemesis.inject(ScheduledFault(number=1, **fault))  # type: ignore[arg-type]
    assert Orders(tmp_path).take("g", 0, "begin") is not None
    ranks[0].send_signal(signal.SIGSTOP)
    os.waitpid(ranks[0].pid, os.WUNTRACED)

    nemesis.close()

    stopped_and_continued(ranks[0])


def test_a_helper_is_found_by_a_name_that_its_label_shows_otherwise(
    journal: Journal, ranks: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    group = group_of(ranks, "modèle;a")
    tag = process_tree.TreeTag.new({}).of(1, "modèle;a/standby#-1")
    label = tag.pattern.decode().partition("1.")[2].rstrip(";")
    nemesis = nemesis_of(journal, group)
    standby = TargetProcess(*key_of(ranks[1]), label=label, role="standby")
    monkeypatch.setattr(of_driver, "helpers_of", lambda _driver: [standby])

    nemesis.inject(ScheduledFault(number=1, at=0.0, fault="kill", target="standby"))

    assert ranks[1].wait(30) == -signal.SIGKILL


def test_no_ancestor_of_the_driver_is_taken_for_what_has_started_a_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    orphan = procfs.Task(1 << 30, os.getppid(), 1, "S", 1)
    monkeypatch.setattr(of_driver, "tasks_of_node", lambda _place: [orphan])
    node: Any = SimpleNamespace(node=0, place="0")
    fault = ScheduledFault(number=1, at=0.0, fault="agent")

    assert of_driver._prepared(fault, node, object()) == "the driver itself has started the node"


def test_a_driver_that_handles_a_signal_is_not_held_up(
    journal: Journal, ranks: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    caught: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _frame: caught.append(number))
    monkeypatch.setattr(time, "sleep", pytest.fail)
    try:
        fault = ScheduledFault(number=1, at=0.0, fault="term", target="driver")
        nemesis_of(journal, group_of(ranks)).inject(fault)
    finally:
        signal.signal(signal.SIGTERM, before)

    assert caught == [signal.SIGTERM]


def test_a_node_that_nothing_can_continue_later_is_not_left_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = uuid.uuid4().hex

    def short(*_words: Any, **_options: Any) -> None:
        raise OSError("too many open files")

    environ = {**os.environ, process_tree.VARIABLE: f"{place}/1.rank;"}
    with subprocess.Popen(["sleep", "1000"], env=environ) as process:
        try:
            monkeypatch.setattr(subprocess, "Popen", short)
            before = procfs.numbers_in("/proc/self/fd")
            with pytest.raises(OSError, match="too many"):
                processes.freeze_node(place, 60.0)

            assert procfs.numbers_in("/proc/self/fd") == before
            stopped_and_continued(process)
        finally:
            process.kill()


def test_a_process_that_was_stopped_late_is_continued_again(
    ranks: list[subprocess.Popen[bytes]],
) -> None:
    pidfd = os.pidfd_open(ranks[0].pid)
    try:
        for again in (False, True):
            ranks[0].send_signal(signal.SIGSTOP)
            if not again:
                processes._continue_after(0.0, pidfd)
            stopped_and_continued(ranks[0])
    finally:
        os.close(pidfd)


def stopped_and_continued(process: subprocess.Popen[bytes]) -> None:
    """Wait until *process* continues; that it was stopped is not told once it does."""
    status = 0
    while not os.WIFCONTINUED(status):
        _, status = os.waitpid(process.pid, os.WUNTRACED | os.WCONTINUED)
        assert not os.WIFSIGNALED(status)


def key_of(process: subprocess.Popen[bytes]) -> tuple[int, int]:
    task = procfs.read(process.pid)
    assert task is not None
    return task.key


@pytest.mark.parametrize(
    ("words", "is_guardian"),
    [
        (b"phalanx: guardian\0", True),
        (b"phalanx: guardian", True),
        (b"python\0-c\0import phalanx_bare.guardian_main\0", True),
        (b"phalanx: guardian-1 rank 0/2 #1", False),
        (b"phalanx: Guardian-1 guardian 0/2 #1", False),
    ],
)
def test_a_worker_called_guardian_is_none(words: bytes, is_guardian: bool) -> None:
    assert process_tree.is_guardian(words) is is_guardian
