"""Looking for messages before sleeping: when it happens, that it ends, and that it changes nothing.

Where a test spins it does so for the longest time that is allowed, so that what it does to the
waiting one finds it looking.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.options import Make
from tests.support.processes import LONG, start_thread, wait_until
from tests.support.rank_faults import kill
from tests.support.workers import Echo, wait_for

from phalanx.actors import Executor
from phalanx.actors.calls import plane
from phalanx.actors.calls.reader import SPIN, spin_time
from phalanx.runtime import usable_processors
from phalanx.runtime.linux import cgroup
from phalanx.supervision import CallTimeout, ExecutorClosed, Strategy, WorkerDied

WAIT = 30.0  # seconds; no test takes them unless something is broken


@pytest.fixture
def spun(make: Make, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Builds groups that spin for as long as a test takes to find them at it."""

    def build(world_size: int = 2, spin: float = 1.0, **options: Any) -> Executor[Any]:
        monkeypatch.setattr(plane, "spin_time", lambda _ranks: spin)
        return make(Waiter, world_size, launch={"transport": "local"}, **options)

    return build


class Waiter(Echo):
    """Is kept from answering until a file is there; another file tells that it has begun."""

    def wait_at(self, gate: str) -> str:
        Path(f"{gate}.{self.rank()}").touch()
        wait_for(gate)
        return "passed"


def ticks(task: str) -> int:
    """Return the processor time of that thread or process, a folder under ``/proc``."""
    known = Path(f"/proc/{task}/stat").read_text().rpartition(")")[2].split()
    return int(known[11]) + int(known[12])


def is_at_rest(task: str) -> bool:
    """Whether it hardly runs. Its state says less: who waits for the interpreter "sleeps" too."""
    before = ticks(task)
    time.sleep(0.5)  # nothing happens: there is no event for that
    return ticks(task) - before < 3


def test_spinning_needs_a_processor_for_each_rank_and_the_driver() -> None:
    there = math.floor(usable_processors())

    assert spin_time(there - 1) == SPIN
    assert spin_time(there) == 0.0


def test_processors_are_no_more_than_the_affinity_allows() -> None:
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})

        assert usable_processors() <= 1
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.parametrize(
    ("own", "files", "most"),
    [
        ("0::/pod/box", {"pod/box/cpu.max": "50000 100000"}, 0.5),
        ("0::/pod/box", {"pod/box/cpu.max": "max 100000", "pod/cpu.max": "25000 100000"}, 0.25),
        ("0::/", {"cpu.max": "70000 100000"}, 0.7),
        ("0::/gone", {"cpu.max": "70000 100000"}, 0.7),
        (
            "4:memory:/box\n3:cpu,cpuacct:/box",
            {
                "cpu,cpuacct/box/cpu.cfs_quota_us": "20000",
                "cpu,cpuacct/box/cpu.cfs_period_us": "100000",
            },
            0.2,
        ),
        ("0::/box", {"box/cpu.max": "max 100000"}, None),
        ("0::/box", {}, None),
        ("0::/../outside", {}, None),
        ("3:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
    ],
)
def test_processors_are_no_more_than_any_quota_around_allows_else_the_affinity_counts(
    own: str,
    files: dict[str, str],
    most: float | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    groups = tmp_path / "groups"
    for name, text in files.items():
        (groups / name).parent.mkdir(parents=True, exist_ok=True)
        (groups / name).write_text(text + "\n")
    (tmp_path / "own").write_text(own + "\n")
    monkeypatch.setattr(cgroup, "MOUNTED", groups)
    monkeypatch.setattr(cgroup, "OWN", tmp_path / "own")

    assert usable_processors() == (most or len(os.sched_getaffinity(0)))


def test_who_has_looked_long_enough_sleeps(spun: Make, gate: Path) -> None:
    ex = spun(1, spin=0.01)
    ex.collective_rpc("echo", WAIT)
    assert is_at_rest(str(ex.ranks[0].pid))  # between calls

    answers: list[Any] = []
    caller = start_thread(lambda: answers.append(ex.collective_rpc("wait_at", WAIT, (str(gate),))))
    wait_until(lambda: ex.status().in_flight > 0)
    assert is_at_rest(f"self/task/{caller.native_id}")  # until its answer comes
    gate.touch()
    caller.join(WAIT)

    assert answers == [["passed"]]


def test_calls_of_every_kind_are_answered_as_ever_and_a_deadline_ends_the_looking(
    spun: Make, gate: Path
) -> None:
    ex = spun()

    futures = [ex.collective_rpc("echo", args=(n,), non_block=True) for n in range(100)]
    assert ex.collective_rpc("echo", WAIT, ("a",)) == ["a", "a"]
    assert ex.call("rank", WAIT, rank=1) == 1
    assert [future.result(WAIT) for future in futures] == [[n, n] for n in range(100)]
    large = bytes(3_000_000)
    assert ex.collective_rpc("echo", WAIT, (large,)) == [large, large]
    with pytest.raises(ValueError, match="boom"):
        ex.collective_rpc("fail", WAIT)
    ex.check_health(WAIT)

    with pytest.raises(CallTimeout) as caught:
        ex.collective_rpc("wait_at", 0.05, (str(gate),))
    gate.touch()
    assert sorted(caught.value.ranks) == [0, 1]
    assert ex.collective_rpc("echo", WAIT, (1,)) == [1, 1]


@pytest.mark.parametrize("what", ["death", "close", "ctrl-c"])
def test_what_ends_a_call_ends_the_looking(spun: Make, gate: Path, what: str) -> None:
    ex = spun(strategy=Strategy.ONE_FOR_ONE)
    main = threading.main_thread().ident or 0
    strikes: dict[str, tuple[Callable[[], object], Any]] = {
        "death": (lambda: kill(ex, 1), WorkerDied),
        "close": (ex.kill, (ExecutorClosed, WorkerDied)),
        "ctrl-c": (lambda: signal.pthread_kill(main, signal.SIGINT), KeyboardInterrupt),
    }
    strike, error = strikes[what]

    def strike_once_begun() -> None:
        wait_until(lambda: all(Path(f"{gate}.{rank}").exists() for rank in range(2)))
        strike()

    striker = start_thread(strike_once_begun)

    with pytest.raises(error):
        ex.collective_rpc("wait_at", WAIT, (str(gate),))
    striker.join(LONG)
    gate.touch()

    if what != "close":
        assert ex.collective_rpc("echo", WAIT, (1,)) == [1, 1]


def test_a_thread_of_the_users_runs_while_another_looks(spun: Make, gate: Path) -> None:
    ex = spun(1)

    def work() -> None:
        count = 0
        while count < 1_000_000:
            count += 1
        gate.touch()

    worker = start_thread(work)

    assert ex.collective_rpc("wait_at", WAIT, (str(gate),)) == ["passed"]
    worker.join(WAIT)


def test_a_rank_that_looks_is_stopped_in_good_order(spun: Make) -> None:
    ex = spun(1)
    ex.collective_rpc("echo", WAIT)

    kill(ex, 0, signal.SIGTERM)  # it has just been called, so it looks for the next call
    wait_until(lambda: ex.status().restarts == 1)

    assert ex.collective_rpc("echo", WAIT, (1,)) == [1]
    assert ex.status().reports[-1].reason.signal == signal.SIGTERM
