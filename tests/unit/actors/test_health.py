"""Which ranks count as hung, by value: no process, no thread, a virtual clock."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from phalanx.actors.calls.rank import Progress
from phalanx.actors.health.hang_detector import Suspect, find_hung
from phalanx.actors.health.hang_limits import HangLimits
from phalanx.runtime import Pulse


class Timers:
    """Stands in for the event loop: records the times of timers."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def call_at(self, at: float, _callback: Callable[[], None]) -> Any:
        self.at.append(at)
        return self

    is_pending = False


@pytest.fixture
def timers() -> Timers:
    return Timers()


@pytest.fixture
def limits(timers: Timers) -> HangLimits:
    return HangLimits(cast("Any", timers), 10.0, lambda _due: None)


def judge(
    limits: HangLimits,
    now: float,
    running: Progress,
    *,
    due: float | None = None,
    stopped: bool = False,
) -> list[str]:
    due = now if due is None else due
    return [how for _, how in limits.judge(due, [running], lambda _: stopped, now)]


def in_call(began: float, limit: float | None = 5.0, **rest: Any) -> Progress:
    return Progress(0, 1, "forward", limit, limit, began, **rest)


def test_a_call_is_over_its_limit_when_that_has_passed_since_it_began(limits: HangLimits) -> None:
    assert judge(limits, 104.9, in_call(100.0)) == []
    assert judge(limits, 105.0, in_call(100.0)) == ["forward ran for 5.0 s, hang_after=5 s"]


def test_without_a_limit_a_call_may_take_for_ever(limits: HangLimits) -> None:
    assert judge(limits, 1e6, in_call(0.0, None)) == []


def test_the_next_look_is_when_something_can_be_over_its_limit(
    limits: HangLimits, timers: Timers
) -> None:
    judge(limits, 104.0, in_call(100.0))

    assert timers.at == [105.0]


def test_without_anything_owed_there_is_no_next_look(limits: HangLimits, timers: Timers) -> None:
    assert limits.judge(1.0, [], lambda _: False, 1.0) == []
    assert timers.at == []


def test_a_pause_of_this_process_gives_everyone_the_whole_limit_again(limits: HangLimits) -> None:
    assert judge(limits, 160.0, in_call(100.0), due=105.0) == []
    assert judge(limits, 164.9, in_call(100.0)) == []
    assert len(judge(limits, 165.0, in_call(100.0))) == 1


def test_one_that_has_just_been_read_is_not_judged_in_the_same_look(limits: HangLimits) -> None:
    assert judge(limits, 105.0, in_call(100.0, spoke=True)) == []
    assert len(judge(limits, 105.1, in_call(100.0))) == 1


def test_a_stop_counts_from_when_it_was_seen_and_ends_with_going_on(limits: HangLimits) -> None:
    still = in_call(0.0, None)

    assert judge(limits, 10.0, still, stopped=True) == []
    assert judge(limits, 19.0, still, stopped=True) == []
    assert judge(limits, 19.5, still, stopped=False) == []
    assert judge(limits, 21.0, still, stopped=True) == []
    assert judge(limits, 31.0, still, stopped=True) == ["stopped for 10.0 s"]


WAITS = Pulse(("all_reduce (/x/torch/distributed/distributed_c10d.py:3252)",))
COMPUTES = Pulse(("forward (/home/me/model.py:7)",))
SILENT = None
NEVER_BEGAN = "others wait for it in a call that it has not begun"


def suspect(rank: int, *, in_call: bool = True) -> Suspect:
    worker: Any = SimpleNamespace(rank=rank)
    return Suspect(worker, "too long", lambda: True, in_call)


@pytest.mark.parametrize(
    ("suspects", "others", "replies", "hung"),
    [
        # all of them wait: none is to be preferred
        ([0, 1], [], {0: WAITS, 1: WAITS}, {0: "too long", 1: "too long"}),
        # one does not wait, or has not replied, or is stopped and was not asked
        ([0, 1], [], {0: WAITS, 1: COMPUTES}, {1: "too long"}),
        ([0, 1], [], {0: WAITS, 1: SILENT}, {1: "too long"}),
        ([0, 1], [], {0: WAITS}, {1: "too long"}),
        # another rank, whose own limit passes later, holds up the suspect
        ([0], [Progress(1, 1, "forward", 5.0, 5.0, 1.0)], {0: WAITS, 1: COMPUTES}, {}),
        # another has not begun the call, and does not reply
        ([0], [Progress(1, 1)], {0: WAITS, 1: SILENT}, {1: NEVER_BEGAN}),
        ([0], [Progress(1, 1)], {0: WAITS}, {1: NEVER_BEGAN}),
        ([0], [Progress(1, 1)], {0: WAITS, 1: COMPUTES}, {0: "too long"}),
        # the suspect holds up the others
        ([0], [Progress(1, 1, "forward", 5.0, 5.0, 1.0)], {0: COMPUTES}, {0: "too long"}),
    ],
)
def test_ranks_that_wait_for_a_hung_one_are_not_ended(
    suspects: list[int],
    others: list[Progress],
    replies: dict[int, Pulse | None],
    hung: dict[int, str],
) -> None:
    assert find_hung([suspect(rank) for rank in suspects], others, replies) == hung


def test_a_rank_past_another_limit_than_that_of_its_call_is_ended_also_if_it_waits() -> None:
    assert find_hung([suspect(0, in_call=False)], [], {0: WAITS}) == {0: "too long"}
