"""States that outlive their workers: whole, of one call, and none that was never answered."""

from __future__ import annotations

import os
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.support.checkpoint_workers import Colliding, Counter, Holder, Resharder
from tests.support.event_recorder import EventRecorder
from tests.support.options import Make
from tests.support.processes import wait_until
from tests.support.programs import run_python
from tests.support.rank_faults import OFTEN, kill, wait_for_view, wait_healed
from tests.support.transport import TRANSPORT
from tests.support.workers import Echo

from phalanx.actors import (
    CheckpointFailed,
    CheckpointPolicy,
    CheckpointRejected,
    CheckpointRestored,
    CheckpointTaken,
    Executor,
    Limits,
)
from phalanx.runtime import Runtime
from phalanx.supervision import (
    CallTimeout,
    ExitKind,
    Intensity,
    NotPicklable,
    SpecError,
    Strategy,
    WorkerDied,
)

LONG = 30.0
USUAL = {"worker": Counter, "checkpoint": CheckpointPolicy(every_calls=1), "intensity": OFTEN}


def die(ex: Executor[Any], rank: int) -> None:
    restarts = ex.status().restarts
    kill(ex, rank)
    wait_healed(ex, restarts + 1)


def add(ex: Executor[Any], times: int = 1) -> None:
    for _ in range(times):
        ex.collective_rpc("add", LONG)


def states(ex: Executor[Any]) -> list[tuple[int, list[Any], int]]:
    found: list[tuple[int, list[Any], int]] = ex.collective_rpc("state", LONG, retries=1)
    return found


def memory_files() -> int:
    """How many snapshots this process keeps in memory."""
    count = 0
    for fd in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            count += "phalanx-snapshot" in str(fd.readlink())
    return count


# --- what is given back -------------------------------------------------------------------


def test_a_call_that_is_sent_again_after_a_broken_group_counts_once(
    make: Make, tmp_path: Path
) -> None:
    ex = make(worker=Colliding)
    add(ex)

    assert ex.collective_rpc("add_and_break", LONG, (str(tmp_path),), retries=1) == [2] * 2


@pytest.mark.parametrize("where", ["memory", "folder"])
def test_every_answered_call_is_in_the_state_that_is_given_back(
    make: Make, tmp_path: Path, where: str
) -> None:
    folder = None if where == "memory" else tmp_path / "states"
    ex = make(checkpoint=CheckpointPolicy(every_calls=1, where=folder))
    restored = EventRecorder(ex, CheckpointRestored)
    add(ex, 3)

    die(ex, 1)

    assert ex.collective_rpc("get", LONG) == [3, 3]
    assert sorted(event.rank for event in restored.wait(2)) == [0, 1]
    assert all(0.0 < event.took < LONG for event in restored.seen)
    latest = ex.status().checkpoint
    assert latest is not None
    assert (latest.ranks, latest.where) == ((0, 1), "" if folder is None else str(folder))
    assert latest.size_bytes > 0
    assert abs(latest.at - time.time()) < 60
    assert "snapshot" in ex.status().reports[-1].checkpoint


def test_what_a_rank_stored_with_a_call_that_was_never_answered_is_void(
    make: Make, tmp_path: Path
) -> None:
    """Rank 0 has stored and answered, rank 1 dies: neither is given back that call."""
    folder = tmp_path / "states"
    ex = make(checkpoint=CheckpointPolicy(every_calls=1, where=folder))
    add(ex)

    with pytest.raises(WorkerDied):
        ex.collective_rpc("add_and_die", LONG, (1,))

    assert [count for count, _, _ in states(ex)] == [1, 1]
    (folder / ".cut-000000000002.rank-0-of-2.4711").touch()  # of one that was killed as it wrote
    ex.close()
    assert {path.name.partition(".")[0] for path in folder.iterdir()} == {
        "cut-000000000001",
        "cut-000000000003",
    }


def test_independent_ranks_have_states_of_their_own(make: Make) -> None:
    ex = make(world_size=3, strategy=Strategy.ONE_FOR_ONE)
    for rank in range(3):
        for _ in range(rank + 1):
            ex.call("add", LONG, rank=rank)
    add(ex)

    die(ex, 2)
    die(ex, 0)

    assert states(ex) == [(2, [2], 2), (3, [], 1), (4, [4], 2)]


