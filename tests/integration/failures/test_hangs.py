"""A rank that hangs is found, says where it is, and is replaced; one that is busy is left alone."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.support.freezer import Freezer
from tests.support.hanging_workers import StopsInStart, Stuck, StuckTogether
from tests.support.options import Make
from tests.support.processes import start_thread, wait_until
from tests.support.rank_faults import OFTEN, kill, wait_healed, wait_stopped
from tests.support.workers import Echo, StartFails

from phalanx.actors import Limits, RestartPolicy, StopPolicy, WorkerActor
from phalanx.actors.group import shutdown
from phalanx.runtime import Runtime
from phalanx.runtime.linux import procfs
from phalanx.supervision import (
    CallTimeout,
    ExitKind,
    StartFailed,
    Strategy,
    Unhealthy,
    WorkerDied,
)

LONG = 30.0
USUAL = {"worker": Stuck, "world_size": 1, "intensity": OFTEN}


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("deadlock", r"waiting in _deadlock \(.*hanging_workers.py:\d+\)"),
        ("loop", r"busy in _loop"),
        ("contended", r"busy in _contended"),
        ("released", r"waiting in _released"),
        ("native", r"wedged: no sign of life .* holds the interpreter lock; it sleeps"),
        ("regex", r"wedged: no sign of life .* holds the interpreter lock; it uses the processor"),
        ("blocked_thread", ""),
        ("deaf", ""),
    ],
)
def test_a_hung_rank_is_ended_with_what_it_does_and_its_stacks_in_the_report(
    make: Make, how: str, says: str
) -> None:
    ex = make(hang_after=0.5)

    with pytest.raises(WorkerDied, match=f"hang_after=0.5 s.*{says}") as caught:
        ex.collective_rpc("hang", LONG, (how,))

    report = caught.value.report
    assert re.search(says, str(report.reason))
    assert re.search(says, report.render())
    assert report.reason.kind is ExitKind.UNRESPONSIVE
    assert report.call.method == "hang"
    assert f"in _{how}" in report.stacks
    assert "in hang" in report.stacks
    assert how != "blocked_thread" or "in _deadlock" in report.stacks  # in another thread
    assert report.last_words == ""
    assert "stacks before it was killed" in report.render()
    assert ex.collective_rpc("rank", LONG) == [0]


def _goes_on(worker: WorkerActor) -> str:
    for _ in range(30):
        time.sleep(0.1)
        worker.ctx.report_progress()
    return "done"


@pytest.mark.both_transports
def test_a_call_that_reports_progress_may_run_for_longer_than_its_limit(make: Make) -> None:
    ex = make(hang_after=2.0)

    assert ex.collective_rpc(_goes_on, LONG) == ["done"]


def test_a_stopped_rank_that_owes_an_answer_is_hung_without_any_limit(make: Make) -> None:
    ex = make(limits=Limits(stopped=0.5))

    with pytest.raises(WorkerDied, match="stopped for") as caught:
        ex.collective_rpc("hang", LONG, ("stop",))

    assert caught.value.report.reason.kind is ExitKind.UNRESPONSIVE
    assert "in _stop" in caught.value.report.stacks
    assert ex.collective_rpc("rank", LONG) == [0]


class Traced(Echo):
    """Asks for its parent to trace it, and is then stopped by a signal."""

    def stop(self) -> None:
        ctypes.CDLL(None).ptrace(0, 0, None, None)
        os.kill(os.getpid(), signal.SIGUSR1)


def test_a_rank_that_asked_to_be_traced_and_was_stopped_is_hung(make: Make) -> None:
    ex = make(Traced, limits=Limits(stopped=0.5))

    with pytest.raises(WorkerDied, match="stopped for"):
        ex.collective_rpc("stop", LONG)

    assert ex.collective_rpc("rank", LONG) == [0]


def test_a_rank_that_was_stopped_while_idle_is_found_by_the_next_call(make: Make) -> None:
    ex = make(limits=Limits(stopped=0.5))
    kill(ex, 0, signal.SIGSTOP)

    assert ex.collective_rpc("rank", LONG, retries=1) == [0]
    wait_healed(ex)  # it goes on for its stacks, and may answer before it ends
    assert ex.status().reports[-1].reason.kind is ExitKind.UNRESPONSIVE


def test_a_rank_that_is_stopped_in_its_start_is_started_anew(make: Make) -> None:
    ex = make(StopsInStart, limits=Limits(stopped=0.5, start=600.0))
    kill(ex)
    wait_healed(ex, 2)

    assert ex.collective_rpc("rank", LONG) == [0]
    died = ex.status().reports[-1]
    assert (died.incarnation, died.reason.kind) == (2, ExitKind.UNRESPONSIVE)
    assert "stopped for" in str(died.reason)


def test_a_rank_that_goes_on_in_time_is_left_alone(make: Make, tmp_path: Path) -> None:
    ex = make(limits=Limits(stopped=20.0))
    future = ex.call("stop_until", args=(str(tmp_path / "gate"),), non_block=True, rank=0)
    pid = ex.ranks[0].pid
    wait_stopped(pid)

    (tmp_path / "gate").touch()

    assert future.result(LONG) == "went on"
    assert ex.status().reports == ()


def test_silence_alone_kills_nobody(make: Make) -> None:
    ex = make(limits=Limits(stopped=0.2))

    assert ex.collective_rpc("hold_lock", LONG, (1,)) == ["done"]
    assert ex.status().reports == ()


def test_calls_that_wait_their_turn_are_not_counted_as_running(make: Make) -> None:
    ex = make(hang_after=1.5)

    futures = [ex.collective_rpc("spin", args=(0.3,), non_block=True) for _ in range(8)]

    assert [future.result(LONG) for future in futures] == [[None]] * 8
    assert ex.status().reports == ()


def test_what_an_async_output_computes_after_its_turn_does_not_count(
    make: Make, tmp_path: Path, gate: Path
) -> None:
    ex = make(Echo, hang_after=0.3)
    late = ex.call("late", args=("in the end", str(gate)), non_block=True, rank=0)
    ex.tell("note", args=(str(tmp_path / "next"), "begun"))
    wait_until((tmp_path / "next").exists)  # the turn of the first is over

    time.sleep(1.0)  # three limits; nothing happens in them, so there is no event for that
    gate.touch()

    assert late.result(LONG) == "in the end"
    assert ex.status().reports == ()


def test_a_limit_of_a_method_goes_before_the_executors(
    make: Make, tmp_path: Path, gate: Path
) -> None:
    ex = make(hang_after=1.0)
    other = ex.call("unlimited", args=(str(gate),), non_block=True, rank=0)
    timer = threading.Timer(1.6, gate.touch)  # past the executor's limit
    timer.start()

    assert other.result(LONG) == "done"
    timer.join()
    with pytest.raises(WorkerDied, match="hang_after=0.3 s"):
        ex.collective_rpc("limited", LONG, (str(tmp_path / "never"),))


def test_a_call_that_timed_out_keeps_its_limit(make: Make) -> None:
    ex = make(hang_after=1.0)

    with pytest.raises(TimeoutError):
        ex.collective_rpc("hang", 0.1, ("loop",))

    assert ex.collective_rpc("rank", LONG) == [0]
    assert ex.status().reports[-1].reason.kind is ExitKind.UNRESPONSIVE


def test_a_start_that_hangs_says_where(make: Make) -> None:
    with pytest.raises(StartFailed, match=r"rank . .*limits.start=2") as caught:
        make(StartFails, 1, args=("hang",), limits=Limits(start=2.0))

    (report,) = caught.value.reports
    assert report.reason.kind is ExitKind.UNRESPONSIVE
    assert "on_start" in report.stacks


def test_a_start_that_fails_and_lives_on_says_what_it_raised(make: Make) -> None:
    with pytest.raises(StartFailed, match="it raised ValueError: bad weights and lived on"):
        make(StartFails, 1, args=("linger",))


@pytest.mark.parametrize(
    ("hangs", "states", "says"),
    [
        (
            ("loop", "deadlock", "stop"),
            ("busy", "waiting", "stopped"),
            ("at _loop", "at _deadlock", ""),
        ),
        (
            ("native", "released", "regex"),
            ("wedged", "waiting", "busy"),
            ("holds the interpreter lock", "", "holds the interpreter lock"),
        ),
    ],
)
def test_health_tells_what_silent_ranks_are_doing_and_ends_none(
    make: Make, tmp_path: Path, hangs: Sequence[str], states: Sequence[str], says: Sequence[str]
) -> None:
    ex = make(world_size=3, strategy=Strategy.ONE_FOR_ONE)
    marks = [tmp_path / f"mark{rank}" for rank in range(3)]
    for rank, how in enumerate(hangs):
        ex.tell("hang", args=(how, str(marks[rank]), rank), rank=rank)
    wait_until(lambda: all(mark.exists() for mark in marks))
    if "stop" in hangs:
        wait_stopped(ex.ranks[hangs.index("stop")].pid)

    with pytest.raises(Unhealthy, match=f"rank 0 is {states[0]}") as caught:
        ex.check_health(1.0)

    assert caught.value.states == dict(enumerate(states))
    assert caught.value.ranks == (0, 1, 2)
    for rank, told in enumerate(says):
        assert told in caught.value.details[rank]
    assert ex.status().reports == ()  # silence alone kills nobody
    ex.kill()  # none of them would end if it were asked to


def test_health_is_told_of_a_rank_whose_queue_is_full(make: Make, tmp_path: Path) -> None:
    ex = make(world_size=1, limits=Limits(queue_depth=1))

    def fill() -> None:
        while True:
            ex.call("gated", 0.5, (str(tmp_path / "gate"),), rank=0, non_block=True)

    with pytest.raises(CallTimeout):
        fill()

    with pytest.raises(Unhealthy, match="rank 0 is"):
        ex.check_health(1.0)

    (tmp_path / "gate").touch()


@pytest.mark.parametrize("timeout", [1e-5, 1e-3])
def test_health_takes_neither_the_dead_nor_the_hurried_for_wedged(
    make: Make, timeout: float
) -> None:
    ex = make(world_size=3, strategy=Strategy.ONE_FOR_ONE)
    kill(ex, 1)

    with pytest.raises(Unhealthy) as caught:
        ex.check_health(timeout)  # over before the death is known, or while it is mended

    states = caught.value.states
    assert states.pop(1) in ("dead", "starting")
    assert set(states.values()) <= {"waiting", "busy"}  # they had no time, but they do live


def test_at_rest_nobody_is_asked_for_a_sign_of_life(make: Make) -> None:
    """A worker's threads sleep until they are asked: none of them is ever scheduled."""
    ex = make(hang_after=0.2, limits=Limits(stopped=0.4))
    ex.check_health(LONG)
    pid = ex.ranks[0].pid

    def switches() -> dict[str, int]:
        found: dict[str, int] = {}
        for task in Path(f"/proc/{pid}/task").iterdir():
            told = (task / "status").read_text().split("voluntary_ctxt_switches:\t")[1]
            found[task.name] = int(told.split()[0])
        return found

    assert len(switches()) == 2  # the main thread, and the one that keeps the pulse
    seen: list[bool] = []
    while not any(seen) and len(seen) < 5:  # it may be on its way to sleep still
        before = switches()
        time.sleep(1.0)  # nothing happens: there is no event for that
        seen.append(switches() == before)
    assert seen[-1]


