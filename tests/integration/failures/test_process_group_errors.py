"""An exception on one rank of a process group never puts the ranks one call apart."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.support.options import Make
from tests.support.processes import start_thread, wait_until
from tests.support.rank_faults import OFTEN
from tests.support.workers import wait_for

from phalanx.actors import (
    AsyncOutput,
    CheckpointPolicy,
    Executor,
    RestartPolicy,
    WorkerActor,
    WorkerContext,
)
from phalanx.runtime import Runtime
from phalanx.supervision import (
    GPU_WORKER,
    Decider,
    Directive,
    Rule,
    WorkerDied,
)

LONG = 60.0
CLOSED = "[../third_party/gloo/gloo/transport/tcp/pair.cc:533] closed"
CUDA = "CUDA error: unknown error"


def total(value: float) -> float:
    import torch
    from torch import distributed

    tensor = torch.tensor([float(value)])
    distributed.all_reduce(tensor)  # pyright: ignore[reportUnknownMemberType]  # torch's gap
    return float(tensor)


class Fussy:
    """An argument that one rank cannot unpickle."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __setstate__(self, state: dict[str, Any]) -> None:
        if os.environ["RANK"] == str(state["rank"]):
            raise ValueError("cannot be unpickled here")
        self.__dict__.update(state)


class Adding(AsyncOutput):
    """Meets the others, or raises before that."""

    def __init__(self, value: float, *, raises: bool) -> None:
        self.value = value
        self.raises = raises

    def get_output(self) -> float:
        if self.raises:
            raise ValueError("computed too late")
        return total(self.value)


class Member(WorkerActor):
    """Adds up over a process group, and raises where it is told."""

    def __init__(self, limit: float = 60.0) -> None:
        self.limit = limit
        self.reforms = 0
        self.spoilt = -1

    def on_start(self, ctx: WorkerContext) -> None:
        ctx.init_process_group("gloo", timeout=self.limit)

    def on_reform(self, ctx: WorkerContext) -> None:
        self.reforms += 1
        self.on_start(ctx)

    def checkpoint(self) -> Any:
        if self.spoilt == self.ctx.rank:
            raise ValueError("no state")
        return total(1)

    def restore(self, state: Any) -> None: ...

    def add(self, value: float, *, before: int | None = None, after: int | None = None) -> float:
        self.refuse(before)
        found = total(value)
        self.refuse(after)
        return found

    def items(self, between: int | None = None) -> Iterator[float]:
        yield total(1)
        self.refuse(between)
        yield total(2)

    def count(self) -> Iterator[float]:
        while True:
            yield total(1)
            time.sleep(0.003 * self.ctx.rank)

    def refuse(self, rank: int | None) -> None:
        if rank in (self.ctx.rank, -1):
            raise ValueError(f"rank {self.ctx.rank} does not like it")

    def break_down(self, ranks: tuple[int, ...], text: str) -> float:
        if self.ctx.rank in ranks and self.ctx.incarnation == 1:
            raise RuntimeError(text)
        return total(3)

    def take(self, value: Any) -> float:
        return total(2)

    def wait(self, rank: int, gate: str) -> None:
        if rank == self.ctx.rank:
            wait_for(gate)

    def wait_or_raise(self, rank: int, gate: str) -> None:
        self.wait(rank, gate)
        self.refuse(1 - rank)

    def wait_then_add(self, gate: str, before: int) -> float:
        wait_for(gate)
        return self.add(1.0, before=before)

    def stay_away(self, rank: int) -> None:
        if rank != self.ctx.rank:
            total(1)

    def add_late(self, value: float, raising: tuple[int, ...]) -> Any:
        return Adding(value, raises=self.ctx.rank in raising)

    def spoil(self, rank: int) -> None:
        self.spoilt = rank

    def who(self) -> tuple[int, int]:
        return os.getpid(), self.reforms


class Ungrouped(Member):
    """Never joins a process group."""

    def on_start(self, ctx: WorkerContext) -> None: ...


@pytest.fixture
def group(make: Make, torch_runtime: Runtime) -> Make:
    def build(size: int = 2, worker: Any = Member, **options: Any) -> Executor[Any]:
        given = {"launch": {"preload": ("torch",)}, "runtime": torch_runtime, "intensity": OFTEN}
        return make(worker, size, **{**given, **options})

    return build