def test_a_pool_of_replicas_counts_every_job_once(make: Make) -> None:
    ex = make(world_size=3, strategy=Strategy.ONE_FOR_ONE)
    futures = [ex.submit("add", retries=10) for _ in range(60)]

    for rank in range(3):
        kill(ex, rank)
    for future in futures:
        future.result(LONG)

    assert sum(ex.collective_rpc("get", LONG, retries=1)) == 60


def test_under_rest_for_one_all_ranks_store_their_state_with_the_same_call(make: Make) -> None:
    ex = make(world_size=3, strategy=Strategy.REST_FOR_ONE)
    taken = EventRecorder(ex, CheckpointTaken)

    add(ex)
    ex.call("add", LONG, rank=2)
    taken.wait(2)
    latest = ex.status().checkpoint
    die(ex, 1)

    assert latest is not None
    assert latest.ranks == (0, 1, 2)
    assert states(ex) == [(1, [], 1), (1, [1], 2), (2, [2], 2)]


def test_a_spare_is_given_back_the_state_of_the_rank_whose_place_it_takes(make: Make) -> None:
    ex = make(strategy=Strategy.ONE_FOR_ONE, standby=1)
    wait_for_view(ex, lambda view: view.standby == 1)
    ex.call("add", LONG, (5,), rank=1)

    die(ex, 1)

    assert states(ex)[1] == (5, [5], 2)


# --- when it is taken ---------------------------------------------------------------------


def test_it_is_taken_by_time(make: Make) -> None:
    ex = make(checkpoint=CheckpointPolicy(every_seconds=0.05))
    taken = EventRecorder(ex, CheckpointTaken)
    add(ex)

    assert taken.wait()[0].took < LONG
    die(ex, 1)
    assert [count for count, _, _ in states(ex)] == [1, 1]


def test_it_is_taken_on_demand_between_calls_in_their_order(make: Make) -> None:
    ex = make(checkpoint=CheckpointPolicy())
    futures = [ex.collective_rpc("add", non_block=True) for _ in range(5)]
    first = ex.checkpoint()
    more = [ex.collective_rpc("add", non_block=True) for _ in range(5)]
    for future in (*futures, *more):
        future.result(LONG)

    die(ex, 0)

    assert ex.collective_rpc("get", LONG) == [5, 5]
    assert first.ranks == (0, 1)
    assert ex.checkpoint(timeout=LONG).number > first.number


def test_without_a_policy_it_is_never_taken(make: Make) -> None:
    ex = make(checkpoint=None, kwargs={"wrong": {"checkpoint": "kill"}})
    add(ex)

    die(ex, 0)

    assert [count for count, _, _ in states(ex)] == [0, 0]
    assert ex.status().checkpoint is None
    with pytest.raises(SpecError, match="CheckpointPolicy"):
        ex.checkpoint()


def test_a_planned_restart_loses_nothing(make: Make) -> None:
    ex = make(checkpoint=CheckpointPolicy())
    add(ex, 4)

    ex.restart(timeout=LONG)
    ex.call("add", LONG, rank=0)
    ex.restart(0, timeout=LONG)

    assert states(ex) == [(5, [5], 3), (4, [4], 3)]


def test_no_more_is_kept_than_was_asked_for(make: Make, tmp_path: Path, transport: Any) -> None:
    folder = tmp_path / "states"
    # From elsewhere a snapshot comes into memory that is not one file for each.
    for where in (None, folder) if transport == "local" else (folder,):
        ex = make(checkpoint=CheckpointPolicy(every_calls=1, keep=3, where=where))
        taken = EventRecorder(ex, CheckpointTaken)
        before = memory_files()
        add(ex, 10)
        taken.wait(10)
        kept = memory_files() - before if where is None else len(list(folder.iterdir()))
        assert kept == 6
        ex.close()


# --- where it is kept ---------------------------------------------------------------------


KEEPS_MANY = """
import resource
from phalanx import Executor
from phalanx.errors import SpecError
from tests.support.checkpoint_workers import Counter
resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
for where in (None, "states"):
    states = {"keep": 100, "where": where}
    try:
        with Executor(Counter, 2, checkpoint=states, launch={"preload": ()}):
            print("built")
    except SpecError as error:
        print(error)
"""


def test_snapshots_in_memory_have_descriptors_set_aside_for_them(tmp_path: Path) -> None:
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}

    done = run_python("-c", KEEPS_MANY, cwd=tmp_path, env=environ)

    refused, built = done.stdout.splitlines()
    assert refused.startswith("world_size=2: 282 descriptors are needed")
    assert "enough for 1 ranks" in refused
    assert built == "built"