def test_one_that_cannot_say_where_it_is_is_hung_in_health_and_killed_all_the_same(
    make: Make,
) -> None:
    ex = make(hang_after=0.3)
    future = ex.collective_rpc("hang", args=("uninterruptible",), non_block=True)

    with pytest.raises(Unhealthy) as caught:
        ex.check_health(0.8)  # it is found after 0.3 s, and withstands the signal for a second

    assert caught.value.states == {0: "hung"}
    with pytest.raises(WorkerDied) as died:
        future.result(LONG)
    report = died.value.report
    assert (report.reason.kind, report.evidence.signal) == (ExitKind.UNRESPONSIVE, signal.SIGKILL)
    assert "thread " in report.stacks  # what the kernel sees
    assert ex.collective_rpc("rank", LONG) == [0]


DRIVER = """
import sys
from phalanx.actors import Executor
from phalanx.runtime import Runtime
from tests.support.hanging_workers import Stuck
from tests.support.transport import TRANSPORT

with Runtime(console=None, stream=False) as runtime:
    options = dict(launch=dict(preload=(), transport=TRANSPORT), limits=dict(stopped=0.5))
    with Executor(Stuck, 1, hang_after=1.0, runtime=runtime, **options) as ex:
        calls = [ex.collective_rpc("big", args=(sys.argv[1], 60_000), non_block=True)
                 for _ in range(40)]
        print("sent", flush=True)
        print(sum(len(call.result(30)[0]) for call in calls), ex.status().restarts, flush=True)
"""