def add(ex: Executor[Any], value: float, **when: int | None) -> Any:
    """Have all ranks add *value* up; return the call's future."""
    return ex.collective_rpc("add", LONG, (value,), when, non_block=True)


def refused(ex: Executor[Any], *values: float, **when: int) -> list[Any]:
    """Have a call refused, with others behind it; return what came of those."""
    first = add(ex, 100.0, **when)
    futures = [add(ex, value) for value in values]
    with pytest.raises(ValueError, match="does not like it"):
        first.result(LONG)
    return [future.result(LONG) for future in futures]


@pytest.mark.both_transports
@pytest.mark.parametrize(("size", "rank"), [(2, 0), (3, 1)])
def test_calls_behind_one_that_a_rank_refused_get_their_own_answers(
    group: Make, size: int, rank: int
) -> None:
    ex = group(size)

    found = refused(ex, 1, 2, 3, 4, before=rank)

    assert found == [[value * size] * size for value in (1.0, 2.0, 3.0, 4.0)]
    assert ex.status().restarts == 1
    reason = str(ex.status().reports[-1].reason)
    assert f"the ranks are out of step: rank {rank} raised ValueError in 'add'" in reason


def test_survivors_are_kept_when_the_ranks_are_out_of_step(group: Make) -> None:
    ex = group(3, policy=RestartPolicy(survivors="keep"))
    before = ex.collective_rpc("who", LONG)

    assert refused(ex, 1, 2, before=1) == [[3.0] * 3, [6.0] * 3]

    now = ex.collective_rpc("who", LONG)
    kept = [rank for rank in range(3) if now[rank] == (before[rank][0], 1)]
    assert len(kept) == 2
    assert 1 in kept, "it had nothing to do with what the others wait for"
    assert ex.status().restarts == 1


def test_nothing_is_restarted_where_every_rank_has_ended_the_call(group: Make) -> None:
    ex = group()

    assert refused(ex, 1, 2, before=-1) == [[2.0, 2.0], [4.0, 4.0]]
    assert refused(ex, 1, 2, after=-1) == [[2.0, 2.0], [4.0, 4.0]]
    assert ex.status().restarts == 0
    for first in range(0, 900, 6):
        values = range(first + 1, first + 6)
        assert refused(ex, *values, after=0) == [[2.0 * value] * 2 for value in values]
    assert ex.status().restarts == 0


def test_refusals_in_two_calls_in_a_row_cost_a_restart_each(group: Make) -> None:
    ex = group()

    calls = [add(ex, 1.0, before=rank) for rank in (0, 1)]
    last = add(ex, 4.0)

    for rank, call in enumerate(calls):
        with pytest.raises(ValueError, match=f"rank {rank} does not like it"):
            call.result(LONG)
    assert last.result(LONG) == [8.0, 8.0]
    assert ex.status().restarts == 2


def test_a_gather_and_a_scatter_keep_their_answers_too(group: Make) -> None:
    ex = group()

    parts = ex.gather("add", LONG, (1.0,), {"before": 0}, non_block=True)
    behind = ex.gather("add", LONG, (2.0,), non_block=True)
    outcomes = parts.result(LONG)
    assert [str(each.kind) for each in outcomes] == ["error", "dead"]
    assert [each.value for each in behind.result(LONG)] == [4.0, 4.0]

    spread = ex.scatter("add", args=[[1.0], [2.0]], kwargs=[{}, {"before": 1}], non_block=True)
    after = ex.scatter("add", args=[[3.0], [4.0]], non_block=True)
    with pytest.raises(ValueError, match="rank 1 does not like it"):
        spread.result(LONG)
    assert after.result(LONG) == [7.0, 7.0]
    assert ex.status().restarts == 2


def test_arguments_that_one_rank_cannot_unpickle_count_as_its_refusal(group: Make) -> None:
    ex = group()

    first = ex.collective_rpc("take", LONG, (Fussy(0),), non_block=True)
    second = add(ex, 3.0)

    with pytest.raises(ValueError, match="cannot be unpickled here"):
        first.result(LONG)
    assert second.result(LONG) == [6.0, 6.0]