def test_a_new_executor_goes_on_from_a_folder_where_it_is_told_to(
    make: Make, tmp_path: Path
) -> None:
    folder = tmp_path / "states"
    policy = CheckpointPolicy(every_calls=1, where=folder)
    first = make(checkpoint=policy)
    add(first, 3)
    number = first.checkpoint().number
    first.close()

    anew = make(checkpoint=policy)
    assert anew.collective_rpc("add", LONG) == [1, 1]
    anew.close()
    resumed = make(checkpoint=CheckpointPolicy(every_calls=1, where=folder, resume=True))
    assert resumed.collective_rpc("add", LONG) == [2, 2]

    latest = resumed.checkpoint()
    assert latest.number > number + 1
    resumed.close()


def test_close_takes_no_last_snapshot(make: Make, tmp_path: Path) -> None:
    policy = CheckpointPolicy(every_calls=3, where=tmp_path / "states", resume=True)
    first = make(checkpoint=policy)
    add(first, 5)
    wait_until(lambda: first.status().checkpoint is not None)
    first.close()

    resumed = make(checkpoint=policy)

    assert resumed.collective_rpc("get", LONG) == [3, 3]
    resumed.close()


def test_the_last_good_one_is_used_where_the_newest_is_torn_altered_or_missing(
    make: Make, tmp_path: Path
) -> None:
    folder = tmp_path / "states"
    resume = CheckpointPolicy(every_calls=1, where=folder, keep=4, resume=True)
    ex = make(checkpoint=resume)
    add(ex, 4)
    ex.close()
    files = sorted(folder.iterdir())
    assert len(files) == 8
    files[7].write_bytes(files[7].read_bytes()[:-5])
    altered = bytearray(files[4].read_bytes())
    altered[150] ^= 1
    files[4].write_bytes(altered)
    files[3].unlink()

    again = make(checkpoint=resume)

    assert again.collective_rpc("get", LONG) == [1, 1]
    again.close()


def test_damage_that_is_found_while_it_runs_costs_no_restart(make: Make, tmp_path: Path) -> None:
    folder = tmp_path / "states"
    ex = make(checkpoint=CheckpointPolicy(every_calls=1, where=folder))
    rejected = EventRecorder(ex, CheckpointRejected)
    add(ex, 2)
    max(folder.iterdir()).write_bytes(b"torn")

    die(ex, 0)

    assert ex.collective_rpc("get", LONG) == [1, 1]
    (event,) = rejected.wait()
    assert "no snapshot" in event.why
    assert ex.status().restarts == 1


@pytest.mark.parametrize("strategy", [Strategy.ONE_FOR_ALL, Strategy.ONE_FOR_ONE])
def test_a_folder_that_is_removed_while_it_runs_costs_the_snapshots_and_no_call(
    make: Make, tmp_path: Path, strategy: Strategy
) -> None:
    folder = tmp_path / "states"
    ex = make(strategy=strategy, checkpoint=CheckpointPolicy(every_calls=1, where=folder))
    failed = EventRecorder(ex, CheckpointFailed)
    add(ex)
    ex.checkpoint(timeout=LONG)

    shutil.rmtree(folder)

    for n in range(2, 5):
        assert ex.collective_rpc("add", LONG) == [n, n]
    assert str(folder) in failed.wait()[0].error
    assert ex.status().restarts == 0


def test_nothing_that_is_good_is_an_error_and_no_new_beginning(make: Make, tmp_path: Path) -> None:
    folder = tmp_path / "states"
    resume = CheckpointPolicy(every_calls=1, where=folder, keep=1, resume=True)
    ex = make(checkpoint=resume)
    add(ex)
    ex.close()
    first, second = sorted(folder.iterdir())

    whole = second.read_bytes()
    second.write_bytes(b"")
    with pytest.raises(Exception, match="all of them damaged"):
        make(checkpoint=resume)
    second.unlink()
    with pytest.raises(SpecError, match="none is complete"):
        make(checkpoint=resume)
    second.write_bytes(whole)

    assert first.exists()  # looked at before a new snapshot may take its place
    assert make(checkpoint=resume).collective_rpc("get", LONG) == [1, 1]