def test_a_pause_of_the_driver_is_nobodys_hang(gate: Path) -> None:
    """Its rank cannot write its answers meanwhile: it is one call that takes longer than it may."""
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(gate)], stdout=subprocess.PIPE, text=True
    )
    assert driver.stdout is not None
    try:
        assert driver.stdout.readline() == "sent\n"
        driver.send_signal(signal.SIGSTOP)
        gate.touch()
        time.sleep(3.0)  # only time makes a rank overdue
        driver.send_signal(signal.SIGCONT)

        assert driver.stdout.readline().split() == [str(40 * 60_000), "0"]
        assert driver.wait(LONG) == 0
    finally:
        driver.kill()
        driver.wait()
        driver.stdout.close()


@pytest.mark.both_transports
def test_a_stream_that_hangs_is_ended_and_one_that_waits_for_its_taker_is_not(
    make: Make,
) -> None:
    ex = make(hang_after=1.0)
    with ex.stream("slowly", LONG, (4,), rank=0, window=2) as stream:
        taken = [next(stream)]
        time.sleep(2.0)  # nobody takes: only time shows that this is nobody's hang
        taken += list(stream)

    assert taken == [0, 1, 2, 3]
    assert ex.status().reports == ()
    taken = []
    with pytest.raises(WorkerDied, match="hang_after=1 s"):
        taken.extend(ex.stream("slowly", LONG, (4, 2), rank=0, window=2))
    assert taken == [0, 1]
    assert ex.collective_rpc("rank", LONG) == [0]


