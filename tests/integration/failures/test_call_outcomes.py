"""Whenever a rank dies, each call has the outcome that is promised for that moment."""

from __future__ import annotations

import os
import pickle
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pykka
import pytest
from tests.support.options import Make
from tests.support.processes import start_thread, wait_until
from tests.support.rank_faults import OFTEN, kill, telling
from tests.support.relayed_links import wait_running
from tests.support.supervised_actors import stop_every_actor
from tests.support.workers import Echo, StartFails, Stubborn, wait_for

from phalanx.actors import Executor, Limits, RestartPolicy, StopPolicy, WorkerContext, method
from phalanx.supervision import (
    BackOff,
    CallTimeout,
    ExecutorClosed,
    ExitReason,
    Intensity,
    Strategy,
    WorkerDied,
)

LONG = 30.0
USUAL = {"intensity": OFTEN}


class DiesAfter:
    """An answer that arrives as a text, and whose worker dies when it lets go of it."""

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, ("answered",)

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Mortal(Echo):
    """Dies in the moment it is told to."""

    def answer_and_die(self, rank: int) -> Any:
        """Die as soon as the answer has been written, and not before."""
        mine = self.ctx.rank == rank and self.ctx.incarnation == 1
        return DiesAfter() if mine else "answered"

    def die_first(self, rank: int, incarnation: int = 1) -> str:
        if (self.ctx.rank, self.ctx.incarnation) == (rank, incarnation):
            os.kill(os.getpid(), signal.SIGKILL)
        return "answered"

    @method(idempotent=True)
    def items_and_die(self, rank: int) -> Any:
        yield "first"
        self.die_first(rank)
        yield "second"


def _pool(ex: Executor[Any], how: str, *args: int, **terms: Any) -> list[Any]:
    futures = [ex.submit(how, args=args, timeout=LONG, **terms) for _ in range(4)]
    return [future.result(LONG) for future in futures]


CALLS: dict[str, Callable[..., Any]] = {
    "collective": lambda ex, how, *args, **terms: ex.collective_rpc(how, LONG, args, **terms),
    "one reply": lambda ex, how, *args, **terms: [
        ex.collective_rpc(how, LONG, args, unique_reply_rank=0, **terms)
    ],
    "future": lambda ex, how, *args, **terms: ex.collective_rpc(
        how, LONG, args, non_block=True, **terms
    ).result(LONG),
    "scatter": lambda ex, how, *args, **terms: ex.scatter(
        how, args=[args, args], **terms, timeout=LONG
    ),
    "single": lambda ex, how, *args, **terms: [ex.call(how, LONG, args, **terms, rank=1)],
    "pool": _pool,
}


@pytest.mark.parametrize("shape", CALLS)
def test_a_call_in_which_a_rank_dies_fails_or_is_made_again(make: Make, shape: str) -> None:
    ex, call = make(Mortal), CALLS[shape]

    with pytest.raises(WorkerDied) as caught:
        call(ex, "die_first", 1)

    assert [report.rank for report in caught.value.reports] == [1]
    assert set(call(ex, "die_first", 1, 2, retries=1)) == {"answered"}


@pytest.mark.parametrize("shape", CALLS)
def test_a_rank_that_wrote_its_answer_and_died_has_answered(make: Make, shape: str) -> None:
    """Under one_for_one; else the others are stopped in the same call, which is then cut short."""
    ex = make(Mortal, strategy=Strategy.ONE_FOR_ONE)

    assert set(CALLS[shape](ex, "answer_and_die", 1)) == {"answered"}

    wait_until(lambda: ex.status().restarts == 1)
    assert ex.collective_rpc("rank", LONG, retries=1) == [0, 1]


def test_a_gather_that_no_rank_had_begun_is_sent_again(make: Make, tmp_path: Path) -> None:
    ex = make(Mortal, strategy=Strategy.ONE_FOR_ALL)
    gate, notes = tmp_path / "gate", tmp_path / "notes"
    running = ex.collective_rpc("gated", args=(str(gate),), non_block=True)
    wait_running(ex, 0, 1)  # else it too is sent again, and the other waits behind it
    queued = ex.gather("note", args=(str(notes), "n"), non_block=True)

    kill(ex, 0)

    assert [outcome.kind for outcome in queued.result(LONG)] == ["ok", "ok"]
    assert isinstance(running.exception(LONG), WorkerDied)
    assert len(notes.read_text().splitlines()) == 2


@pytest.mark.parametrize("rank", [None, 1])
def test_a_stream_yields_what_was_made_and_then_tells_of_the_death(
    make: Make, rank: int | None
) -> None:
    """It is never made again, not even one of an idempotent method."""
    ex = make(Mortal, strategy=Strategy.ONE_FOR_ONE)
    seen: list[Any] = []

    with pytest.raises(WorkerDied):
        seen.extend(ex.stream("items_and_die", LONG, (1,), rank=rank))

    assert ("first" if rank is not None else (1, "first")) in seen