def test_the_folder_and_the_numbers_are_checked_when_the_spec_is_built(make: Make) -> None:
    with pytest.raises(SpecError, match="where"):
        make(checkpoint=CheckpointPolicy(where="/proc/x"))
    wrongs: tuple[dict[str, Any], ...] = (
        {"every_calls": 0},
        {"every_calls": 1.5},
        {"every_seconds": 0},
        {"every_seconds": "1"},
        {"every_seconds": float("nan")},
        {"keep": 0},
        {"resume": True},
        {"resume": 1, "where": "x"},
        {"where": 5},
    )
    for wrong in wrongs:
        with pytest.raises(SpecError, match=r"checkpoint\."):
            CheckpointPolicy(**wrong)
    with pytest.raises(SpecError, match=r"Echo\.checkpoint"):
        make(Echo)
    with pytest.raises(SpecError, match="checkpoint"):
        make(checkpoint=5)


# --- hooks that go wrong ------------------------------------------------------------------


@pytest.fixture
def when(tmp_path: Path) -> Path:
    """The file while which is there a hook goes wrong."""
    return tmp_path / "when"


@pytest.fixture
def wrong(make: Make, when: Path) -> Make:
    """Builds groups of which a hook goes wrong, on the rank *where* or on all."""

    def build(hook: str, how: str, where: int | None = None, **options: Any) -> Executor[Any]:
        return make(kwargs={"wrong": {hook: how}, "when": str(when), "where": where}, **options)

    return build


@pytest.mark.parametrize("how", ["raise", "unpicklable"])
def test_a_state_that_cannot_be_taken_costs_that_snapshot_only(
    wrong: Make, when: Path, how: str
) -> None:
    ex = wrong("checkpoint", how, 1)
    failed = EventRecorder(ex, CheckpointFailed)
    add(ex)
    before = ex.status().checkpoint
    when.touch()

    assert ex.collective_rpc("add", LONG) == [2, 2]
    (event,) = failed.wait()
    error = ValueError if how == "raise" else NotPicklable
    with pytest.raises(error, match="wrong|checkpoint"):
        ex.checkpoint()

    with pytest.raises(error):
        ex.restart(timeout=LONG)
    assert [info.incarnation for info in ex.ranks] == [1, 1]
    assert event.rank == 1
    assert ("ValueError: checkpoint goes wrong" if how == "raise" else "pickle") in event.error
    assert ex.status().checkpoint == before
    when.unlink()
    die(ex, 0)
    assert [count for count, _, _ in states(ex)] == [1, 1]


def test_a_death_while_the_state_is_taken_is_a_death_in_that_call(wrong: Make, when: Path) -> None:
    ex = wrong("checkpoint", "kill once", 0)
    add(ex)
    when.touch()

    with pytest.raises(WorkerDied) as caught:
        ex.collective_rpc("add", LONG, retries=0)
    assert caught.value.report.call.method == "checkpoint behind add"
    when.touch()
    assert ex.collective_rpc("add", LONG, retries=1) == [2, 2]


def test_a_rank_that_hangs_in_it_is_found_by_the_limit_of_the_hook(wrong: Make, when: Path) -> None:
    ex = wrong("checkpoint", "hang", 1, hang_after=0.5)
    add(ex)
    when.touch()

    with pytest.raises(WorkerDied) as caught:
        ex.collective_rpc("add", LONG, retries=0)
    when.unlink()

    report = caught.value.report
    assert report.reason.kind is ExitKind.UNRESPONSIVE
    assert "checkpoint behind add ran for" in str(report.reason)
    assert "go_wrong" in report.stacks
    assert [count for count, _, _ in states(ex)] == [1, 1]


def test_a_checkpoint_on_demand_has_a_timeout(wrong: Make, when: Path) -> None:
    ex = wrong("checkpoint", "hang", checkpoint=CheckpointPolicy())
    when.touch()

    with pytest.raises(CallTimeout, match="checkpoint"):
        ex.checkpoint(timeout=0.1)
    ex.kill()


def test_a_restart_that_has_no_time_to_take_the_state_changes_nothing(
    wrong: Make, when: Path
) -> None:
    ex = wrong("checkpoint", "hang", checkpoint=CheckpointPolicy())
    add(ex)
    when.touch()

    with pytest.raises(TimeoutError, match="not stored after 0.1 s; nothing was changed"):
        ex.restart(timeout=0.1)
    assert [info.incarnation for info in ex.ranks] == [1, 1]
    ex.kill()