def _reports_at_rest(worker: WorkerActor, gate: str) -> Iterator[Any]:
    page: Any = worker.ctx._progress_page()
    times: list[float] = []

    def report() -> None:
        wait_until(lambda: not page.begun_at)
        worker.ctx.report_progress()
        times.append(page.begun_at)
        Path(gate).touch()

    thread = start_thread(report)
    yield "first"
    thread.join(LONG)
    yield times


def test_progress_that_is_reported_while_a_stream_waits_for_its_taker_begins_no_limit(
    make: Make, gate: Path
) -> None:
    with make().stream(_reports_at_rest, LONG, (str(gate),), rank=0, window=1) as stream:
        wait_until(gate.exists)

        assert list(stream) == ["first", [0.0]]


@pytest.fixture
def freezer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Freezer]:
    """Processes that withstand SIGKILL, and are given up after half a second, not after ten."""
    if why_not := Freezer.why_not():
        pytest.skip(why_not)
    monkeypatch.setattr(shutdown, "_KILL_LIMIT", 0.5)
    with Freezer() as freezer:
        yield freezer


@pytest.mark.parametrize("strategy", [Strategy.ONE_FOR_ONE, Strategy.ONE_FOR_ALL])
def test_a_rank_that_not_even_sigkill_ends_is_given_up_and_replaced(
    make: Make, tmp_path: Path, freezer: Freezer, strategy: Strategy
) -> None:
    ex = make(world_size=2, hang_after=0.3, strategy=strategy)
    mark = tmp_path / "mark"
    future = ex.collective_rpc("hang", args=("released", str(mark), 1), non_block=True)
    wait_until(mark.exists)
    pid = ex.ranks[1].pid
    assert pid is not None

    freezer.freeze(pid)

    with pytest.raises(WorkerDied, match="withstood SIGKILL") as caught:
        future.result(LONG)
    report = caught.value.report
    assert report.reason.kind is ExitKind.UNRESPONSIVE
    assert "uninterruptible sleep" in str(report.reason)
    assert f"left behind as {pid}" in str(report.reason)
    assert ex.collective_rpc("rank", LONG) == [0, 1]
    assert procfs.read(pid) is not None
    freezer.thaw()
    wait_until(lambda: procfs.read(pid) is None)  # its death is waiting for it, and is collected


def test_closing_does_not_wait_for_ever_for_one_that_nothing_ends(
    make: Make, freezer: Freezer
) -> None:
    ex = make(world_size=2, limits=Limits(stop=StopPolicy(ask=0.1, terminate=0.1)))
    pid = ex.ranks[1].pid
    assert pid is not None
    freezer.freeze(pid)
    closer = start_thread(ex.close)
    closer.join(LONG)

    assert not closer.is_alive()
    assert ex.status().state == "ended"
    freezer.thaw()
    wait_until(lambda: procfs.read(pid) is None)


def test_health_says_that_a_frozen_rank_is_wedged(make: Make, freezer: Freezer) -> None:
    ex = make(world_size=2, strategy=Strategy.ONE_FOR_ONE)
    pid = ex.ranks[1].pid
    assert pid is not None
    freezer.freeze(pid)

    with pytest.raises(Unhealthy, match="uninterruptible") as caught:
        ex.check_health(0.5)

    assert caught.value.states == {1: "wedged"}
    freezer.thaw()
    assert ex.collective_rpc("rank", LONG) == [0, 1]


@pytest.mark.parametrize("how", ["native", "stop"])
def test_of_ranks_that_wait_for_one_that_hangs_only_that_one_is_ended(
    make: Make, torch_runtime: Runtime, how: str
) -> None:
    """All of them are past the limit of their call, and three of them are innocent."""
    ex = make(
        StuckTogether,
        4,
        launch={"preload": ("torch",)},
        runtime=torch_runtime,
        policy=RestartPolicy(survivors="keep"),
        hang_after=1.0,
    )
    before = [info.pid for info in ex.ranks]

    with pytest.raises(WorkerDied, match="rank 2") as caught:
        ex.collective_rpc("hang_together", LONG, (how, 2))

    assert [report.rank for report in caught.value.reports] == [2]
    assert ex.collective_rpc("together", LONG) == [4.0] * 4
    after = [info.pid for info in ex.ranks]
    told = "\n".join(report.render() for report in ex.status().reports)
    assert [a == b for a, b in zip(before, after, strict=True)] == [True, True, False, True], told
