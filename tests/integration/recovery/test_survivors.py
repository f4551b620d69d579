"""One rank dies, the others are kept: they leave the old process group and join the next epoch."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from tests.support.options import Make, with_defaults
from tests.support.processes import start_thread, wait_until
from tests.support.rank_faults import OFTEN, kill, wait_for_view, wait_healed
from tests.support.survivors import Holder, Keeper, Loner, Sender, Spinner
from tests.support.workers import Echo

from phalanx.actors import Executor, Limits, RestartPolicy, WorkerContext
from phalanx.runtime import RendezvousStore, Runtime
from phalanx.supervision import ExitKind, Intensity, WorkerDied

LONG = 60.0


@pytest.fixture
def make(make: Make, torch_runtime: Runtime) -> Make:
    def build(world_size: int = 3, **options: Any) -> Executor[Any]:
        worker = options.pop("worker", Keeper)
        usual = with_defaults(
            options,
            policy={"survivors": "keep"},
            launch={"preload": ("torch",)},
            runtime=torch_runtime,
            intensity=OFTEN,
        )
        return make(worker, world_size, **usual)

    return build


def pids(ex: Executor[Any]) -> list[int | None]:
    return [info.pid for info in ex.ranks]


def are_kept(ex: Executor[Any], before: list[int | None]) -> list[bool]:
    """Return of each rank whether its process is still the one *before*."""
    return [now == then for now, then in zip(pids(ex), before, strict=True)]


@pytest.mark.parametrize("dead", [0, 1, 2])
def test_only_the_dead_rank_is_replaced_and_the_others_keep_what_they_hold(
    make: Make, dead: int
) -> None:
    ex = make()
    before = pids(ex)

    kill(ex, dead)
    wait_healed(ex, 1)

    assert ex.collective_rpc("total", LONG) == [3.0, 3.0, 3.0]
    for rank, (loads, reforms, pid, epoch) in enumerate(ex.collective_rpc("kept", LONG)):
        assert (loads, epoch) == (1, 2)
        assert reforms == ([] if rank == dead else [2])
        assert (pid == before[rank]) == (rank != dead)
    assert [info.incarnation for info in ex.ranks] == [1 + (rank == dead) for rank in range(3)]
    assert {info.epoch for info in ex.ranks} == {2}
    assert "the others are kept" in ex.status().reports[-1].decision


class Kept(Echo):
    def on_reform(self, ctx: WorkerContext) -> None:
        """Nothing is to be done."""


def test_a_survivor_keeps_the_variables_that_its_launch_gave_it(make: Make) -> None:
    given = {"GLOO_SOCKET_IFNAME": "mine0"}
    ex = make(2, worker=Kept, launch={"env": given})

    kill(ex, 1)
    wait_healed(ex, 1)

    assert ex.collective_rpc("env", LONG, tuple(given)) == [given, given]
    assert ex.ranks[0].incarnation == 1


def test_ranks_that_cannot_be_told_of_the_next_epoch_are_replaced(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    ex = make()
    before = pids(ex)
    works, errors = RendezvousStore.open, [OSError(24, "Too many open files")]

    def fails_once(store: RendezvousStore, epoch: int) -> Any:
        if errors:
            raise errors.pop()
        return works(store, epoch)

    monkeypatch.setattr(RendezvousStore, "open", fails_once)
    kill(ex, 1)

    total = ex.collective_rpc("total", LONG, retries=3)
    assert total == [3.0, 3.0, 3.0]
    assert not set(before) & set(pids(ex))
    assert any("could not be re-formed" in str(each.reason) for each in ex.status().reports)
    assert ex.status().restarts_in_window == 1


def test_a_planned_restart_of_a_rank_keeps_the_others(make: Make) -> None:
    ex = make()
    before = pids(ex)
    under_way = [ex.collective_rpc("total", LONG, non_block=True) for _ in range(5)]

    ex.restart(1, timeout=LONG)

    assert [call.result(LONG) for call in under_way] == [[3.0, 3.0, 3.0]] * 5
    assert ex.collective_rpc("total", LONG) == [3.0, 3.0, 3.0]
    kept = ex.collective_rpc("kept", LONG)
    assert [(reforms, epoch) for _, reforms, _, epoch in kept] == [([2], 2), ([], 2), ([2], 2)]
    assert are_kept(ex, before) == [True, False, True]
    assert (ex.status().restarts, ex.status().reports) == (0, ())


def test_a_rank_that_is_kept_keeps_the_variables_that_were_given_to_it(make: Make) -> None:
    ex = make(2, launch={"env": {"LOCAL_RANK": "0"}})

    ex.restart(0, timeout=LONG)

    names = ("LOCAL_RANK", "TORCHELASTIC_RESTART_COUNT")
    assert ex.collective_rpc("env", LONG, names) == [dict(zip(names, "02", strict=True))] * 2


def reduce_for_ever(ex: Executor[Any], mark: Path, absent: int | None = None) -> Any:
    """Return a call that all ranks have begun; they are all blocked in it if one stays *absent*.

    Gloo does not tell of a death who is just then in the middle of a message to the dead: so where
    all others are to be kept, none may be.
    """
    future = ex.collective_rpc("reduce_for_ever", args=(str(mark), absent), non_block=True)
    wait_until(lambda: all(Path(f"{mark}.{rank}").exists() for rank in range(ex.world_size)))
    if absent is not None:
        looks: list[list[str] | None] = [None]

        def are_blocked() -> bool:
            looks.append(asleep(pids(ex)))
            return looks[-1] is not None and looks[-1] == looks[-2]

        wait_until(are_blocked)
    return future


def asleep(those: list[int | None]) -> list[str] | None:
    """Return how often their threads have ever slept; None if one does not sleep just now.

    But for gloo's own, which wake every 10 ms though nothing has come.
    """
    found: list[str] = []
    for pid in those:
        for task in Path(f"/proc/{pid}/task").iterdir():
            status = dict(
                line.split(":\t", 1) for line in (task / "status").read_text().splitlines()
            )
            if not status["State"].startswith("S"):
                return None
            if status["Name"].strip() != "gloo_tcp_loop":
                found.append(f"{status['Pid']} {status['voluntary_ctxt_switches']}")
    return sorted(found)


def test_survivors_that_are_blocked_in_a_collective_get_out_of_it(
    make: Make, tmp_path: Path
) -> None:
    ex = make(world_size=4)
    before = pids(ex)
    future = reduce_for_ever(ex, tmp_path / "begun", absent=2)

    kill(ex, 2)

    with pytest.raises(WorkerDied, match="rank 2"):
        future.result(LONG)
    assert ex.collective_rpc("total", LONG) == [4.0] * 4
    told = "\n".join(report.render() for report in ex.status().reports)
    assert are_kept(ex, before) == [True, True, False, True], told


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_survivor_in_the_middle_of_a_message_is_replaced_and_those_that_wait_for_it_are_kept(
    make: Make, tmp_path: Path, world_size: int
) -> None:
    """Gloo raises no error in rank 0; the others, which wait for rank 0, get one."""
    ex = make(world_size, worker=Sender, policy=RestartPolicy(leave_within=LONG))
    before = pids(ex)
    busy = reduce_for_ever(ex, tmp_path / "begun")
    wait_until(lambda: written(before[1]) > 16 << 20)  # it has begun, and goes on
    kill(ex, 1, signal.SIGSTOP)

    kill(ex, 1)

    assert isinstance(busy.exception(20.0), WorkerDied)
    assert ex.collective_rpc("total", 20.0) == [float(world_size)] * world_size
    assert are_kept(ex, before)[2:] == [True] * (world_size - 2)
    _, report = ex.status().reports
    assert report.rank == 0
    assert "it is in the middle of a message of gloo" in report.reason.detail


def test_a_group_whose_thread_tries_without_end_to_read_a_message_is_aborted(make: Make) -> None:
    ex = make(2, worker=Spinner)
    ex.collective_rpc("leave_message", LONG)

    assert "timeout caused pair closure" in ex.call("abort", LONG, rank=0)


def written(pid: int | None) -> int:
    """Return how many bytes that process has written, to whatever."""
    fields = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
    return int(fields["wchar"])


@pytest.mark.parametrize("how", ["group", "operation", "thread", "error"])
def test_whoever_refers_to_the_old_group_holds_up_nobody(
    make: Make, tmp_path: Path, how: str
) -> None:
    """Rank 1 waits for its neighbours alone, who live; without its end they would keep it."""
    ex = make(4, worker=Holder, args=(how,), policy=RestartPolicy(leave_within=30.0))
    before = pids(ex)
    busy = reduce_for_ever(ex, tmp_path / "begun", absent=3)

    kill(ex, 3)

    assert isinstance(busy.exception(10.0), WorkerDied)
    assert ex.collective_rpc("total", 10.0) == [4.0] * 4
    assert pids(ex)[:3] == before[:3]
    assert len(ex.status().reports) == 1
    if how == "thread":
        assert not ex.call("still_waits", LONG, rank=0)


def test_the_environment_of_survivors_is_that_of_the_new_epoch(make: Make) -> None:
    ex = make(world_size=2)
    (old, _), _ = ex.collective_rpc("meet_by_env", LONG)

    kill(ex, 1)
    wait_healed(ex, 1)

    first, second = ex.collective_rpc("meet_by_env", LONG)
    assert first == second
    assert first[0] != old
    assert first[1] == "2"


def test_deaths_one_after_the_other_keep_the_rest_each_time(make: Make) -> None:
    ex = make()
    first = ex.ranks[0].pid

    for round_ in range(1, 4):
        kill(ex, 1 + round_ % 2)
        wait_healed(ex, round_)
        assert ex.collective_rpc("total", LONG) == [3.0] * 3

    assert ex.ranks[0].pid == first
    assert ex.status().epoch == 4


@pytest.mark.parametrize("dead", [(0, 1), (1, 2), (0, 1, 2, 3)])
def test_several_at_once_are_one_failure_each_or_fewer(make: Make, dead: tuple[int, ...]) -> None:
    ex = make(world_size=4)
    before = pids(ex)

    for rank in dead:
        kill(ex, rank)
    wait_healed(ex, len(dead))

    assert ex.collective_rpc("total", LONG, retries=5) == [4.0] * 4
    told = "\n".join(report.render() for report in ex.status().reports)
    assert are_kept(ex, before) == [rank not in dead for rank in range(4)], told
    assert ex.status().restarts_in_window <= len(dead)


def test_a_hook_that_never_succeeds_costs_a_restart_of_all_and_not_the_group(make: Make) -> None:
    wrong = dict.fromkeys(range(3), "raise")
    ex = make(worker=Loner, kwargs={"wrong": wrong}, intensity=Intensity(2, 60.0))
    before = pids(ex)

    kill(ex, 1)
    wait_healed(ex, 2)

    assert ex.collective_rpc("rank", LONG) == [0, 1, 2]
    assert not set(pids(ex)) & set(before)
    assert ex.status().restarts_in_window <= 2  # who was up in time to be re-formed is counted
    told = [str(report.reason) for report in ex.status().reports]
    assert any("re-formed: ValueError: cannot go on" in reason for reason in told), told


def test_a_survivor_that_does_not_leave_in_time_is_replaced_too(make: Make, tmp_path: Path) -> None:
    ex = make(policy=RestartPolicy(leave_within=1.0))
    before = pids(ex)
    busy = ex.call("busy", args=(str(tmp_path / "never"),), non_block=True, rank=0)

    kill(ex, 1)

    with pytest.raises(WorkerDied, match="leave_within=1 s") as caught:
        busy.result(LONG)
    assert caught.value.report.reason.kind is ExitKind.UNRESPONSIVE
    assert "wait_for" in caught.value.report.stacks
    assert ex.collective_rpc("total", LONG) == [3.0] * 3
    assert pids(ex)[2] == before[2]


def test_a_survivor_that_does_not_heed_costs_no_other_its_process(make: Make) -> None:
    ex = make(policy=RestartPolicy(leave_within=1.0), limits=Limits(stopped=60.0))
    before = pids(ex)
    kill(ex, 2, signal.SIGSTOP)

    kill(ex, 1)

    assert ex.collective_rpc("total", LONG, retries=5) == [3.0] * 3
    assert are_kept(ex, before) == [True, False, False]


def test_a_survivor_that_hangs_in_its_hook_is_replaced_too(make: Make) -> None:
    """So may be those that wait for it in theirs: their time is over in the same moment."""
    ex = make(kwargs={"wrong": {2: "hang"}}, limits=Limits(start=5.0))
    before = pids(ex)

    kill(ex, 1)

    assert ex.collective_rpc("total", LONG, retries=5) == [3.0] * 3
    assert pids(ex)[2] != before[2]
    assert any("in on_reform" in report.stacks for report in ex.status().reports)
    assert ex.status().restarts_in_window < 3


def test_a_survivor_that_is_stopped_in_its_hook_is_replaced_too(make: Make) -> None:
    ex = make(kwargs={"wrong": {2: "stop"}}, limits=Limits(stopped=0.5, start=600.0))
    before = pids(ex)

    kill(ex, 1)

    assert ex.collective_rpc("total", LONG, retries=5) == [3.0] * 3
    assert are_kept(ex, before) == [True, False, False]
    assert "stopped for" in str(ex.status().reports[-1].reason)


def test_a_spare_takes_the_place_of_the_dead_among_the_kept(make: Make) -> None:
    ex = make(standby=1)
    wait_for_view(ex, lambda view: view.standby == 1)
    before = pids(ex)

    kill(ex, 1)
    wait_healed(ex, 1)

    assert ex.collective_rpc("total", LONG) == [3.0] * 3
    assert pids(ex)[0::2] == before[0::2]


def test_closing_in_the_middle_of_it_ends_everyone(make: Make) -> None:
    ex = make(kwargs={"wrong": {2: "hang"}})
    kill(ex, 1)
    wait_for_view(ex, lambda view: any(info.state == "reforming" for info in view.ranks))

    closer = start_thread(ex.close)
    closer.join(LONG)

    assert not closer.is_alive()
    assert ex.status().state == "ended"
