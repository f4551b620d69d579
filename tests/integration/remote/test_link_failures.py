"""Links break and processes at either end of them die: calls end once, and groups heal."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tests.support.call_books import Booked, Books, Caller
from tests.support.checkpoint_workers import Announcer
from tests.support.drivers import Driver
from tests.support.event_recorder import EventRecorder
from tests.support.options import Make
from tests.support.processes import LONG, start_thread, wait_until
from tests.support.rank_faults import OFTEN, kill, wait_healed
from tests.support.relayed_links import NEVER, QUICK, processes_of, wait_running

from phalanx import Launch, Limits, Strategy
from phalanx.actors import CheckpointPolicy
from phalanx.errors import CallTimeout, WorkerDied
from phalanx.events import CheckpointRejected, Emitted
from phalanx.runtime import Lost, Zmq
from phalanx.runtime.linux import procfs
from phalanx.runtime.remote.gateway import GatewayExited

USUAL = {"launch": {"transport": "zmq"}, "intensity": OFTEN}


def test_every_rank_beside_a_killed_or_stopped_relay_is_replaced(make: Make, gate: Path) -> None:
    ex = make(strategy=Strategy.ONE_FOR_ONE, launch=Launch(transport=QUICK))
    call = ex.collective_rpc("gated", args=(str(gate),), non_block=True)
    wait_running(ex, 0, 1)

    os.kill(processes_of(ex, "/relay")[0], signal.SIGKILL)

    with pytest.raises(WorkerDied, match="its link was lost") as died:
        call.result(LONG)
    assert died.value.report.lost is Lost.LINK
    gate.touch()
    wait_healed(ex)
    assert [info.incarnation for info in ex.ranks] == [2, 2]
    (relay,) = processes_of(ex, "/relay")

    os.kill(relay, signal.SIGSTOP)

    assert ex.collective_rpc("rank", LONG, retries=9) == [0, 1]
    assert not procfs.read(relay)
    assert "no message came from it" in str(ex.status().reports[-1].reason)


def test_every_rank_behind_a_killed_or_stopped_gateway_is_replaced(make: Make) -> None:
    ex = make(launch=Launch(transport=QUICK))
    told: list[Any] = []
    ex.subscribe(told.append)
    call = ex.collective_rpc("gated", args=(NEVER,), non_block=True)
    wait_running(ex, 0, 1)
    (first,) = processes_of(ex, "gateway")

    os.kill(first, signal.SIGKILL)

    with pytest.raises(WorkerDied, match="its link was lost"):
        call.result(LONG)
    assert ex.collective_rpc("rank", LONG, retries=9) == [0, 1]
    (second,) = processes_of(ex, "gateway")
    assert second != first
    wait_until(lambda: [each.pid for each in told if isinstance(each, GatewayExited)] == [first])
    restarts = ex.status().restarts

    os.kill(second, signal.SIGSTOP)
    wait_healed(ex, restarts + 1)

    assert "the ranks' side heard nothing" in str(ex.status().reports[-1].reason)
    assert ex.collective_rpc("rank", LONG) == [0, 1]
    assert not procfs.read(second)


def test_a_link_that_is_lost_while_ranks_restore_their_state_costs_no_snapshot(
    make: Make, tmp_path: Path
) -> None:
    when = tmp_path / "when"
    ex = make(
        Announcer, args=({"restore": "hang"}, str(when)), checkpoint=CheckpointPolicy(every_calls=1)
    )
    restoring, rejected = EventRecorder(ex, Emitted), EventRecorder(ex, CheckpointRejected)
    for _ in range(2):
        ex.collective_rpc("add", LONG)
    when.touch()
    kill(ex)
    restoring.wait(2)
    (relay,) = processes_of(ex, "/relay")

    os.kill(relay, signal.SIGKILL)
    when.unlink()  # before any rank is started anew

    assert ex.collective_rpc("add", LONG) == [3, 3]
    assert not rejected.seen


def test_a_stopped_worker_is_found_as_one_next_door_is(make: Make) -> None:
    ex = make(world_size=1, limits=Limits(stopped=0.5), launch=Launch(transport=QUICK))

    kill(ex, 0, signal.SIGSTOP)

    assert ex.collective_rpc("rank", LONG, retries=3) == [0]
    wait_healed(ex)  # it goes on for its stacks, and may answer before it ends
    assert "stopped for" in str(ex.status().reports[0].reason)


def test_a_busy_worker_that_holds_its_interpreter_is_not_lost(make: Make) -> None:
    ex = make(world_size=1, launch=Launch(transport=QUICK))

    def hold(_worker: object) -> str:
        import ctypes

        ctypes.PyDLL(None).usleep(4_000_000)  # a call that lets go of nothing, of two limits
        return "held"

    assert ex.call(hold, LONG, rank=0) == "held"


def test_a_pause_of_the_gateway_shorter_than_the_limit_is_nobodys_fault(make: Make) -> None:
    ex = make(launch=Launch(transport=Zmq(heartbeat=0.2, lost_after=4.0)))
    (gateway,) = processes_of(ex, "gateway")

    os.kill(gateway, signal.SIGSTOP)
    call = ex.collective_rpc("rank", non_block=True)
    time.sleep(1.5)  # what is tested is that this much passes
    os.kill(gateway, signal.SIGCONT)

    assert call.result(LONG) == [0, 1]
    assert ex.status().restarts == 0


def test_a_call_that_stopped_ranks_were_handed_and_had_not_begun_costs_nothing(
    make: Make, tmp_path: Path
) -> None:
    ex = make(world_size=3, strategy=Strategy.ONE_FOR_ONE, limits=Limits(stopped=None))
    pids = [kill(ex, rank, signal.SIGSTOP) for rank in range(3)]
    notes = tmp_path / "notes"
    call = ex.collective_rpc("note", args=(str(notes), "n"), non_block=True)
    wait_running(ex, 0, 1, 2)

    kill(ex, 1)
    wait_healed(ex)
    for pid in (pids[0], pids[2]):
        os.kill(pid, signal.SIGCONT)

    assert call.result(LONG) == [None] * 3
    lines = sorted(notes.read_text().splitlines())
    assert lines == ["n rank=0 inc=1", "n rank=1 inc=2", "n rank=2 inc=1"]


def test_an_idle_rank_that_dies_unseen_costs_the_next_call_nothing(
    make: Make, tmp_path: Path
) -> None:
    ex = make(world_size=1)
    notes = tmp_path / "notes"

    kill(ex)

    assert ex.collective_rpc("note", LONG, args=(str(notes), "n")) == [None]
    assert notes.read_text() == "n rank=0 inc=2\n"


def test_a_stopped_rank_makes_callers_wait_and_memory_does_not_grow(make: Make) -> None:
    ex = make(world_size=1, limits=Limits(stopped=None, queue_depth=4))
    large = bytes(8 << 20)
    assert len(ex.call("echo", LONG, args=(large,), rank=0)) == len(large)
    ends = [*processes_of(ex, "gateway"), *processes_of(ex, "/relay")]
    before = sum(map(resident, ends))

    pid = kill(ex, 0, signal.SIGSTOP)
    queued = [ex.call("echo", args=(large,), non_block=True, rank=0) for _ in range(4)]
    for _ in range(3):
        with pytest.raises(CallTimeout):
            ex.call("echo", 0.3, args=(large,), rank=0)
    grown = sum(map(resident, ends)) - before
    os.kill(pid, signal.SIGCONT)

    assert all(len(future.result(LONG)) == len(large) for future in queued)
    assert len(ends) == 2
    assert grown < 6 * len(large)


def resident(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_under_kills_of_every_kind_of_process_each_call_has_one_outcome(
    make: Make, tmp_path: Path, seed: int
) -> None:
    transport = Zmq(heartbeat=0.2, lost_after=3.0)
    ex = make(Booked, 3, args=(str(tmp_path),), launch=Launch(transport=transport))
    books, over, rng = Books(tmp_path), threading.Event(), random.Random(seed)
    threads = [start_thread(Caller(ex, books, number, seed).run, over) for number in range(3)]
    for kind in rng.sample(["/relay", "gateway", "rank", "/relay", "rank"], 5):
        wait_healed(ex, 0)
        found: list[int] = []
        # One look may come between a death and what is started for it; pytest's limit ends it.
        while not found:
            if kind == "rank":
                found = [info.pid for info in ex.ranks if info.pid]
            else:
                found = processes_of(ex, kind)
        with contextlib.suppress(ProcessLookupError):
            os.kill(rng.choice(found), signal.SIGKILL)
        time.sleep(rng.uniform(0.05, 0.3))  # the seeded moment of the next
    wait_healed(ex, 1)
    over.set()
    for thread in threads:
        thread.join(90)

    assert not any(thread.is_alive() for thread in threads)
    books.audit()
    assert not books.wrong, books.wrong[:20]
    assert any(entry.outcomes == ["ok"] for entry in books.entries.values())
    # Nobody has waited for what was told.
    wait_until(lambda: (ex.status().in_flight, ex.status().waiting) == (0, 0))


def test_a_killed_driver_leaves_no_process_and_no_socket(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PHALANX_TEST_TRANSPORT", "ipc")
    driver = Driver("dying_driver", "calls", str(tmp_path / "gate"))
    try:
        driver.expect("calling")
        gateways: list[int] = []

        def look() -> bool:  # one may come upon a process that cannot be read just then
            gateways.extend(pid for pid in driver.left() if "gateway" in procfs.command(pid))
            return bool(gateways)

        wait_until(look, "a gateway")
        name = f"@phalanx-link-{gateways[0]}-"
        # One look may miss a socket where another is closed meanwhile.
        wait_until(lambda: name in Path("/proc/net/unix").read_text())

        driver.send(signal.SIGKILL)
        driver.wait()

        driver.assert_gone()
        assert name not in Path("/proc/net/unix").read_text()
    finally:
        driver.close()
