"""Ranks die: every call ends in exactly one outcome, and the group heals."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from tests.support.options import Make
from tests.support.processes import is_alive, wait_until
from tests.support.rank_faults import OFTEN, kill, telling, wait_healed
from tests.support.workers import Echo, StartFails

from phalanx.actors import RestartPolicy, method
from phalanx.runtime import GroupDown, GroupEnded, GroupUp
from phalanx.runtime.event import fields
from phalanx.supervision import (
    BackOff,
    ExecutorClosed,
    ExitKind,
    Intensity,
    SpecError,
    Strategy,
    WorkerDied,
)

LONG = 30.0
USUAL = {"intensity": OFTEN}


@pytest.mark.both_transports
def test_the_call_a_rank_died_in_fails_with_the_report_and_all_start_anew(make: Make) -> None:
    ex = make(world_size=3, strategy=Strategy.ONE_FOR_ALL)
    before = [info.pid for info in ex.ranks]

    with pytest.raises(WorkerDied, match="rank 1 .*SIGKILL") as caught:
        ex.collective_rpc("kill_self", LONG, (1,))

    report = caught.value.report
    assert (report.rank, report.incarnation, report.reason.kind) == (1, 1, ExitKind.KILLED)
    assert report.call.method == "kill_self"
    assert report.evidence.signal == signal.SIGKILL
    assert "restart rank" in report.decision
    wait_healed(ex, 1)
    assert ex.status().reports[-1] is report
    who = ex.collective_rpc("who", LONG)
    assert [w["incarnation"] for w in who] == [2, 2, 2]
    assert {w["epoch"] for w in who} == {2}
    assert not set(before) & {w["pid"] for w in who}


@pytest.mark.both_transports
def test_a_signal_is_a_death_with_that_name(make: Make) -> None:
    ex = make(world_size=1)
    signals = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGSEGV, signal.SIGABRT)

    for incarnation, number in enumerate(signals, 1):
        with pytest.raises(WorkerDied, match=number.name) as caught:
            ex.collective_rpc("kill_self", LONG, (0, number, incarnation))

        report = caught.value.report
        killed = number == signal.SIGKILL
        assert report.reason.kind is (ExitKind.KILLED if killed else ExitKind.CRASH)
        assert report.evidence.signal == number
        assert number != signal.SIGSEGV or "kill_self" in report.last_words  # its stack
    assert ex.collective_rpc("echo", LONG, ("healed",)) == ["healed"]


@pytest.mark.both_transports
def test_an_exit_in_a_method_is_a_death_with_that_code(make: Make) -> None:
    ex = make(world_size=1)

    for how, code in (("sys", 0), ("sys", 3), ("os", 0), ("os", 4)):
        with pytest.raises(WorkerDied) as caught:
            ex.collective_rpc("exit_by", LONG, (how, code))

        reason = caught.value.report.reason
        assert reason.code == code
        assert reason.kind is (ExitKind.NORMAL if code == 0 else ExitKind.CRASH)
    assert ex.collective_rpc("rank", LONG) == [0]


@pytest.mark.both_transports
def test_a_worker_that_closes_its_descriptors_is_a_death(make: Make) -> None:
    ex = make(world_size=2)

    with pytest.raises(WorkerDied):
        ex.collective_rpc("close_fds", LONG)
    assert ex.collective_rpc("rank", LONG) == [0, 1]


class Idempotent(Echo):
    @method(idempotent=True)
    def kill_once(self, rank: int) -> int:
        return self.kill_self(rank)


@pytest.mark.both_transports
def test_an_idempotent_method_is_retried_without_being_asked(make: Make) -> None:
    assert make(Idempotent).collective_rpc("kill_once", LONG, (1,)) == [2, 2]


@pytest.mark.both_transports
@pytest.mark.parametrize(("retries", "intensity"), [(2, OFTEN), (100, Intensity(2, 60.0))])
def test_a_call_that_is_not_made_again_has_the_report_of_every_attempt_once(
    make: Make, retries: int, intensity: Intensity
) -> None:
    ex = make(world_size=1, intensity=intensity)

    with pytest.raises(WorkerDied) as caught:
        ex.collective_rpc("exit_by", LONG, ("os", 3), retries=retries)

    assert [report.incarnation for report in caught.value.reports] == [1, 2, 3]
    assert (caught.value.report.decision == "give up") is (retries == 100)


@pytest.mark.both_transports
def test_what_a_rank_had_answered_before_its_own_death_is_not_run_again(
    make: Make, tmp_path: Path
) -> None:
    ex = make(world_size=3, strategy=Strategy.ONE_FOR_ONE)
    here, gate, notes = tmp_path / "here", tmp_path / "gate", tmp_path / "notes"
    here.touch()
    ex.scatter("gated", args=[(str(here),), (str(gate),), (str(gate),)], non_block=True)
    noted = ex.collective_rpc("note", args=(str(notes), "n"), non_block=True)
    slot = ex._group.plane._table.by_rank[0]
    assert slot is not None
    wait_until(lambda: not slot.sent)  # rank 0 has answered both

    kill(ex, 0)
    wait_healed(ex, 1)
    kill(ex, 1)  # before it, or rank 2, has begun the second

    with pytest.raises(WorkerDied):
        noted.result(LONG)
    assert notes.read_text().splitlines() == ["n rank=0 inc=1"]
    gate.touch()


@pytest.mark.both_transports
def test_under_one_for_one_a_death_does_not_touch_another_ranks_call(
    make: Make, gate: Path
) -> None:
    ex = make(world_size=2, strategy=Strategy.ONE_FOR_ONE)
    other = ex.call("gated", args=(str(gate), "mine"), non_block=True, rank=0)
    pid = ex.ranks[0].pid

    kill(ex, 1)
    wait_healed(ex, 1)
    gate.touch()

    assert other.result(LONG) == "mine"
    assert ex.ranks[0].pid == pid
    assert [info.incarnation for info in ex.ranks] == [1, 2]
    assert {info.epoch for info in ex.ranks} == {1}


def test_under_rest_for_one_the_ranks_before_stay_in_the_next_epoch(make: Make) -> None:
    ex = make(world_size=3, strategy=Strategy.REST_FOR_ONE)

    kill(ex, 1)
    wait_healed(ex, 1)
    assert [w["incarnation"] for w in ex.collective_rpc("who", LONG)] == [1, 2, 2]
    kill(ex, 0)
    wait_healed(ex, 2)

    assert [(r.rank, r.epoch) for r in ex.status().reports] == [(1, 1), (0, 2)]


def test_past_its_intensity_the_group_ends_and_says_so_once(make: Make) -> None:
    ex = make(world_size=2, intensity=Intensity(1, 60.0))
    told: list[Any] = []
    once = threading.Event()
    ex.register_failure_callback(telling(told, once))
    kill(ex, 0)
    wait_healed(ex, 1)

    kill(ex, 0)

    assert once.wait(LONG)
    assert ex.wait_closed(LONG)
    assert len(told) == 1
    assert told[0].kind is ExitKind.SHUTDOWN
    with pytest.raises(ExecutorClosed) as caught:
        ex.collective_rpc("rank")
    assert isinstance(caught.value.__cause__, WorkerDied)
    assert ex.is_failed
    late: list[Any] = []
    ex.register_failure_callback(late.append)
    assert len(late) == 1


def test_restarts_that_are_forgiven_do_not_count(make: Make) -> None:
    ex = make(world_size=2, intensity=Intensity(1, 60.0))

    for restarts in (1, 2, 3):
        kill(ex, 0)
        wait_healed(ex, restarts)
        ex.forgive_restarts(7)
    with pytest.raises(SpecError, match="count"):
        ex.forgive_restarts(-1)
    kill(ex, 0)
    wait_healed(ex, 4)
    kill(ex, 0)

    assert ex.wait_closed(LONG)
    assert ex.is_failed


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_log_of_a_group_has_its_ups_beside_its_downs_and_its_end_above_all(
    make: Make, world_size: int
) -> None:
    ex = make(world_size=world_size, intensity=Intensity(1, 60.0))
    told: SimpleQueue[Any] = SimpleQueue()
    ex.subscribe(told.put)

    kinds = (GroupDown, GroupUp, GroupEnded)
    seen: list[GroupDown | GroupUp | GroupEnded] = []
    for known in (2, 4):
        assert ex.collective_rpc("rank", LONG) == [*range(world_size)]
        kill(ex)
        while len(seen) < known:
            event = told.get(timeout=LONG)
            if isinstance(event, kinds):
                seen.append(event)

    assert [(type(event), fields(event)["level"], event.epoch) for event in seen] == [
        (GroupDown, "warning", 1),
        (GroupUp, "warning", 2),
        (GroupDown, "warning", 2),
        (GroupEnded, "critical", 2),
    ]


def test_whoever_waited_for_a_group_that_gives_up_is_told_of_every_death_behind_it(
    make: Make, gate: Path
) -> None:
    """One call had begun before the first death, one was made after it, one after the end."""
    ex = make(
        StartFails,
        2,
        kwargs={"how": "exit", "from_incarnation": 2},
        intensity=Intensity(3, 60.0),
        policy=RestartPolicy(backoff=BackOff(initial=0.2, jitter=0.0)),
    )
    terms: dict[str, Any] = {"non_block": True, "retries": 100}
    begun = ex.collective_rpc("gated", args=(str(gate),), **terms)
    kill(ex, 0)
    wait_until(lambda: ex.status().state != "serving")
    waiting = ex.collective_rpc("rank", **terms)

    errors = [begun.exception(LONG), waiting.exception(LONG)]

    with pytest.raises(ExecutorClosed) as caught:
        ex.collective_rpc("rank")
    for error in (*errors, caught.value.__cause__):
        assert isinstance(error, WorkerDied)
        killed, *starts = error.reports
        assert (killed.rank, killed.incarnation, killed.reason.kind) == (0, 1, ExitKind.KILLED)
        assert [report.reason.kind for report in starts] == [ExitKind.CRASH] * 3
        assert error.report.decision == "give up"


@pytest.mark.both_transports
def test_a_dead_ranks_grandchildren_go_with_it(make: Make) -> None:
    ex = make(world_size=1)
    pids = [ex.call("grandchild", LONG, kwargs={"daemon": it}, rank=0) for it in (False, True)]

    kill(ex, 0)
    wait_healed(ex, 1)

    assert not any(map(is_alive, pids))


@pytest.mark.both_transports
def test_an_overdue_rank_is_restarted_where_the_call_asks_for_it(
    make: Make, tmp_path: Path
) -> None:
    ex = make(world_size=2)

    with pytest.raises(TimeoutError):
        ex.collective_rpc(
            lambda w, g: w.gated(g) if w.ctx.rank == 1 else 0,
            0.3,
            (str(tmp_path / "never"),),
            on_timeout="restart",
        )
    wait_healed(ex, 1)

    report = ex.status().reports[-1]
    assert (report.rank, report.reason.kind) == (1, ExitKind.UNRESPONSIVE)
    assert ex.collective_rpc("rank", LONG) == [0, 1]
