"""A group is started, changed and stopped; nothing of it stays."""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import gc
import os
import signal
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from operator import getitem
from pathlib import Path
from typing import Any

import pytest
from pykka import ActorRegistry, ThreadingActor
from structlog.testing import capture_logs
from tests.support.event_recorder import EventRecorder
from tests.support.options import Make
from tests.support.processes import run_threads, start_thread, wait_until
from tests.support.rank_faults import kill
from tests.support.workers import Echo, LateAgain, Reducer, StartFails, Stubborn, Tidy, wait_for

from phalanx.actors import (
    Executor,
    Launch,
    Layout,
    Limits,
    StopPolicy,
    WorkerActor,
    WorkerContext,
)
from phalanx.actors.health.hang_detector import HangDetector
from phalanx.runtime import DevicePool, EventLoop, Runtime, usable_processors
from phalanx.supervision import (
    CallTimeout,
    ExecutorClosed,
    ExitKind,
    Intensity,
    NoDevice,
    RuntimeFault,
    SpecError,
    StartFailed,
    Strategy,
    UnknownMethod,
    WorkerDied,
)
from phalanx.testing import FakeGpus


class LateNote(WorkerActor):
    """Says that it is being started, and is not for a long time."""

    def __init__(self, gate: str) -> None:
        self.gate = gate

    def on_start(self, ctx: WorkerContext) -> None:
        Path(self.gate).touch()
        time.sleep(600)


class Swallowing(WorkerActor):
    """Has code that catches whatever is raised in it."""

    def wait(self, gate: str) -> bool:
        Path(gate).touch()
        try:
            time.sleep(600)
        except BaseException:  # that is the mistake
            return True
        return False


def test_a_rank_whose_code_catches_its_end_ends_after_the_call(make: Make, gate: Path) -> None:
    ex = make(worker=Swallowing, world_size=1)
    future = ex.call("wait", args=(str(gate),), rank=0, non_block=True)
    wait_until(gate.exists)

    kill(ex, 0, signal.SIGTERM)

    assert future.result(30) is True
    wait_until(lambda: ex.status().restarts == 1)
    assert ex.status().reports[-1].reason.signal == signal.SIGTERM


def test_a_rank_that_can_start_no_thread_ends_by_sigterm_all_the_same(make: Make) -> None:
    ex = make(world_size=1)
    ex.call(lambda _: threading.stack_size(1 << 46), 30, rank=0)  # more than it may map

    kill(ex, 0, signal.SIGTERM)

    wait_until(lambda: ex.status().restarts == 1)
    assert ex.status().reports[-1].reason.signal == signal.SIGTERM


def test_the_layout_gives_ranks_their_coordinates_which_their_titles_show(make: Make) -> None:
    layout = Layout(tensor=2, pipeline=2, extra={"ep": 2})
    ex = make(layout=layout, world_size=None, name="shown")

    who = ex.collective_rpc("who")

    assert [w["coordinates"] for w in who] == [
        {"tp": 0, "pp": 0, "ep": 0},
        {"tp": 1, "pp": 0, "ep": 1},
        {"tp": 0, "pp": 1, "ep": 0},
        {"tp": 1, "pp": 1, "ep": 1},
    ]
    assert ex.layout.output_rank == 2
    assert ex.layout.driver_ranks == (0, 2)
    titles = [Path(f"/proc/{info.pid}/cmdline").read_text() for info in ex.ranks]
    assert titles[1].startswith("phalanx: shown rank 1/4 tp=1,pp=0,ep=1 #1")
    assert titles[2].startswith("phalanx: shown rank 2/4 tp=0,pp=1,ep=0 #1")


def test_an_executor_whose_runtime_is_closed_while_it_starts_gives_everything_back(
    gate: Path,
) -> None:
    runtime = Runtime(console=None, stream=False)
    errors: list[BaseException] = []

    def build() -> None:
        with pytest.raises(StartFailed) as caught:
            Executor(LateNote, 1, args=(str(gate),), runtime=runtime, launch=Launch(preload=()))
        errors.append(caught.value)

    building = start_thread(build)
    wait_until(gate.exists)  # the rank is in its `on_start`
    runtime.close()

    building.join(30)
    assert len(errors) == 1