@pytest.mark.parametrize(
    ("how", "given_back"),
    [
        ("once", 2),  # an exception: an older one is tried
        ("kill once", 3),  # says nothing about the state, which is tried again
    ],
)
def test_a_state_that_cannot_be_restored_gives_way_to_an_older_one(
    wrong: Make, when: Path, how: str, given_back: int
) -> None:
    ex = wrong("restore", how, 1)
    rejected = EventRecorder(ex, CheckpointRejected)
    add(ex, 3)
    when.touch()

    kill(ex, 0)
    wait_healed(ex, 2)

    assert ex.collective_rpc("get", LONG) == [given_back] * 2
    whys = ["restore goes wrong once" in event.why for event in rejected.wait(3 - given_back)]
    assert whys == [True] * (3 - given_back)
    assert ex.status().restarts_in_window == 2


def test_a_restore_that_never_works_ends_the_group_and_never_begins_anew(
    wrong: Make, when: Path
) -> None:
    ex = wrong("restore", "raise", intensity=Intensity(4, 60.0))
    add(ex, 3)
    when.touch()

    kill(ex, 0)

    assert ex.wait_closed(LONG)
    assert ex.is_failed
    told = [str(report.reason) for report in ex.status().reports[1:]]
    assert all("restore goes wrong" in text for text in told)


def test_a_restore_that_hangs_is_ended_by_the_start_timeout(wrong: Make, when: Path) -> None:
    ex = wrong("restore", "hang", 0, limits=Limits(start=2.0))
    rejected = EventRecorder(ex, CheckpointRejected)
    add(ex, 2)
    when.touch()

    kill(ex, 0)
    rejected.wait()
    when.unlink()

    assert [count for count, _, _ in states(ex)] == [1, 1]


# --- other sizes, other lives -------------------------------------------------------------


def test_a_group_of_another_size_shares_the_state_anew(make: Make) -> None:
    ex = make(Resharder, 2, checkpoint=CheckpointPolicy())
    add(ex, 6)

    ex.resize(3, timeout=LONG)
    assert ex.collective_rpc("state", LONG) == [(4, [[6, 6]], n) for n in (2, 2, 1)]
    die(ex, 2)
    assert [count for count, _, _ in states(ex)] == [4, 4, 4]
    ex.checkpoint()
    die(ex, 2)
    assert {tuple(restored) for _, restored, _ in states(ex)} == {(4,)}


def test_resizing_is_refused_where_the_state_cannot_be_shared_anew(make: Make) -> None:
    ex = make()
    add(ex)

    with pytest.raises(SpecError, match="reshard"):
        ex.resize(3)
    ex.resize(2, timeout=LONG)
    assert [count for count, _, _ in states(ex)] == [1, 1]


def test_a_folder_of_another_size_is_used_only_where_it_can_be_shared_anew(
    make: Make, tmp_path: Path
) -> None:
    resume = CheckpointPolicy(every_calls=1, where=tmp_path / "states", resume=True)
    ex = make(checkpoint=resume)
    ex.collective_rpc("add", LONG, (6,))
    ex.close()

    with pytest.raises(SpecError, match="world_size=4.*2 ranks"):
        make(world_size=4, checkpoint=resume)
    ex = make(Resharder, 4, checkpoint=resume)
    assert ex.collective_rpc("get", LONG) == [3] * 4
    ex.close()


def test_independent_ranks_may_be_more_or_fewer(make: Make) -> None:
    ex = make(strategy=Strategy.ONE_FOR_ONE)
    add(ex)

    ex.resize(3, timeout=LONG)

    assert [count for count, _, _ in states(ex)] == [1, 1, 0]


# --- large states -------------------------------------------------------------------------


@pytest.mark.parametrize("shares_memory", [True, False])
@pytest.mark.parametrize("where", ["memory", "folder"])
def test_a_large_state_is_given_back_and_can_be_changed(
    make: Make, torch_runtime: Runtime, tmp_path: Path, where: str, shares_memory: bool
) -> None:
    folder = None if where == "memory" else tmp_path / "states"
    ex = make(
        Holder,
        2,
        checkpoint=CheckpointPolicy(where=folder),
        launch={"preload": ("torch",), "transport": TRANSPORT if shares_memory else "zmq"},
        runtime=torch_runtime,
    )
    ex.collective_rpc("fill", LONG, (1_000_000, 2.0))
    assert ex.checkpoint().size_bytes > 2 * 4_000_000

    for _ in range(2):  # what the first one changed is its own
        die(ex, 0)
        assert ex.collective_rpc("total", LONG) == [2_000_000.0] * 2
        assert ex.collective_rpc("change", LONG) == [3_000_000.0] * 2
