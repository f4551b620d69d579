"""An executor serves calls: what goes in, what comes out, and what bad input says."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.actors.workers import Echo, LateAgain, Reducer, StartFails, Stubborn, Tidy

from phalanx.actors import Executor, Layout, StopPolicy, WorkerActor
from phalanx.runtime import Runtime
from phalanx.supervision import (
    BadArguments,
    CallTimeout,
    ExecutorClosed,
    Intensity,
    NotPicklable,
    RemoteError,
    SpecError,
    StartFailed,
    UnknownMethod,
    WouldDeadlock,
)

Make = Callable[..., Executor[Any]]


# --- calls ----------------------------------------------------------------------------------


def test_every_rank_answers_in_rank_order(make: Make) -> None:
    ex = make(world_size=3)

    assert ex.collective_rpc("rank") == [0, 1, 2]


def test_arguments_and_keywords_arrive(make: Make) -> None:
    ex = make(world_size=1)

    assert ex.collective_rpc("echo", args=({"a": [1, None]},)) == [{"a": [1, None]}]
    assert ex.collective_rpc("echo", kwargs={"value": "x"}) == ["x"]


def test_one_rank_answers_where_one_is_asked_for(make: Make) -> None:
    assert make(world_size=3).collective_rpc("rank", unique_reply_rank=2) == 2


def test_an_aggregator_gets_every_reply_and_the_leading_rank(make: Make) -> None:
    ex = make(world_size=3)

    out = ex.collective_rpc("rank", unique_reply_rank=1, aggregate=lambda all_, lead: (all_, lead))

    assert out == ([0, 1, 2], 1)


def test_a_callable_gets_the_worker_first(make: Make) -> None:
    ex = make()

    assert ex.collective_rpc(lambda worker, x: worker.ctx.rank + x, args=(10,)) == [10, 11]


def test_large_values_travel_both_ways(make: Make) -> None:
    ex = make()
    data = os.urandom(3_000_000)

    assert ex.collective_rpc("echo", args=(data,)) == [data, data]


def test_futures_complete_in_order_without_a_waiter(make: Make) -> None:
    ex = make()
    done: list[int] = []
    finished = threading.Event()

    futures = [ex.collective_rpc("echo", args=(i,), non_block=True) for i in range(50)]
    for i, future in enumerate(futures):
        future.add_done_callback(lambda _, i=i: done.append(i))
    futures[-1].add_done_callback(lambda _: finished.set())

    assert finished.wait(30)
    assert done == list(range(50))
    assert [f.result() for f in futures] == [[i, i] for i in range(50)]
    assert concurrent.futures.wait(futures, timeout=5).not_done == set()


def test_a_future_is_awaited_from_asyncio(make: Make) -> None:
    ex = make()

    async def main() -> Any:
        first = await ex.collective_rpc("echo", args=(1,), non_block=True)
        many = await asyncio.gather(*(ex.aio.collective_rpc("echo", args=(i,)) for i in range(20)))
        outcomes = await ex.aio.gather("rank")
        one = await ex.aio.submit("echo", args=("pool",))
        return first, many, [o.value for o in outcomes], one

    first, many, outcomes, one = asyncio.run(main())

    assert first == [1, 1]
    assert many == [[i, i] for i in range(20)]
    assert outcomes == [0, 1]
    assert one == "pool"


def test_cancelling_an_awaiting_task_voids_the_answer(make: Make, tmp_path: Path) -> None:
    ex = make()
    gate = tmp_path / "gate"

    async def main() -> None:
        task = asyncio.ensure_future(ex.aio.collective_rpc("gated", args=(str(gate),)))
        await asyncio.sleep(0)
        while not ex.status().in_flight:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    gate.touch()

    assert ex.collective_rpc("rank", timeout=30) == [0, 1]
    assert ex.status().dropped_replies == 2


def test_calls_from_many_threads_are_seen_in_one_order_by_all_ranks(
    make: Make, tmp_path: Path
) -> None:
    ex = make()

    def caller(thread: int) -> None:
        for i in range(40):
            ex.collective_rpc(
                lambda w, text, base: w.note(f"{base}/{w.ctx.rank}", text),
                args=(f"{thread}.{i}", str(tmp_path)),
            )

    threads = [threading.Thread(target=caller, args=(t,)) for t in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    orders = [
        [line.split()[0] for line in (tmp_path / str(rank)).read_text().splitlines()]
        for rank in range(2)
    ]
    assert len(orders[0]) == 160
    assert orders[0] == orders[1]


def test_a_timeout_names_the_method_and_the_ranks_and_its_late_answer_is_dropped(
    make: Make, tmp_path: Path
) -> None:
    ex = make()
    gate = tmp_path / "gate"

    with pytest.raises(CallTimeout, match=r"<lambda>.*rank\(s\) 1") as caught:
        ex.collective_rpc(
            lambda w, g: w.gated(g) if w.ctx.rank == 1 else "quick", timeout=0.2, args=(str(gate),)
        )
    gate.touch()

    assert caught.value.ranks == (1,)
    assert ex.collective_rpc("rank", timeout=30) == [0, 1]
    assert ex.status().dropped_replies >= 1


def test_a_future_expires_without_a_waiter(make: Make, tmp_path: Path) -> None:
    ex = make(world_size=1)
    gate = tmp_path / "gate"
    expired = threading.Event()

    future = ex.collective_rpc("gated", 0.2, (str(gate),), non_block=True)
    future.add_done_callback(lambda _: expired.set())

    assert expired.wait(30)
    assert isinstance(future.exception(), CallTimeout)
    gate.touch()


def test_waiting_for_a_future_with_a_timeout_leaves_the_call_alone(
    make: Make, tmp_path: Path
) -> None:
    ex = make(world_size=1)
    gate = tmp_path / "gate"
    future = ex.collective_rpc("gated", args=(str(gate), "answer"), non_block=True)

    with pytest.raises(TimeoutError):
        future.result(0.1)
    gate.touch()

    assert future.result(30) == ["answer"]


def test_a_slow_rank_makes_callers_wait_up_to_their_deadline_and_sends_nothing(
    make: Make, tmp_path: Path
) -> None:
    ex = make(world_size=1, queue_depth=2)
    gate, notes = tmp_path / "gate", tmp_path / "notes"
    started = [
        ex.collective_rpc("gated_note", args=(str(gate), str(notes), f"n{i}"), non_block=True)
        for i in range(2)
    ]

    with pytest.raises(CallTimeout) as caught:
        ex.collective_rpc("gated_note", 0.2, (str(gate), str(notes), "never"))
    gate.touch()

    assert caught.value.sent is False
    assert [f.result(30) for f in started] == [["n0"], ["n1"]]
    assert ex.collective_rpc("echo", 30, ("after",)) == ["after"]
    assert "never" not in notes.read_text()


def test_a_full_queue_blocks_the_maker_of_futures_until_there_is_room(
    make: Make, tmp_path: Path
) -> None:
    ex = make(world_size=1, queue_depth=2)
    gate = tmp_path / "gate"
    made: list[Any] = []

    def producer() -> None:
        made.extend(
            ex.collective_rpc("gated", args=(str(gate), i), non_block=True) for i in range(30)
        )

    thread = threading.Thread(target=producer)
    thread.start()
    deadline = time.monotonic() + 30
    while ex.status().waiting < 2 and time.monotonic() < deadline:
        time.sleep(0.005)
    assert ex.status().waiting + ex.status().in_flight == 4
    gate.touch()
    thread.join(30)

    assert [f.result(30) for f in made] == [[i] for i in range(30)]


def test_a_blocking_call_from_a_done_callback_raises(make: Make) -> None:
    ex = make(world_size=1)
    seen: list[BaseException] = []
    done = threading.Event()

    def callback(_: object) -> None:
        try:
            ex.collective_rpc("rank")
        except WouldDeadlock as error:
            seen.append(error)
        done.set()

    ex.collective_rpc("rank", non_block=True).add_done_callback(callback)

    assert done.wait(30)
    assert len(seen) == 1


def test_a_slow_callback_blocks_no_other_call(make: Make) -> None:
    ex = make(world_size=1)
    release = threading.Event()
    ex.collective_rpc("rank", non_block=True).add_done_callback(lambda _: release.wait(30))

    assert ex.collective_rpc("rank", timeout=20) == [0]
    assert ex.collective_rpc("rank", 20, non_block=True).result(20) == [0]
    release.set()


def test_a_cancelled_future_that_was_not_sent_never_runs(make: Make, tmp_path: Path) -> None:
    ex = make(world_size=1, queue_depth=1)
    gate, notes = tmp_path / "gate", tmp_path / "notes"
    first = ex.collective_rpc("gated", args=(str(gate),), non_block=True)
    second = ex.collective_rpc("note", args=(str(notes), "ran"), non_block=True)

    assert second.cancel()
    gate.touch()

    assert first.result(30) == [None]
    assert ex.collective_rpc("rank", 30) == [0]
    assert not notes.exists()
    with pytest.raises(concurrent.futures.CancelledError):
        second.result()


# --- dispatch -------------------------------------------------------------------------------


def test_scatter_gives_each_rank_its_own_arguments(make: Make) -> None:
    ex = make(world_size=3)

    assert ex.scatter("echo", [("a",), ("b",), ("c",)]) == ["a", "b", "c"]


def test_scatter_does_not_guess_from_a_lists_length(make: Make) -> None:
    ex = make(world_size=2)

    assert ex.collective_rpc("echo", args=([1, 2],)) == [[1, 2], [1, 2]]
    with pytest.raises(SpecError, match="per_rank"):
        ex.scatter("echo", [(1,)])


def test_one_rank_is_called_alone(make: Make) -> None:
    ex = make(world_size=3)

    assert ex.call(1, "rank") == 1
    assert ex.collective_rpc("add") == [1, 1, 1]
    assert ex.call(2, "add", args=(5,)) == 6


def test_idle_ranks_share_a_work_queue(make: Make) -> None:
    ex = make(world_size=2)

    who = [ex.submit(lambda w, i: (i, w.ctx.rank), args=(i,)) for i in range(40)]
    answers = [future.result(30) for future in who]

    assert [i for i, _ in answers] == list(range(40))
    assert {rank for _, rank in answers} == {0, 1}


def test_a_gather_keeps_the_answers_of_the_ranks_that_did_not_fail(make: Make) -> None:
    outcomes = make(world_size=3).gather("fail", args=(1,))

    assert [o.ok for o in outcomes] == [True, False, True]
    assert [o.value for o in outcomes] == [0, None, 2]
    assert isinstance(outcomes[1].error, ValueError)


def test_tell_runs_in_order_and_waits_for_nothing(make: Make) -> None:
    ex = make()

    ex.tell("add", args=(3,))
    ex.tell("fail")
    ex.tell("add", args=(4,), rank=1)

    assert ex.collective_rpc("add", 30, (0,)) == [3, 7]


def test_step_methods_are_methods_of_the_executor(make: Make) -> None:
    ex = make(world_size=None, tensor=2, pipeline=2)

    assert ex.forward(7) == (2, 7)
    assert ex.forward(7, non_block=True).result(30) == (2, 7)
    assert ex.steps.forward(8) == (2, 8)
    assert ex.everyone() == [0, 1, 2, 3]
    assert ex.drivers() == [0, 2]
    with pytest.raises(AttributeError):
        ex.rank()


def test_an_async_output_lets_the_main_loop_go_on_and_keeps_the_order(
    make: Make, tmp_path: Path
) -> None:
    ex = make(world_size=1, async_output=True)
    gate = tmp_path / "gate"
    order: list[str] = []
    told = threading.Event()

    late = ex.collective_rpc("late", args=("late", str(gate)), non_block=True)
    counted = ex.collective_rpc("add", non_block=True)
    late.add_done_callback(lambda _: order.append("late"))
    counted.add_done_callback(lambda _: order.append("counted"))
    counted.add_done_callback(lambda _: told.set())
    ex.collective_rpc(lambda w, g: open(g, "w").close(), args=(str(gate),), non_block=True)

    assert late.result(30) == ["late"]
    assert counted.result(30) == [1]
    assert ex.collective_rpc("add", 30) == [2]
    assert told.wait(30)  # callbacks run on a thread of their own
    assert order == ["late", "counted"]
    assert ex.max_concurrent_batches == 2


def test_an_async_output_that_raises_is_that_calls_error_alone(make: Make) -> None:
    ex = make(world_size=1)

    with pytest.raises(KeyError):
        ex.collective_rpc("late", args=(KeyError("late"),))
    assert ex.collective_rpc("rank") == [0]


# --- errors ---------------------------------------------------------------------------------


def test_a_workers_exception_keeps_its_type_and_says_where_it_comes_from(make: Make) -> None:
    ex = make()

    with pytest.raises(ValueError, match="boom") as caught:
        ex.collective_rpc("fail", args=(1,))

    notes = "\n".join(caught.value.__notes__)
    assert "rank 1" in notes
    assert "in fail (call" in notes
    assert "workers.py" in notes
    assert ex.collective_rpc("rank") == [0, 1]


def test_an_exception_on_a_rank_whose_reply_is_not_wanted_fails_the_call(make: Make) -> None:
    with pytest.raises(ValueError, match="boom"):
        make().collective_rpc("fail", args=(1,), unique_reply_rank=0)


@pytest.mark.parametrize(
    ("method", "name"), [("fail_unpicklable", "Unpicklable"), ("fail_unbuildable", "NeedsTwo")]
)
def test_an_exception_that_cannot_travel_has_a_faithful_stand_in(
    make: Make, method: str, name: str
) -> None:
    ex = make(world_size=1)

    with pytest.raises(RemoteError) as caught:
        ex.collective_rpc(method)

    assert caught.value.type_name.endswith(name)
    assert "Traceback" in caught.value.traceback
    assert ex.collective_rpc("rank") == [0]


def test_a_reply_that_cannot_be_pickled_is_that_calls_error(make: Make) -> None:
    ex = make(world_size=1)

    with pytest.raises(NotPicklable, match="the reply"):
        ex.collective_rpc("reply_unpicklable")
    assert ex.collective_rpc("rank") == [0]


def test_an_unknown_method_is_refused_before_anything_is_sent(make: Make) -> None:
    ex = make(world_size=1)

    with pytest.raises(UnknownMethod, match=r"Echo has no method 'nope'; it has .*echo"):
        ex.collective_rpc("nope")
    with pytest.raises(UnknownMethod):
        ex.collective_rpc("on_start")
    with pytest.raises(UnknownMethod):
        ex.collective_rpc("__init__")


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [((), {}), ((1, 2, 3, 4), {}), (("g",), {"wrong": 1}), (("g",), {"gate": 1})],
)
def test_wrong_arguments_are_refused_and_the_worker_goes_on(
    make: Make, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    ex = make(world_size=1)

    with pytest.raises(BadArguments, match="gated"):
        ex.collective_rpc("gated", args=args, kwargs=kwargs)
    assert ex.collective_rpc("rank") == [0]


def test_an_argument_that_cannot_be_pickled_is_named(make: Make) -> None:
    ex = make(world_size=1)

    with pytest.raises(NotPicklable, match="the arguments of echo"):
        ex.collective_rpc("echo", args=(threading.Lock(),))


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"timeout": -1}, "timeout"),
        ({"timeout": float("nan")}, "timeout"),
        ({"unique_reply_rank": 2}, "unique_reply_rank"),
        ({"unique_reply_rank": -1}, "unique_reply_rank"),
        ({"on_death": "pray"}, "on_death"),
        ({"retries": -1}, "retries"),
        ({"on_timeout": "pray"}, "on_timeout"),
    ],
)
def test_terms_that_make_no_sense_name_the_field(
    make: Make, options: dict[str, Any], field: str
) -> None:
    with pytest.raises(SpecError) as caught:
        make(world_size=2).collective_rpc("rank", **options)

    assert caught.value.field == field


class NotAWorker:
    pass


@pytest.mark.parametrize(
    ("worker", "options", "field"),
    [
        (NotAWorker, {}, "worker"),
        ("Echo", {}, "worker"),
        (WorkerActor, {}, "worker"),
        (Echo, {"world_size": 0}, "world_size"),
        (Echo, {"world_size": -1}, "world_size"),
        (Echo, {"world_size": 2.0}, "world_size"),
        (Echo, {"world_size": True}, "world_size"),
        (Echo, {"world_size": 5, "tensor": 2, "pipeline": 2}, "world_size"),
        (Echo, {"world_size": 2, "tensor": 0}, "tensor"),
        (Echo, {"rank_kwargs": [{}]}, "rank_kwargs"),
        (Echo, {"rank_env": [{}]}, "rank_env"),
        (Echo, {"env": {"A": 1}}, "env['A']"),
        (Echo, {"env": {"A=": "1"}}, "env"),
        (Echo, {"start_timeout": 0}, "start_timeout"),
        (Echo, {"queue_depth": 0}, "queue_depth"),
        (Echo, {"launch": "magic"}, "launch"),
        (Echo, {"launch": "inline"}, "world_size"),
        (Echo, {"strategy": "one_for_all?"}, "strategy"),
        (Echo, {"preload": "torch"}, "preload"),
        (Echo, {"name": ""}, "name"),
        (Echo, {"devices": ["a"]}, "devices"),
    ],
)
def test_a_spec_that_makes_no_sense_names_field_and_value(
    make: Make, worker: Any, options: dict[str, Any], field: str
) -> None:
    with pytest.raises(SpecError) as caught:
        make(worker, **options)

    assert caught.value.field == field


def test_a_world_size_that_is_not_the_product_prints_the_arithmetic() -> None:
    with pytest.raises(ValueError, match=r"tensor 2 x pipeline 2 x prefill_context 1 = 4"):
        Executor(Echo, 5, tensor=2, pipeline=2)


def test_a_class_or_argument_that_cannot_be_pickled_is_named(make: Make) -> None:
    with pytest.raises(NotPicklable, match=r"kwargs\['lock'\]"):
        make(kwargs={"lock": threading.Lock()})
    with pytest.raises(NotPicklable, match=r"rank_kwargs\[1\]"):
        make(rank_kwargs=[{}, {"lock": threading.Lock()}])


# --- start and stop -------------------------------------------------------------------------


def test_the_layout_gives_ranks_their_coordinates(make: Make) -> None:
    ex = make(layout=Layout(tensor=2, pipeline=2, extra={"ep": 2}), world_size=None)

    who = ex.collective_rpc("who")

    assert [w["coordinates"] for w in who] == [
        {"tp": 0, "pp": 0, "ep": 0},
        {"tp": 1, "pp": 0, "ep": 1},
        {"tp": 0, "pp": 1, "ep": 0},
        {"tp": 1, "pp": 1, "ep": 1},
    ]
    assert ex.layout.output_rank == 2
    assert ex.layout.driver_ranks == (0, 2)
    assert ex.max_concurrent_batches == 2


def test_arguments_and_environment_are_shared_and_per_rank(make: Make) -> None:
    ex = make(
        args=("hi",),
        kwargs={"shared": 1},
        rank_kwargs=[{"mine": "a"}, {"mine": "b"}],
        env={"PHALANX_TEST": "all"},
        rank_env=[{}, {"PHALANX_TEST": "one"}],
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


def test_thread_counts_are_one_unless_the_user_set_them(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert make(world_size=1).call(0, "env", args=("OMP_NUM_THREADS",)) == {"OMP_NUM_THREADS": "1"}

    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert make(world_size=1).call(0, "env", args=("OMP_NUM_THREADS",)) == {"OMP_NUM_THREADS": "3"}


@pytest.mark.parametrize("launch", ["zygote", "exec"])
def test_both_ways_to_start_give_the_same_worker(make: Make, launch: str) -> None:
    ex = make(world_size=2, launch=launch)

    assert ex.collective_rpc("rank") == [0, 1]
    assert [w["incarnation"] for w in ex.collective_rpc("who")] == [1, 1]


def test_the_workers_own_exception_comes_out_of_a_failed_start(make: Make) -> None:
    with pytest.raises(ValueError, match="bad weights") as caught:
        make(StartFails, 3, kwargs={"how": "raise", "rank": 1})

    notes = "\n".join(caught.value.__notes__)
    assert "rank 1" in notes
    assert "workers.py" in notes


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("unpicklable", "Unpicklable: bad weights"),
        ("exit", "rank 2 .*exited during its start"),
        ("sysexit", "rank 2 .*exit code 7"),
        ("kill", "rank 2 .*SIGKILL"),
    ],
)
def test_a_failed_start_says_which_rank_and_how(make: Make, how: str, says: str) -> None:
    with pytest.raises((StartFailed, RemoteError), match=says):
        make(StartFails, 3, kwargs={"how": how, "rank": 2})


def test_a_start_that_hangs_is_ended_by_its_deadline(make: Make) -> None:
    with pytest.raises(StartFailed, match=r"rank 0 .*start_timeout=1"):
        make(StartFails, 2, kwargs={"how": "hang"}, start_timeout=1.0)


def test_ranks_meet_in_a_process_group(make: Make, torch_runtime: Runtime) -> None:
    ex = make(Reducer, 2, preload=("torch",), runtime=torch_runtime)

    assert ex.collective_rpc("total", 60, (10.0,)) == [30.0, 30.0]


def test_close_runs_on_stop_and_is_idempotent(make: Make, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    ex = make(Tidy, 2, args=(str(notes),))

    ex.close()
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


def test_close_from_two_threads_at_once(make: Make) -> None:
    ex = make(world_size=2)

    threads = [threading.Thread(target=ex.close) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)

    assert not any(thread.is_alive() for thread in threads)
    assert all(info.pid is None for info in ex.ranks)


def test_a_call_in_flight_may_end_while_ranks_are_asked_to_stop(make: Make, tmp_path: Path) -> None:
    ex = make(world_size=1)
    gate = tmp_path / "gate"
    future = ex.collective_rpc("gated", args=(str(gate), "in time"), non_block=True)

    closer = threading.Thread(target=ex.close)
    closer.start()
    gate.touch()
    closer.join(30)

    assert future.result(0) == ["in time"]


def test_a_worker_that_ignores_everything_is_killed_and_its_call_told(
    make: Make, tmp_path: Path
) -> None:
    ex = make(Stubborn, 1, stop=StopPolicy(ask=0.1, terminate=0.1))
    gate = tmp_path / "held"
    future = ex.collective_rpc("hold", args=(str(gate),), non_block=True)
    deadline = time.monotonic() + 30
    while not gate.exists() and time.monotonic() < deadline:
        time.sleep(0.005)

    ex.close()

    with pytest.raises(ExecutorClosed):
        future.result(0)


def test_a_name_that_is_used_again_closes_the_one_before(make: Make) -> None:
    first = make(world_size=1, name="notebook")

    second = make(world_size=1, name="notebook")

    assert first.status().state == "ended"
    assert second.collective_rpc("rank") == [0]


def test_a_forgotten_executor_is_closed_by_the_garbage_collector(runtime: Any) -> None:
    ex = Executor(Echo, 1, preload=(), runtime=runtime)
    core = ex._core

    del ex

    assert core.shared.gone.wait(30)


def test_events_and_emitted_values_reach_the_driver(make: Make) -> None:
    ex = make(world_size=2)
    seen: list[Any] = []
    both = threading.Event()

    def listen(event: Any) -> None:
        seen.append(event)
        if len(seen) == 2:
            both.set()

    unsubscribe = ex.events(listen)
    ex.collective_rpc("emit", args=({"loss": 1.5},))

    assert both.wait(30)
    assert {(e.rank, e.value["loss"]) for e in seen} == {(0, 1.5), (1, 1.5)}
    unsubscribe()


def test_health_is_an_answer_from_every_main_loop(make: Make, tmp_path: Path) -> None:
    ex = make(world_size=2)
    gate = tmp_path / "gate"
    ex.check_health(30)

    busy = ex.call(1, "gated", args=(str(gate),), non_block=True)
    with pytest.raises(CallTimeout) as caught:
        ex.check_health(0.2)
    gate.touch()

    assert caught.value.ranks == (1,)
    assert busy.result(30) is None


def test_inline_is_the_same_api_in_the_callers_thread(make: Make) -> None:
    ex = make(world_size=1, launch="inline", kwargs={"greeting": "yo"})
    seen: list[Any] = []
    ex.events(seen.append)

    assert ex.collective_rpc("who")[0]["pid"] == os.getpid()
    assert ex.collective_rpc("echo", args=(1,), non_block=True).result() == [1]
    assert ex.gather("fail")[0].ok is False
    assert ex.forward(3) == (0, 3)
    assert ex.submit("echo", args=("p",)).result() == "p"
    ex.collective_rpc("emit", args=("event",))
    assert [event.value for event in seen] == ["event"]
    ex.check_health()
    with pytest.raises(ValueError, match="boom"):
        ex.collective_rpc("fail")
    with pytest.raises(UnknownMethod):
        ex.collective_rpc("nope")
    ex.close()
    with pytest.raises(ExecutorClosed):
        ex.collective_rpc("rank")


def test_a_restart_that_was_planned_waits_for_calls_and_is_no_failure(
    make: Make, tmp_path: Path
) -> None:
    ex = make(world_size=2, intensity=Intensity(0, 60.0))
    gate = tmp_path / "gate"
    future = ex.collective_rpc("gated", args=(str(gate), "kept"), non_block=True)
    thread = threading.Thread(target=ex.restart, args=(1,))
    thread.start()
    gate.touch()
    thread.join(30)

    assert future.result(0) == ["kept", "kept"]
    assert [w["incarnation"] for w in ex.collective_rpc("who")] == [2, 2]
    assert ex.status().restarts == 0
    assert ex.status().planned == 1


def test_a_planned_restart_that_takes_too_long_says_so_and_goes_on(
    make: Make, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    ex = make(LateAgain, 1, args=(str(gate),))

    with pytest.raises(TimeoutError, match=r"under way, not done after 0\.3 s"):
        ex.restart(timeout=0.3)
    gate.touch()

    assert [w["incarnation"] for w in ex.collective_rpc("who", 30)] == [2]
    assert ex.status().restarts == 0


def test_resize_forms_the_group_anew(make: Make) -> None:
    ex = make(world_size=2)

    ex.resize(3)
    assert [w["world_size"] for w in ex.collective_rpc("who")] == [3, 3, 3]
    ex.resize(1)

    assert ex.collective_rpc("rank") == [0]
    assert ex.world_size == 1
    with pytest.raises(SpecError):
        ex.resize(0)


def test_drain_returns_when_nothing_is_in_flight(make: Make, tmp_path: Path) -> None:
    ex = make(world_size=1)
    gate = tmp_path / "gate"
    future = ex.collective_rpc("gated", args=(str(gate), 1), non_block=True)

    with pytest.raises(TimeoutError):
        ex.drain(0.1)
    gate.touch()
    ex.drain(30)

    assert future.done()
    assert ex.collective_rpc("rank", 30) == [0]


def test_an_inline_rank_has_a_process_group_of_its_own() -> None:
    with Executor(Reducer, 1, launch="inline") as ex:
        assert ex.collective_rpc("total", args=(2.0,)) == [2.0]


def test_titles_show_group_rank_and_coordinates(make: Make) -> None:
    ex = make(world_size=None, tensor=2, pipeline=2, name="shown")

    titles = [Path(f"/proc/{info.pid}/cmdline").read_text().rstrip("\0") for info in ex.ranks]

    assert titles[1].startswith("phalanx: shown rank 1/4 tp=1,pp=0 #1")
    assert titles[2].startswith("phalanx: shown rank 2/4 tp=0,pp=1 #1")


# --- what a review found ----------------------------------------------------------------------


class Frozen(Exception):
    """Refuses further attributes, notes included."""

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(name)


class Odd(Echo):
    def cancelled(self) -> None:
        raise asyncio.CancelledError

    def interrupted(self) -> None:
        raise KeyboardInterrupt

    def frozen(self) -> None:
        raise Frozen("as it is")

    async def later(self) -> None:
        """Cannot be called: nothing would run it."""

    def many(self, count: int) -> list[bytearray]:
        return [bytearray(20_000) for _ in range(count)]


@pytest.mark.parametrize("method", ["cancelled", "interrupted"])
def test_what_is_no_exception_is_that_calls_error_and_a_stand_in(make: Make, method: str) -> None:
    ex = make(Odd, 1)

    with pytest.raises(RemoteError):
        ex.collective_rpc(method)
    assert ex.ranks[0].incarnation == 1
    assert ex.collective_rpc("rank") == [0]


def test_an_exception_that_refuses_notes_arrives_as_it_is(make: Make) -> None:
    with pytest.raises(Frozen, match="as it is"):
        make(Odd, 1).collective_rpc("frozen")


def test_an_async_method_is_refused_in_the_driver(make: Make) -> None:
    with pytest.raises(UnknownMethod, match="async"):
        make(Odd, 1).collective_rpc("later")


def test_thousands_of_large_buffers_travel_in_one_message(make: Make) -> None:
    ex = make(Odd, 1)

    assert len(ex.call(0, "many", args=(3000,))) == 3000
    assert ex.call(0, lambda _, x: len(x), args=([bytearray(20_000) for _ in range(3000)],)) == 3000


def test_answers_nobody_asked_for_yet_hold_no_descriptors(make: Make) -> None:
    ex = make(Odd, 2)
    before = len(list(Path("/proc/self/fd").iterdir()))

    futures = [ex.submit("echo", args=(bytearray(40_000),)) for _ in range(60)]
    concurrent.futures.wait(futures, timeout=30)

    assert len(list(Path("/proc/self/fd").iterdir())) - before < 30
    assert all(len(future.result(30)) == 40_000 for future in futures)


@pytest.mark.parametrize("timeout", [float("inf"), 1e7, 1e10])
def test_a_timeout_may_be_as_long_as_one_likes(make: Make, timeout: float) -> None:
    ex = make(world_size=1)

    assert ex.collective_rpc("rank", timeout) == [0]
    assert ex.collective_rpc("rank", timeout, non_block=True).result(timeout) == [0]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"timeout": "5"}, "timeout"),
        ({"timeout": True}, "timeout"),
        ({"args": "abc"}, "args"),
        ({"args": 5}, "args"),
        ({"kwargs": [1]}, "kwargs"),
        ({"aggregate": 5}, "aggregate"),
    ],
)
def test_arguments_of_the_wrong_kind_name_the_field(
    make: Make, options: dict[str, Any], field: str
) -> None:
    with pytest.raises(SpecError) as caught:
        make(world_size=1).collective_rpc("rank", **options)

    assert caught.value.field == field


def test_wrong_constructor_arguments_are_told_before_anything_starts() -> None:
    with pytest.raises(BadArguments, match="unexpected keyword argument 'nope'"):
        Executor(StartFails, 1, kwargs={"how": "raise", "nope": 1}, preload=())
    with pytest.raises(SpecError, match=r"rank_kwargs\[0\]"):
        Executor(Echo, 1, rank_kwargs=[{5: 1}], preload=())  # type: ignore[dict-item]
    with pytest.raises(SpecError, match="report_dir"):
        Executor(Echo, 1, report_dir="/dev/null/x", preload=())


def test_calls_made_for_another_size_are_told_when_the_group_is_resized(
    make: Make, tmp_path: Path
) -> None:
    ex = make(world_size=2)
    gate = tmp_path / "gate"
    held = ex.collective_rpc("gated", args=(str(gate),), non_block=True)
    thread = threading.Thread(target=ex.resize, args=(3,))
    thread.start()
    scattered: Any = None
    while scattered is None or not ex._core.shared.plane.holds:
        scattered = scattered or ex.scatter("echo", [("a",), ("b",)], non_block=True)
        time.sleep(0.001)
    gate.touch()
    thread.join(30)

    assert held.result(30) == [None, None]
    try:
        assert scattered.result(30) == ["a", "b"]  # it was sent before the resize began
    except SpecError as error:
        assert error.field == "world_size"
    assert ex.collective_rpc("rank", 30) == [0, 1, 2]


def test_two_executors_of_one_name_at_once_leave_one(runtime: Runtime) -> None:
    made: list[Any] = []

    def build() -> None:
        try:
            made.append(Executor(Echo, 1, preload=(), runtime=runtime, name="twin"))
        except ExecutorClosed as error:
            made.append(error)

    threads = [threading.Thread(target=build) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    built: list[Executor[Any]] = [one for one in made if not isinstance(one, Exception)]
    alive = [one for one in built if one.status().state == "serving"]
    assert len(made) == 2
    assert len(alive) == 1
    assert alive[0].collective_rpc("rank", 30) == [0]
    for one in built:
        one.close()


def test_arguments_that_cannot_travel_to_one_rank_hold_no_memory(make: Make) -> None:
    ex = make(world_size=2)

    with pytest.raises(NotPicklable):
        ex.scatter("echo", [(bytearray(1_000_000),), (threading.Lock(),)])

    assert not any(extent.kept for extent in ex._core.shared.plane.arena._used)


def test_two_drains_at_once_hold_calls_until_the_last(make: Make, tmp_path: Path) -> None:
    ex = make(world_size=1)
    gate = tmp_path / "gate"
    busy = ex.collective_rpc("gated", args=(str(gate),), non_block=True)

    with pytest.raises(TimeoutError):
        ex.drain(0.05)
    first = threading.Thread(target=ex.drain)
    first.start()
    while not ex._core.shared.plane.holds:
        time.sleep(0.001)
    with pytest.raises(TimeoutError):
        ex.drain(0.05)

    assert ex._core.shared.plane.holds == 1
    gate.touch()
    first.join(30)
    assert busy.result(30) == [None]
    assert ex.collective_rpc("rank", 30) == [0]