class Slow(Echo):
    """Starts again only when it may."""

    def __init__(self, gate: str) -> None:
        super().__init__()
        self.gate = gate

    def on_start(self, ctx: WorkerContext) -> None:
        if ctx.incarnation > 1:
            Path(f"{self.gate}.{ctx.rank}.{ctx.incarnation}").touch()
            wait_for(self.gate)


def test_calls_made_during_a_restart_wait_for_it_up_to_their_deadline(
    make: Make, gate: Path
) -> None:
    ex = make(Slow, args=(str(gate),))
    kill(ex, 0)
    wait_until(lambda: ex.status().state == "mending")

    with pytest.raises(CallTimeout) as caught:
        ex.collective_rpc("rank", 0.2)
    patient = ex.collective_rpc("rank", LONG, non_block=True)
    alone = ex.call("rank", LONG, non_block=True, rank=1)
    pool = ex.submit("rank", timeout=LONG)
    gather = ex.gather("rank", LONG, non_block=True)
    gate.touch()

    assert not caught.value.sent
    assert patient.result(LONG) == [0, 1]
    assert alone.result(LONG) == 1
    assert pool.result(LONG) in (0, 1)
    assert [outcome.value for outcome in gather.result(LONG)] == [0, 1]


@pytest.mark.parametrize(
    ("strategy", "first", "second"),
    [
        (Strategy.ONE_FOR_ONE, (0,), (2, 0)),  # another, and the one that is being started
        (Strategy.ONE_FOR_ONE, (0, 1, 2), (0, 1, 2)),
        (Strategy.ONE_FOR_ALL, (0, 1, 2), (0, 1, 2)),
    ],
)
def test_ranks_that_die_during_a_restart_are_restarted_too(
    make: Make, gate: Path, strategy: Strategy, first: Sequence[int], second: Sequence[int]
) -> None:
    ex = make(Slow, 3, args=(str(gate),), strategy=strategy)
    for rank in first:
        kill(ex, rank)
    wait_until(lambda: all(Path(f"{gate}.{rank}.2").exists() for rank in first))
    waiting = ex.collective_rpc("rank", LONG, non_block=True)

    for rank in second:
        kill(ex, rank)
        wait_until(Path(f"{gate}.{rank}.2").exists)
    gate.touch()

    assert waiting.result(LONG) == [0, 1, 2]
    found = [info.incarnation for info in ex.ranks]
    least = [1 + (rank in first) + (rank in second) for rank in range(3)]
    assert found == least if strategy is Strategy.ONE_FOR_ONE else min(found) >= 3


@pytest.mark.parametrize("strategy", [Strategy.ONE_FOR_ONE, Strategy.ONE_FOR_ALL])
@pytest.mark.parametrize("dead", [(0, 1), (0, 1, 2)])
def test_several_ranks_at_once(make: Make, strategy: Strategy, dead: tuple[int, ...]) -> None:
    ex = make(world_size=3, strategy=strategy)
    again = ex.collective_rpc("gated", LONG, ("/dev/null", 1), non_block=True, retries=1)

    for rank in dead:
        kill(ex, rank)

    assert ex.collective_rpc("rank", LONG, retries=5) == [0, 1, 2]
    assert again.done()


@pytest.mark.parametrize("how", ["raise", "exit", "hang"])
def test_a_start_that_fails_every_time_ends_the_group_and_answers_everybody(
    make: Make, how: str
) -> None:
    ex = make(
        StartFails,
        kwargs={"how": how, "from_incarnation": 2},
        intensity=Intensity(1 if how == "hang" else 3, 60.0),
        limits=Limits(start=2.0 if how == "hang" else LONG),
        policy=RestartPolicy(backoff=BackOff(initial=0.2, jitter=0.0)),  # calls are made meanwhile
    )
    told: list[ExitReason] = []
    once = threading.Event()
    ex.register_failure_callback(telling(told, once))
    kill(ex, 0)
    wait_until(lambda: ex.status().state != "serving")
    terms: dict[str, Any] = {"non_block": True, "retries": 100}

    calls = [ex.collective_rpc("rank", **terms), ex.call("rank", **terms, rank=0)]

    for call in calls:
        assert isinstance(call.exception(LONG), (WorkerDied, ExecutorClosed))
    assert once.wait(LONG)
    assert ex.wait_closed(LONG)
    assert len(told) == 1


