"""Who is taken for hung, by value: no process, no thread, no time but that which is given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from phalanx.actors.calls.rank import Running
from phalanx.actors.group.messages import Look
from phalanx.actors.health.monitor import HangWatch


class Timers:
    """Stands in for the hub: notes what it is asked for."""

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
def watch(timers: Timers) -> HangWatch:
    return HangWatch(cast("Any", timers), 10.0, lambda _look: None)


def judge(
    watch: HangWatch,
    now: float,
    running: Running,
    *,
    due: float | None = None,
    stopped: bool = False,
) -> list[str]:
    look = Look(now if due is None else due)
    return [how for _, how in watch.judge(look, [running], lambda _: stopped, now)]


def in_call(began: float, limit: float | None = 5.0, **rest: Any) -> Running:
    return Running(0, 1, "forward", limit, limit, began, **rest)


def test_a_call_is_over_its_limit_when_that_has_passed_since_it_began(watch: HangWatch) -> None:
    assert judge(watch, 104.9, in_call(100.0)) == []
    assert judge(watch, 105.0, in_call(100.0)) == ["forward ran for 5.0 s, hang_after=5 s"]


def test_without_a_limit_a_call_may_take_for_ever(watch: HangWatch) -> None:
    assert judge(watch, 1e6, in_call(0.0, None)) == []


def test_the_next_look_is_when_something_can_be_over_its_limit(
    watch: HangWatch, timers: Timers
) -> None:
    judge(watch, 104.0, in_call(100.0))

    assert timers.at == [105.0]


def test_without_anything_owed_there_is_no_next_look(watch: HangWatch, timers: Timers) -> None:
    assert watch.judge(Look(1.0), [], lambda _: False, 1.0) == []
    assert timers.at == []


def test_a_pause_of_this_process_gives_everyone_the_whole_limit_again(watch: HangWatch) -> None:
    assert judge(watch, 160.0, in_call(100.0), due=105.0) == []
    assert judge(watch, 164.9, in_call(100.0)) == []
    assert len(judge(watch, 165.0, in_call(100.0))) == 1


def test_one_that_has_just_been_read_is_not_judged_in_the_same_look(watch: HangWatch) -> None:
    assert judge(watch, 105.0, in_call(100.0, spoke=True)) == []
    assert len(judge(watch, 105.1, in_call(100.0))) == 1


def test_a_stop_counts_from_when_it_was_seen_and_ends_with_going_on(watch: HangWatch) -> None:
    still = in_call(0.0, None)

    assert judge(watch, 10.0, still, stopped=True) == []
    assert judge(watch, 19.0, still, stopped=True) == []
    assert judge(watch, 19.5, still, stopped=False) == []
    assert judge(watch, 21.0, still, stopped=True) == []
    assert judge(watch, 31.0, still, stopped=True) == ["stopped for 10.0 s"]