def test_a_call_for_one_rank_behind_the_refusal_is_answered_in_its_turn(group: Make) -> None:
    ex = group()

    first = add(ex, 1.0, before=0)
    alone = [ex.call("who", LONG, non_block=True, rank=rank) for rank in (0, 1)]
    behind = add(ex, 2.0)

    with pytest.raises(ValueError, match="does not like it"):
        first.result(LONG)
    assert [each.result(LONG)[1] for each in alone] == [0, 0]
    assert behind.result(LONG) == [4.0, 4.0]


def test_a_rank_that_refuses_a_call_of_its_own_goes_on_at_once(group: Make, gate: Path) -> None:
    ex = group()
    other = ex.call("wait", LONG, (1, str(gate)), non_block=True, rank=1)

    with pytest.raises(ValueError, match="rank 0"):
        ex.call("refuse", LONG, (0,), rank=0)
    ex.call("who", LONG, rank=0)  # while the other is in its call
    gate.touch()
    other.result(LONG)

    assert ex.collective_rpc("add", LONG, (1.0,)) == [2.0, 2.0]
    assert ex.status().restarts == 0


def test_a_stream_in_which_one_rank_raises_between_two_items_leaves_no_rank_behind(
    group: Make,
) -> None:
    ex = group()
    stream = ex.stream("items", LONG, (0,))

    with pytest.raises(ValueError, match="rank 0"):
        list(stream)

    assert ex.collective_rpc("add", LONG, (3.0,)) == [6.0, 6.0]
    assert ex.status().restarts == 1


def test_ranks_that_meet_in_the_items_of_a_stream_close_it_at_the_same_item(group: Make) -> None:
    ex = group()

    for turn in range(20):
        with ex.stream("count", LONG, window=4) as stream:
            for _ in range(turn % 5):
                next(stream)
        behind = [add(ex, value) for value in (1.0, 2.0)]
        assert [each.result(LONG) for each in behind] == [[2.0, 2.0], [4.0, 4.0]]
    assert ex.status().restarts == 0


def test_what_gloo_raises_when_its_group_breaks_has_the_group_formed_anew(group: Make) -> None:
    ex = group(2, args=(1.0,), policy=RestartPolicy(decider=GPU_WORKER))

    with pytest.raises(RuntimeError, match="gloo"):
        ex.collective_rpc("stay_away", LONG, (0,))

    assert ex.collective_rpc("add", LONG, (3.0,)) == [6.0, 6.0]
    assert ex.status().restarts == 1
    assert "the process group is broken: rank 1 raised" in str(ex.status().reports[-1].reason)


def test_a_death_and_not_the_rank_that_noticed_it_first_is_the_outcome(group: Make) -> None:
    ex = group()
    pid = ex.ranks[0].pid
    assert pid is not None
    future = ex.collective_rpc("break_down", LONG, ((1,), CLOSED), non_block=True)
    wait_until(lambda: future.failed_rank == 1)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)

    error = future.exception(LONG)

    # Else the death came too late to explain the exception.
    assert future.failed_rank == (0 if isinstance(error, WorkerDied) else 1)


def test_a_caller_that_waits_for_room_gets_it_when_the_ranks_are_in_step_again(
    group: Make, gate: Path
) -> None:
    ex = group(limits={"queue_depth": 1})
    split = ex.collective_rpc("wait_or_raise", LONG, (1, str(gate)), non_block=True)
    with pytest.raises(ValueError, match="rank 0"):
        split.result(LONG)
    queued = add(ex, 1.0)
    made: list[Any] = []
    waiting = start_thread(lambda: made.append(add(ex, 2.0)))
    wait_until(lambda: ex._group.plane._queue.blocked)  # no event reports it

    queued.abandon()
    gate.touch()
    waiting.join(LONG)

    assert made[0].result(LONG) == [4.0, 4.0]


@pytest.mark.parametrize(("ranks", "text"), [((0,), CLOSED), ((1,), CUDA), ((0, 1), CLOSED)])
def test_a_call_with_retries_is_made_again_by_the_group_that_is_formed_anew_for_its_error(
    group: Make, ranks: tuple[int, ...], text: str
) -> None:
    ex = group(2)

    assert ex.collective_rpc("break_down", LONG, (ranks, text), retries=1) == [6.0, 6.0]
    assert ex.collective_rpc("add", LONG, (1.0,)) == [2.0, 2.0]
    assert ex.status().restarts == 1