def test_closing_while_ranks_die_gives_every_call_one_outcome(make: Make, tmp_path: Path) -> None:
    ex = make(world_size=3, limits=Limits(stop=StopPolicy(ask=0.3, terminate=0.3)))
    gate = tmp_path / "never"
    calls = [ex.collective_rpc("gated", args=(str(gate),), non_block=True) for _ in range(4)]
    calls += [ex.call("rank", non_block=True, rank=1), ex.submit("rank")]
    told: list[object] = []
    for call in calls:
        call.add_done_callback(told.append)
    closer = start_thread(ex.close)
    kill(ex, 1)
    closer.join(LONG)

    assert not closer.is_alive()
    for call in calls:
        assert isinstance(call.exception(LONG), (WorkerDied, ExecutorClosed))
    assert len(told) == len(calls)


def test_an_error_in_the_executors_own_thread_ends_the_group_and_answers_everybody(
    make: Make, tmp_path: Path
) -> None:
    ex = make()
    kill(ex, 0)
    assert ex.collective_rpc("rank", LONG, retries=1) == [0, 1]
    told: list[ExitReason] = []
    once = threading.Event()
    ex.register_failure_callback(telling(told, once))
    call = ex.collective_rpc("gated", args=(str(tmp_path / "never"),), non_block=True)

    ex._group.post(len)  # a TypeError: it wants an argument

    assert isinstance(call.exception(LONG), ExecutorClosed)
    assert once.wait(LONG)
    assert ex.wait_closed(LONG)
    assert "the executor itself: TypeError" in str(told[0])
    with pytest.raises(ExecutorClosed, match="TypeError") as caught:
        ex.collective_rpc("rank")
    assert caught.value.__cause__ is None  # it is not told as a death that was long mended


def test_no_other_actor_of_the_program_stops_the_group(make: Make, gate: Path) -> None:
    ex = make()
    call = ex.collective_rpc("gated", args=(str(gate), "done"), non_block=True)

    stop_every_actor("SystemExit")
    pykka.ActorRegistry.broadcast(len)

    gate.touch()
    assert call.result(LONG) == ["done", "done"]
    kill(ex, 0)
    assert ex.collective_rpc("rank", LONG, retries=1) == [0, 1]
    assert ex.status().restarts == 1


def test_an_error_in_it_while_it_closes_lets_it_close(make: Make, tmp_path: Path) -> None:
    ex = make(limits=Limits(stop=StopPolicy(ask=5.0, terminate=0.3)))
    call = ex.collective_rpc("gated", args=(str(tmp_path / "never"),), non_block=True)
    closer = start_thread(ex.close)
    wait_until(lambda: ex.status().state == "closing")

    ex._group.post(len)

    closer.join(LONG)
    assert not closer.is_alive()
    assert isinstance(call.exception(LONG), ExecutorClosed)


def test_a_worker_that_ignores_sigterm_delays_a_restart_only_until_it_is_killed(
    make: Make, tmp_path: Path
) -> None:
    ex = make(Stubborn, strategy=Strategy.ONE_FOR_ALL)
    holding = tmp_path / "holding"
    busy = ex.call("hold", args=(str(holding),), non_block=True, rank=1)
    wait_until(holding.exists)

    kill(ex, 0)

    assert ex.collective_rpc("rank", LONG) == [0, 1]
    assert isinstance(busy.exception(LONG), WorkerDied)
    assert [info.incarnation for info in ex.ranks] == [2, 2]


@pytest.mark.parametrize("way", ["collective", "single", "pool"])
def test_a_call_that_had_begun_and_waits_to_be_sent_again_has_been_sent(
    make: Make, tmp_path: Path, way: str
) -> None:
    # It is not started again before the calls have timed out.
    backoff = BackOff(initial=LONG, maximum=LONG, jitter=0.0)
    ex = make(world_size=1, policy=RestartPolicy(backoff=backoff))
    mark = tmp_path / "begun"
    args = (str(tmp_path / "never"), str(mark), "begun")
    terms: dict[str, Any] = {"timeout": 1.5, "retries": 1, "args": args}
    ways: dict[str, Callable[[], Any]] = {
        "collective": lambda: ex.collective_rpc("gated_note", non_block=True, **terms),
        "single": lambda: ex.call("gated_note", non_block=True, **terms, rank=0),
        "pool": lambda: ex.submit("gated_note", **terms),
    }
    future = ways[way]()
    wait_until(mark.exists)

    kill(ex)

    error = future.exception(LONG)
    assert isinstance(error, CallTimeout)
    assert (error.sent, error.ranks) == (True, ())
    assert [report.pid for report in error.reports] == [ex.status().reports[0].pid]
    assert "cut short" in str(error)
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.sent, copy.ranks, len(copy.reports)) == (True, (), 1)
    with pytest.raises(CallTimeout, match="never sent") as caught:  # one that no rank had begun
        ex.collective_rpc("rank", 0.1, retries=1)
    assert (caught.value.sent, caught.value.reports) == (False, ())
