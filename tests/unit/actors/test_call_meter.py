"""A call is counted once, with its outcome and the seconds that it took."""

from __future__ import annotations

from concurrent.futures import CancelledError

import pytest

from phalanx.actors.calls.call import Call, CallOptions, Shape
from phalanx.actors.observe.status_feed import CallMeter
from phalanx.actors.spec.results import Outcome, OutcomeKind
from phalanx.runtime import CALL_SECONDS
from phalanx.supervision import CallTimeout, ExecutorClosed, SpecError, WorkerDied


def call(shape: Shape = Shape.COLLECTIVE, error: BaseException | None = None) -> Call:
    made = Call(1, "work", shape, (), CallOptions())
    made.error = error
    return made


def meter(*times: float) -> CallMeter:
    return CallMeter(iter(times).__next__)


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (None, "ok"),
        (ValueError("no"), "error"),
        (SpecError("rank", 1, "no"), "error"),
        (WorkerDied("work", ()), "died"),
        (CallTimeout("work", [0], 1.0), "timeout"),
        (ExecutorClosed("closed"), "closed"),
        (CancelledError(), "cancelled"),
        (KeyboardInterrupt(), "cancelled"),
    ],
)
def test_a_call_is_counted_by_its_outcome(error: BaseException | None, outcome: str) -> None:
    settled, refused = meter(1.0, 3.0), meter(1.0, 3.0)
    one, other = call(error=error), call()

    settled.begun(one)
    settled.settled(one)
    refused.begun(other)
    refused.settled(other, error)

    for each in (settled.counts(), refused.counts()):
        assert {name: count for name, count in each["calls"].items() if count} == {outcome: 1}
        assert each["call_seconds_sum"] == 2.0


def test_a_gather_without_a_rank_is_partial() -> None:
    counting, gather = meter(1.0, 1.0), call(Shape.GATHER)
    gather.answers = {0: Outcome(0, OutcomeKind.DEAD)}

    counting.begun(gather)
    counting.settled(gather)

    assert counting.counts()["calls"] == {"ok": 0, "partial": 1}


def test_a_call_is_counted_once_and_one_that_was_made_before_not_at_all() -> None:
    counting, one = meter(1.0, 2.0), call()
    counting.begun(one)

    for each in (one, one, call()):
        counting.settled(each)

    assert counting.counts()["calls"] == {"ok": 1}
    assert sum(counting.counts()["call_seconds"]) == 1


@pytest.mark.parametrize("limit", range(len(CALL_SECONDS)))
def test_a_class_includes_its_limit(limit: int) -> None:
    seconds, one = CALL_SECONDS[limit], call()
    counting = meter(seconds, 2 * seconds)  # exact: the difference of a number and its double

    counting.begun(one)
    counting.settled(one)

    assert counting.counts()["call_seconds"].index(1) == limit
