"""Warm spares take the place of the dead at once, and are replaced behind them."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from tests.support.event_recorder import EventRecorder
from tests.support.options import Make
from tests.support.processes import wait_until
from tests.support.rank_faults import OFTEN, kill, wait_for_view, wait_healed, wait_stopped
from tests.support.standby_workers import Warm
from tests.support.workers import Echo

from phalanx.actors import Executor, Launch, RestartPolicy
from phalanx.actors.group.standby import StandbyLost
from phalanx.runtime import ReportFolder, WorkerCrashed, usable_processors
from phalanx.runtime.linux import procfs
from phalanx.supervision import Intensity, SpecError, Strategy

LONG = 30.0
USUAL = {"worker": Warm, "strategy": Strategy.ONE_FOR_ONE, "standby": 1, "intensity": OFTEN}


def wait_warm(ex: Executor[Any], count: int = 1) -> None:
    wait_for_view(ex, lambda view: view.standby == count and str(view.phase) == "serving")


def spares(ex: Executor[Any]) -> list[int]:
    """The pids of the spares, by what ``ps`` shows."""
    title = f"phalanx: {ex.name} standby".encode()
    found: list[int] = []
    for pid, task in procfs.read_all().items():
        if task.parent == os.getpid() and task.state != "Z":
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(title):
                    found.append(pid)
    return found


def test_a_spare_takes_the_dead_ranks_place_and_is_replaced(make: Make) -> None:
    ex = make()
    wait_warm(ex)
    (spare,) = spares(ex)
    before = ex.ranks[0]

    kill(ex, 1)
    wait_healed(ex, 1)

    after = ex.ranks[1]
    assert (after.pid, after.incarnation, after.state) == (spare, 2, "up")
    assert ex.ranks[0] == before
    assert ex.collective_rpc("rank", LONG) == [0, 1]
    assert ex.collective_rpc("loaded", LONG) == [([], before.pid), ([spare], spare)]
    wait_warm(ex)
    assert spares(ex) != [spare]


def test_a_spare_becomes_what_a_new_process_would_have_been(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {"MINE": "one", "TMPDIR": str(tmp_path)}
    ex = make(Warm, launch=Launch(rank_env=[{"MINE": "zero"}, own], env={"ALL": "x"}))
    wait_warm(ex)
    monkeypatch.setenv("LATER", "seen")
    monkeypatch.chdir(tmp_path)

    kill(ex, 1)
    wait_healed(ex, 1)

    world = ex.call("world", LONG, rank=1)
    assert (world["rank"], world["world_size"], world["incarnation"]) == (1, 2, 2)
    assert world["device"] == "cpu"
    assert world["cwd"] == str(tmp_path)
    assert ex.call(lambda _: tempfile.gettempdir(), LONG, rank=1) == str(tmp_path)
    assert "rank 1/2 #2" in world["title"]
    names = ("MINE", "ALL", "LATER", "RANK", "WORLD_SIZE", "OMP_NUM_THREADS")
    env = ex.call("env", LONG, names, rank=1)
    share = str(max(1, int(usable_processors() // 2)))
    assert env == dict(zip(names, ("one", "x", "seen", "1", "2", share), strict=True))


def test_arguments_of_a_rank_reach_a_spare_without_the_hook(make: Make) -> None:
    ex = make(Echo, launch=Launch(rank_kwargs=[{"mine": 0}, {"mine": 1}]))
    wait_warm(ex)
    (spare,) = spares(ex)

    kill(ex, 1)
    wait_healed(ex, 1)

    who = ex.call("who", LONG, rank=1)
    assert (who["pid"], who["extra"]) == (spare, {"mine": 1})


def test_a_spare_that_dies_while_it_waits_is_replaced_and_reported_and_no_failure(
    make: Make, tmp_path: Path
) -> None:
    ex = make(policy=RestartPolicy(report_dir=tmp_path))
    crashes, lost = EventRecorder(ex, WorkerCrashed), EventRecorder(ex, StandbyLost)
    wait_warm(ex)
    (spare,) = spares(ex)

    os.kill(spare, signal.SIGKILL)
    report = crashes.wait()[0].report
    wait_until(lambda: spares(ex) not in ([], [spare]))
    wait_warm(ex)

    status = ex.status()
    assert (status.restarts, status.restarts_in_window, status.reports) == (0, 0, ())
    told = [(event.pid, event.cause, event.wait) for event in lost.seen]
    assert told == [(spare, "killed (SIGKILL)", 0.0)]
    assert (report.rank, report.decision) == (None, "replace the spare")
    assert report.child.endswith("/standby")
    assert str(report.reason) == "killed (SIGKILL)"
    ex.close()
    assert [each.report for each in ReportFolder(tmp_path).read()] == [report]


@pytest.mark.parametrize("how", ["raise", "die"])
def test_spares_that_never_get_warm_are_retried_with_a_growing_delay(make: Make, how: str) -> None:
    ex = make(args=(how,))

    first, second, third = EventRecorder(ex, StandbyLost).wait(3)

    assert first.wait < second.wait < third.wait
    if how == "raise":
        assert "ValueError: no such weights" in first.cause
    kill(ex, 0)
    wait_healed(ex, 1)
    assert ex.collective_rpc("rank", LONG) == [0, 1]


def test_a_spare_that_is_not_warm_yet_is_not_waited_for(make: Make, tmp_path: Path) -> None:
    ex = make(args=("hang", str(tmp_path / "gate")))

    kill(ex, 0)
    wait_healed(ex, 1)

    assert ex.collective_rpc("rank", LONG) == [0, 1]
    assert ex.status().standby == 0


def test_a_stopped_spare_is_passed_over(make: Make) -> None:
    ex = make()
    wait_warm(ex)
    (spare,) = spares(ex)
    os.kill(spare, signal.SIGSTOP)
    wait_stopped(spare)

    kill(ex, 0)
    wait_healed(ex, 1)

    assert ex.ranks[0].pid != spare
    assert ex.collective_rpc("rank", LONG) == [0, 1]
    wait_warm(ex)


def test_a_spare_that_dies_as_it_takes_its_rank_is_a_death_of_that_rank(make: Make) -> None:
    ex = make()
    wait_warm(ex)
    for round_ in range(1, 6):
        while not (alive := spares(ex)):  # its own death may be news still
            wait_warm(ex)
        (spare,) = alive
        kill(ex, 1)
        os.kill(spare, signal.SIGKILL)
        wait_healed(ex, round_)
        wait_warm(ex)
        assert ex.collective_rpc("rank", LONG, retries=1) == [0, 1]


def test_more_deaths_than_spares(make: Make) -> None:
    ex = make(world_size=4, standby=2)
    wait_warm(ex, 2)
    warm = set(spares(ex))

    for rank in range(4):
        kill(ex, rank)
    wait_healed(ex, 4)

    assert warm <= {info.pid for info in ex.ranks}
    assert ex.collective_rpc("rank", LONG) == [0, 1, 2, 3]
    wait_warm(ex, 2)


def test_a_group_that_gives_up_takes_its_spares_along(make: Make) -> None:
    ex = make(intensity=Intensity(0, 60.0))
    wait_warm(ex)

    kill(ex, 0)

    assert ex.wait_closed(LONG)
    assert ex.is_failed


def test_a_spare_that_prepares_cannot_have_arguments_of_its_own(make: Make) -> None:
    with pytest.raises(SpecError, match="rank_kwargs"):
        make(Warm, launch=Launch(rank_kwargs=[{}, {}]))
    with pytest.raises(SpecError, match="LD_PRELOAD is read as a program starts"):
        make(launch=Launch(rank_env=[{"OTHER": "1"}, {"LD_PRELOAD": "libm.so.6"}]))


def test_a_spare_that_cannot_be_started_is_no_failure_of_the_group(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    ex = make(launch="exec")
    wait_warm(ex)
    lost = EventRecorder(ex, StandbyLost)
    (spare,) = spares(ex)

    with monkeypatch.context() as broken:
        broken.setattr(sys, "executable", "/there/is/no/python")
        os.kill(spare, signal.SIGKILL)
        died, not_started = lost.wait(2)[:2]

    assert (died.pid, not_started.pid) == (spare, None)
    assert "/there/is/no/python" in not_started.cause
    assert ex.collective_rpc("rank", LONG) == [0, 1]
    assert ex.status().restarts == 0
    wait_warm(ex)