def test_arguments_and_environment_are_shared_and_per_rank(make: Make) -> None:
    ex = make(
        args=("hi",),
        kwargs={"shared": 1},
        launch=Launch(
            rank_kwargs=[{"mine": "a"}, {"mine": "b"}],
            env={"PHALANX_TEST": "all"},
            rank_env=[{}, {"PHALANX_TEST": "one"}],
        ),
    )

    assert [w["extra"] for w in ex.collective_rpc("who")] == [
        {"shared": 1, "mine": "a"},
        {"shared": 1, "mine": "b"},
    ]
    names = ("PHALANX_TEST", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS")
    first, second = ex.collective_rpc("env", args=names)
    assert (first["PHALANX_TEST"], second["PHALANX_TEST"]) == ("all", "one")
    assert (first["RANK"], second["RANK"]) == ("0", "1")
    assert (second["LOCAL_RANK"], second["WORLD_SIZE"]) == ("1", "2")
    assert first["MASTER_ADDR"] == "127.0.0.1"


def test_ranks_share_the_processors_unless_the_user_sets_their_threads(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    whole = int(usable_processors())
    for ranks in (1, 2):
        env = make(world_size=ranks).call("env", args=("OMP_NUM_THREADS",), rank=0)
        assert env == {"OMP_NUM_THREADS": str(max(1, whole // ranks))}

    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert make(world_size=1).call("env", args=("OMP_NUM_THREADS",), rank=0) == {
        "OMP_NUM_THREADS": "3"
    }


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("raise", "rank 1 .*bad weights"),
        ("unpicklable", "Unpicklable: bad weights"),
        ("exit", "rank 1 .*exited during its start"),
        ("sysexit", "rank 1 .*exit code 7"),
        ("kill", "rank 1 .*SIGKILL"),
    ],
)
def test_a_failed_start_says_which_rank_and_how(make: Make, how: str, says: str) -> None:
    with pytest.raises(StartFailed, match=says) as caught:
        make(StartFails, 2, kwargs={"how": how, "rank": 1})

    if how == "raise":  # the worker's own exception comes out
        error = caught.value.__cause__
        assert isinstance(error, ValueError)
        assert "workers.py" in "\n".join(error.__notes__)
        assert [report.rank for report in caught.value.reports] == [1]


def test_close_runs_on_stop_once_however_often_it_is_called(make: Make, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    ex = make(Tidy, 2, args=(str(notes),))

    run_threads(2, lambda _: ex.close())
    ex.close()

    assert sorted(notes.read_text().splitlines()) == [
        "stopped shutdown rank=0 inc=1",
        "stopped shutdown rank=1 inc=1",
    ]
    with pytest.raises(ExecutorClosed):
        ex.collective_rpc("rank")
    with pytest.raises(ExecutorClosed):
        ex.restart()
    assert ex.status().state == "ended"


def test_a_call_in_flight_may_end_while_ranks_are_asked_to_stop(make: Make, gate: Path) -> None:
    ex = make(world_size=1)
    future = ex.collective_rpc("gated", args=(str(gate), "in time"), non_block=True)

    closer = start_thread(ex.close)
    wait_until(lambda: ex.status().state == "closing")
    gate.touch()
    closer.join(30)

    assert future.result(0) == ["in time"]


def test_a_worker_that_ignores_everything_is_killed_and_its_call_told(
    make: Make, tmp_path: Path
) -> None:
    ex = make(Stubborn, 1, limits=Limits(stop=StopPolicy(ask=0.1, terminate=0.1)))
    gate = tmp_path / "held"
    future = ex.collective_rpc("hold", args=(str(gate),), non_block=True)
    wait_until(gate.exists)

    ex.close()

    with pytest.raises(ExecutorClosed):
        future.result(0)


def test_a_name_is_one_executors_until_that_is_replaced_ends_or_does_not_start(make: Make) -> None:
    first = make(world_size=1, name="notebook")

    with pytest.raises(SpecError, match="'notebook'.*replace=True"):
        make(world_size=1, name="notebook")
    assert first.collective_rpc("rank") == [0]
    with pytest.raises(SpecError, match="name the executor"):
        make(world_size=1, replace=True)
    with Runtime(console=None, stream=False) as closed:
        pass
    with pytest.raises(RuntimeFault, match="closed"):
        make(world_size=1, name="notebook", replace=True, runtime=closed)
    with pytest.raises(SpecError, match="'notebook'.*replace=True"):
        make(world_size=1, name="notebook")  # that failed, and left the name to the first
    second = make(world_size=1, name="notebook", replace=True)
    assert first.status().state == "ended"
    assert second.collective_rpc("rank") == [0]

    second.request_close()
    last = make(world_size=1, name="notebook")  # once the other has gone
    assert last.collective_rpc("rank") == [0]
    with pytest.raises(StartFailed):
        make(StartFails, 1, kwargs={"how": "exit"}, name="again")
    assert make(world_size=1, name="again").collective_rpc("rank") == [0]


def test_two_executors_of_one_name_at_once_leave_one(make: Make) -> None:
    made: list[Any] = []

    def build(_: int) -> None:
        try:
            made.append(make(world_size=1, name="twin", replace=True))
        except (ExecutorClosed, SpecError) as error:
            made.append(error)

    run_threads(2, build)

    assert len(made) == 2
    built = [one for one in made if not isinstance(one, Exception)]
    (left,) = [one for one in built if one.status().state == "serving"]
    assert left.collective_rpc("rank", 30) == [0]


def test_a_forgotten_executor_is_closed_by_the_garbage_collector(runtime: Any) -> None:
    ex = Executor(Echo, 1, launch=Launch(preload=()), runtime=runtime)
    group = ex._group

    del ex

    assert group.wait_closed(30)


def test_events_and_emitted_values_reach_the_driver(make: Make) -> None:
    ex = make(world_size=2)
    recorded = EventRecorder(ex)

    ex.collective_rpc("emit", args=({"loss": 1.5},))

    assert {(e.rank, e.value["loss"]) for e in recorded.wait(2)} == {(0, 1.5), (1, 1.5)}


def test_inline_is_the_same_api_in_the_callers_thread(make: Make) -> None:
    ex = make(world_size=1, launch="inline", kwargs={"greeting": "yo"})
    seen: list[Any] = []
    ex.subscribe(seen.append)

    assert ex.collective_rpc("who")[0]["pid"] == os.getpid()
    assert ex.collective_rpc("echo", args=(1,), non_block=True).result() == [1]
    assert ex.gather("fail")[0].ok is False
    assert ex.proxy().forward(3) == (0, 3)
    pooled = ex.submit("echo", args=("p",))
    assert (pooled.abandon(), pooled.result()) == (False, "p")

    async def awaited() -> Any:
        return await pooled, await ex.aio.call("echo", args=("q",), rank=0)

    assert asyncio.run(awaited()) == ("p", "q")
    ex.collective_rpc("emit", args=("event",))
    assert [event.value for event in seen] == ["event"]
    ex.check_health()
    ex.forgive_restarts(1)
    ex.resize(1)
    with pytest.raises(SpecError, match="count"):
        ex.forgive_restarts(-1)
    divided = ex.collective_rpc("rank", non_block=True, aggregate=lambda *_: 1 / 0)
    assert isinstance(divided.exception(), ZeroDivisionError)
    with pytest.raises(ValueError, match="boom"):
        ex.collective_rpc("fail")
    with pytest.raises(UnknownMethod):
        ex.collective_rpc("nope")
    ex.close()
    with pytest.raises(ExecutorClosed):
        ex.collective_rpc("rank")


class Keeper(WorkerActor):
    """Emits what it keeps."""

    kept = ("kept", ["as it was"])

    def tell(self) -> Any:
        self.ctx.emit(self.kept)
        return self.kept


def test_an_inline_rank_is_safe_from_subscribers(make: Make) -> None:
    ex, seen = make(Keeper, 1, launch="inline"), list[Any]()
    ex.subscribe(lambda event: event.value[1].clear())
    ex.subscribe(lambda event: event.missing)
    ex.subscribe(seen.append)

    with capture_logs() as logged:
        assert ex.call("tell", rank=0) == ("kept", ["as it was"])

    assert [event.value for event in seen] == [("kept", [])]
    (failed,) = (each for each in logged if each["event"] == "phalanx.callback_failed")
    assert "AttributeError" in failed["trace"]


@pytest.mark.parametrize(
    ("strategy", "incarnations"),
    [("one_for_one", [1, 2, 1]), ("rest_for_one", [1, 2, 2]), ("one_for_all", [2, 2, 2])],
)
def test_a_planned_restart_waits_for_calls_and_takes_along_whom_the_strategy_names(
    make: Make, gate: Path, strategy: str, incarnations: list[int]
) -> None:
    ex = make(world_size=3, strategy=strategy, intensity=Intensity(0, 60.0))
    future = ex.collective_rpc("gated", args=(str(gate), "kept"), non_block=True)
    thread = start_thread(ex.restart, 1)
    wait_until(lambda: ex._group.plane.holds)
    gate.touch()
    thread.join(30)

    assert future.result(30) == ["kept"] * 3
    assert [w["incarnation"] for w in ex.collective_rpc("who", 30)] == incarnations
    assert (ex.status().restarts, ex.status().planned) == (0, 1)  # it is no failure


@pytest.mark.parametrize("end", ["timeout", "cancel"])
def test_a_restart_by_force_ends_an_abandoned_call_and_counts_as_no_failure(
    make: Make, tmp_path: Path, end: str
) -> None:
    ex = make(world_size=2, intensity=Intensity(0, 60.0))
    nowhere = (str(tmp_path / "gate"),)
    if end == "timeout":
        with pytest.raises(CallTimeout):
            ex.collective_rpc("gated", 0.2, args=nowhere)
    else:
        future = ex.collective_rpc("gated", args=nowhere, non_block=True)
        await_doing(ex, "gated for")
        assert not future.cancel()  # it is running
        assert future.abandon()
    assert all(
        info.doing.startswith("an abandoned call, gated, for") for info in await_doing(ex, "gated")
    )
    with pytest.raises(TimeoutError, match="nothing was changed"):
        ex.restart(timeout=0.1)

    ex.restart(force=True, timeout=30)

    assert [each["incarnation"] for each in ex.collective_rpc("who", 30)] == [2, 2]
    status = ex.status()
    assert (status.restarts, status.restarts_in_window, status.planned) == (0, 0, 1)
    for report in status.reports:
        assert report.call is not None
        assert (report.call.method, report.call.abandoned) == ("gated", True)
        assert "abandoned by its caller" in report.render()
        assert str(report.reason) == "shutdown (restart(force=True))"
    assert len(status.reports) == 2


def test_a_restart_by_force_ends_calls_in_flight_or_has_them_sent_again(
    make: Make, gate: Path
) -> None:
    ex = make(world_size=2, strategy=Strategy.ONE_FOR_ONE)
    lost = ex.call("gated", args=(str(gate),), non_block=True, rank=0)
    queued = ex.call("who", non_block=True, rank=0)
    again = ex.call("gated", args=(str(gate), 7), non_block=True, rank=1, retries=1)
    await_doing(ex, "gated for")

    ex.restart(0, force=True, timeout=30)
    with pytest.raises(WorkerDied, match=r"restart\(force=True\)") as caught:
        lost.result(30)
    assert caught.value.report.call.method == "gated"
    assert queued.result(30)["incarnation"] == 2
    ex.restart(1, force=True, timeout=30)
    gate.touch()

    assert again.result(30) == 7
    assert ex.status().restarts == 0
    assert [info.incarnation for info in ex.ranks] == [2, 2]


def await_doing(ex: Executor[Any], what: str) -> tuple[Any, ...]:
    """Return the ranks once all of them are doing that."""
    deadline = time.monotonic() + 30
    while True:
        ranks = ex.ranks
        if all(what in info.doing for info in ranks):
            return ranks
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_restarts_count_in_the_window_for_as_long_as_its_period(make: Make) -> None:
    ex = make(world_size=1, intensity=Intensity(5, 0.5))
    with pytest.raises(WorkerDied):
        ex.collective_rpc("kill_self", 30, (0,))
    ex.collective_rpc("rank", 30)

    wait_until(lambda: not ex.status().restarts_in_window)
    assert ex.status().restarts == 1


@pytest.mark.parametrize(
    ("kind", "step"),
    [
        (EventLoop, "watch"),  # of the reader
        (HangDetector, "__init__"),  # the last part of the actor
        (ThreadingActor, "_start_actor_loop"),
    ],
)
def test_an_executor_that_cannot_be_built_leaves_nothing(
    make: Make, runtime: Runtime, monkeypatch: pytest.MonkeyPatch, kind: type, step: str
) -> None:
    pool = DevicePool(None)
    make(world_size=1).collective_rpc("rank", 30)

    def held() -> tuple[int, ...]:
        opened = len(list(Path("/proc/self/fd").iterdir()))
        return len(ActorRegistry.get_all()), opened, len(runtime.loop._when_lost), pool._users

    before = held()

    def refuse(*_args: object, **_options: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(kind, step, refuse)
        for _ in range(3):
            with pytest.raises(RuntimeError, match="can't start"):
                make(world_size=1, devices=pool)

    assert held() == before


class Counter(WorkerActor):
    """Says how many threads were ever in it at once."""

    def __init__(self) -> None:
        self.inside = self.most = 0

    def stay(self, gate: str) -> int:
        self.inside += 1
        self.most = max(self.most, self.inside)
        wait_for(gate)
        self.inside -= 1
        return self.most


def test_an_inline_executor_that_fails_or_is_forgotten_leaves_its_pool() -> None:
    gpus = FakeGpus(1)
    with DevicePool.of("auto", 1, gpus, {}) as pool:
        ex = Executor(Echo, 1, launch="inline", devices=pool)
        with pytest.raises(NoDevice):
            Executor(Echo, 1, launch="inline", devices=pool)

        del ex
        gc.collect()

        assert [device.state for device in pool.status()] == ["free"]
    assert gpus.closed == 1


def test_an_inline_rank_serves_one_call_at_a_time(make: Make, gate: Path) -> None:
    ex = make(Counter, 1, launch="inline")
    begun = threading.Barrier(3)
    most: list[int] = []

    def call() -> None:
        begun.wait(30)
        most.append(ex.call("stay", args=(str(gate),), rank=0))

    threads = [start_thread(call) for _ in range(2)]
    begun.wait(30)
    time.sleep(0.1)  # for the second to come in, where it may
    gate.touch()
    for thread in threads:
        thread.join(30)

    assert most == [1, 1]


def test_resize_forms_the_group_anew(make: Make) -> None:
    ex = make(world_size=2)

    ex.resize(3)
    assert [w["world_size"] for w in ex.collective_rpc("who")] == [3, 3, 3]
    ex.resize(1)

    assert ex.collective_rpc("rank") == [0]
    assert ex.world_size == 1
    with pytest.raises(SpecError):
        ex.resize(0)


def test_ranks_that_a_resize_lays_out_have_their_coordinates(make: Make) -> None:
    ex = make(world_size=1)

    ex.resize(2, layout=Layout(pipeline=2))

    assert [who["coordinates"] for who in ex.collective_rpc("who")] == [{"pp": 0}, {"pp": 1}]


def test_calls_to_a_rank_that_a_resize_takes_away_end(make: Make, tmp_path: Path) -> None:
    gate, again = tmp_path / "gate", tmp_path / "again"
    ex = make(LateAgain, 3, args=(str(again),))
    held = ex.call("gated", args=(str(gate),), non_block=True, rank=0)
    resizing = start_thread(ex.resize, 1)
    wait_until(lambda: ex._group.plane.holds)
    queued = [
        ex.call("rank", non_block=True, rank=2),
        ex.scatter("echo", args=[(0,), (1,), (2,)], non_block=True),
        ex.collective_rpc("rank", unique_reply_rank=1, non_block=True),
        ex.collective_rpc("rank", unique_reply_rank=1, aggregate=getitem, non_block=True),
    ]
    stream = ex.stream(lambda _worker: iter("ab"), rank=2)
    ex.tell("rank", rank=2)
    stays = ex.call("rank", non_block=True, rank=0)
    gate.touch()

    assert held.result(30) is None
    fields = ["rank", "world_size", "unique_reply_rank", "unique_reply_rank"]
    assert [refused_field(each) for each in queued] == fields
    with pytest.raises(SpecError):
        next(stream)
    assert ex.world_size == ex.status().world_size == 1  # the new ranks are still in their start
    with pytest.raises(SpecError):
        ex.call("rank", rank=2)
    again.touch()
    ex.drain(30)
    resizing.join(30)
    assert stays.result(30) == 0


def test_a_call_that_waits_for_a_resize_has_the_ranks_that_it_names(make: Make, gate: Path) -> None:
    ex = make(world_size=1)
    held = ex.call("gated", args=(str(gate),), non_block=True, rank=0)
    resizing = start_thread(ex.resize, 2, layout=Layout(pipeline=2))
    wait_until(lambda: ex._group.plane.holds)
    spread = ex.scatter("echo", args=[("one",)], non_block=True)
    first = ex.collective_rpc("rank", unique_reply_rank=0, aggregate=getitem, non_block=True)
    outputs = [
        ex.collective_rpc("rank", aggregate=getitem, non_block=True),
        ex.proxy().rank.future(),
    ]
    gate.touch()

    assert held.result(30) is None
    assert refused_field(spread) == "world_size"
    assert first.result(30) == 0
    assert [each.result(30) for each in outputs] == [1, 1]  # of the last stage, as there is now
    resizing.join(30)


def refused_field(future: Any) -> str:
    with pytest.raises(SpecError) as caught:
        future.result(30)
    return caught.value.field


def test_a_resize_that_goes_on_after_its_timeout_has_the_new_size(make: Make, gate: Path) -> None:
    ex = make(LateAgain, 3, args=(str(gate),), strategy=Strategy.ONE_FOR_ONE)

    with pytest.raises(TimeoutError, match="it goes on"):
        ex.resize(1, timeout=0.3)
    with pytest.raises(SpecError):
        ex.call("rank", rank=2)
    with pytest.raises(SpecError):
        ex.restart(2)
    gate.touch()
    ex.restart(timeout=30)

    assert [each["incarnation"] for each in ex.collective_rpc("who", 30)] == [3]
    gate.unlink()
    with pytest.raises(TimeoutError, match="it goes on"):
        ex.resize(2, timeout=0.3)
    late = ex.call("rank", non_block=True, rank=1)  # there will be one
    gate.touch()
    assert late.result(30) == 1
    assert len(ex.ranks) == ex.world_size == 2


def assert_drained_with(ex: Executor[Any], last: Any, gate: Path, *, patience: float = 0.1) -> None:
    """A drain does not end before *last*, which does not end before *gate* is there."""
    with pytest.raises(TimeoutError, match=rf"without an outcome after {patience:g} s"):
        ex.drain(patience)
    assert not last.done()
    gate.touch()
    ex.drain(30)
    assert last.done()


def test_drain_waits_for_calls_that_wait_for_their_turn(make: Make, gate: Path) -> None:
    ex = make(world_size=1, limits=Limits(queue_depth=1))
    ex.tell("gated", args=(str(gate),))
    last = ex.collective_rpc("rank", non_block=True)
    assert (ex.status().in_flight, ex.status().waiting) == (1, 1)

    assert_drained_with(ex, last, gate)
    assert (ex.status().in_flight, ex.status().waiting) == (0, 0)
    assert ex.collective_rpc("rank", 30) == [0]


def test_a_planned_restart_that_takes_too_long_says_so_and_a_drain_waits_for_calls_behind_it(
    make: Make, gate: Path
) -> None:
    # Nobody else reads what ranks write: the watch for hangs would, now and then.
    ex = make(LateAgain, 1, args=(str(gate),), limits=Limits(stopped=None))
    with pytest.raises(TimeoutError, match=r"under way, not done after 0\.3 s"):
        ex.restart(timeout=0.3)
    last = ex.collective_rpc("who", non_block=True)

    assert_drained_with(ex, last, gate)
    assert [w["incarnation"] for w in last.result()] == [2]
    assert ex.status().restarts == 0


def test_drain_waits_for_a_call_that_is_made_again(make: Make, gate: Path) -> None:
    ex = make(LateAgain, 1, args=(str(gate),), limits=Limits(stopped=None))
    told = threading.Event()
    last = ex.collective_rpc("kill_self", args=(0,), non_block=True, retries=1)
    last.add_done_callback(lambda _: told.set())

    assert_drained_with(ex, last, gate, patience=1.0)  # in which the death is known
    assert told.wait(30)
    assert ex.status().restarts == 1


class LateFailure(Reducer):
    def on_start(self, ctx: WorkerContext) -> None:
        super().on_start(ctx)
        raise ValueError("boom")


def test_an_inline_rank_has_a_process_group_of_its_own() -> None:
    with Executor(Reducer, 1, launch="inline") as ex:
        assert ex.collective_rpc("total", args=(2.0,)) == [2.0]
        Executor(Echo, 1, launch="inline").close()  # which has none
        assert ex.collective_rpc("total", args=(2.0,)) == [2.0]
    with pytest.raises(ValueError, match="boom"):
        Executor(LateFailure, 1, launch="inline")
    with Executor(Reducer, 1, launch="inline") as ex:
        assert ex.collective_rpc("total", args=(2.0,)) == [2.0]


@pytest.mark.parametrize(("wait", "holds"), [("drain", 0), ("restart", 1)])
def test_of_two_that_wait_for_calls_one_may_give_up(
    make: Make, gate: Path, wait: str, holds: int
) -> None:
    ex = make(world_size=1)
    busy = ex.collective_rpc("gated", args=(str(gate),), non_block=True)
    first = start_thread(getattr(ex, wait))
    wait_until(lambda: ex._group.plane.holds == holds)

    with pytest.raises(TimeoutError):
        getattr(ex, wait)(timeout=0.05)

    assert ex._group.plane.holds == holds
    gate.touch()
    first.join(30)
    assert busy.result(30) == [None]
    assert ex.collective_rpc("rank", 30) == [0]


def test_the_kernel_takes_a_worker_before_the_driver_when_memory_runs_out(make: Make) -> None:
    ex = make(Echo, 1)

    score = ex.call(lambda _: int(Path("/proc/self/oom_score_adj").read_text()), rank=0)

    own = int(Path("/proc/self/oom_score_adj").read_text())
    assert own < score <= 1000


class Leaves(WorkerActor):
    """Leaves what a Python ends by itself: a pool, a thread, files that are not flushed."""

    def prepare(self, folder: Path) -> None:
        pool = ThreadPoolExecutor(1)
        pool.submit(int).result()
        globals().update(pool=pool, file=(folder / "file").open("w"))
        globals()["file"].write("text")

        def late() -> None:
            time.sleep(0.2)
            (folder / "thread").touch()

        threading.Thread(target=late).start()
        atexit.register((folder / "atexit").touch)

        class Circle:
            def __init__(self) -> None:
                self.me = self

            def __del__(self) -> None:
                (folder / "circle").touch()

        gc.disable()
        Circle()
        weakref.finalize(threading.main_thread(), (folder / "finalize").touch)
        ctypes.CDLL(None).puts(b"written by C")


def test_a_rank_ends_as_python_does(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with Executor(Leaves, 1, devices="cpu", launch=Launch(preload=())) as ex:
        ex.collective_rpc("prepare", args=(tmp_path,))

    assert ex.exit_reason is not None
    assert ex.exit_reason.kind is ExitKind.SHUTDOWN
    names = sorted(each.name for each in tmp_path.iterdir())
    assert names == ["atexit", "circle", "file", "finalize", "thread"]
    assert (tmp_path / "file").read_text() == "text"
    assert "written by C" in "".join(capfd.readouterr())