def test_ranks_that_share_no_process_group_do_not_wait_for_each_other(
    group: Make, gate: Path
) -> None:
    ex = group(2, worker=Ungrouped)

    first = ex.collective_rpc("wait_or_raise", LONG, (1, str(gate)), non_block=True)
    second = ex.call("who", LONG, non_block=True, rank=0)

    second.result(LONG)  # while the other is in the first one
    gate.touch()
    with pytest.raises(ValueError, match="rank 0"):
        first.result(LONG)
    assert ex.status().restarts == 0


@pytest.mark.parametrize("raising", [(1,), (0, 1)])
def test_what_raises_in_an_output_computed_after_its_turn_pairs_up_no_answers(
    group: Make, raising: tuple[int, ...]
) -> None:
    ex = group()

    calls = [
        ex.collective_rpc("add_late", LONG, (float(i), raising if i == 1 else ()), non_block=True)
        for i in range(5)
    ]

    assert calls[0].result(LONG) == [0.0, 0.0]
    with pytest.raises(ValueError, match="computed too late"):
        calls[1].result(LONG)
    for number, call in enumerate(calls[2:], 2):
        try:
            assert call.result(LONG) == [2.0 * number] * 2
        except WorkerDied as error:  # begun with the one that left the ranks out of step
            assert len(raising) == 1
            assert "out of step" in str(error)
    assert ex.collective_rpc("add_late", LONG, (9.0, ()), retries=1) == [18.0, 18.0]
    assert ex.status().restarts == (1 if len(raising) == 1 else 0)


def test_a_rank_that_is_held_up_in_an_earlier_call_is_not_out_of_step(
    group: Make, gate: Path
) -> None:
    ex = group()

    ex.collective_rpc("wait", LONG, (1, str(gate)), non_block=True)
    first = add(ex, 1.0, before=-1)
    behind = add(ex, 2.0)
    with pytest.raises(ValueError, match="rank 0"):
        first.result(LONG)
    with suppress(TimeoutError):
        behind.result(1.5)  # well beyond the grace
    gate.touch()

    assert behind.result(LONG) == [4.0, 4.0]
    assert ex.status().restarts == 0


def test_a_refusal_of_a_call_whose_caller_has_gone_counts_as_well(group: Make, gate: Path) -> None:
    ex = group()

    given_up = ex.collective_rpc("wait_then_add", 1.0, (str(gate), 0), non_block=True)
    with pytest.raises(TimeoutError):
        given_up.result(LONG)
    behind = add(ex, 2.0)
    gate.touch()

    assert behind.result(LONG) == [4.0, 4.0]
    assert ex.status().restarts == 1


def test_a_state_that_one_rank_cannot_give_counts_as_its_refusal(group: Make) -> None:
    ex = group(checkpoint=CheckpointPolicy(every_calls=3))
    ex.collective_rpc("spoil", LONG, (0,))

    ex.collective_rpc("add", LONG, (1.0,))
    calls = [add(ex, value) for value in (2.0, 3.0)]

    with suppress(WorkerDied):
        assert calls[0].result(LONG) == [4.0, 4.0]
    assert calls[1].result(LONG) == [6.0, 6.0]


def test_the_exception_for_which_the_decider_ends_a_rank_reaches_the_caller(group: Make) -> None:
    ex = group(3, policy=RestartPolicy(decider=Decider((Rule(ValueError, Directive.RESTART),))))

    for turn in range(3):
        with pytest.raises(ValueError, match=f"rank {turn} does not like it"):
            add(ex, 1.0, before=turn).result(LONG)
        assert ex.collective_rpc("add", LONG, (2.0,)) == [6.0] * 3


def test_a_refusal_while_the_group_restarts_is_followed_by_no_wrong_answer(group: Make) -> None:
    ex = group(3)
    for turn in range(3):
        call = add(ex, 1.0, before=0)
        behind = [add(ex, value) for value in (2.0, 3.0)]
        victim = ex.ranks[turn].pid
        if turn and victim:
            os.kill(victim, signal.SIGKILL)
        with pytest.raises((ValueError, WorkerDied)):
            call.result(LONG)
        assert behind[-1].result(LONG) == [9.0] * 3
        with suppress(WorkerDied):
            assert behind[0].result(LONG) == [6.0] * 3
