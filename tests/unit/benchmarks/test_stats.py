"""What is said of a median, and of a target."""

from __future__ import annotations

import pytest
from benchmarks.harness.stats import Samples, of, percentile
from benchmarks.harness.targets import at_least, at_most
from hypothesis import given
from hypothesis import strategies as st

TEN = Samples((5.0, 1.0, 10.0, 2.0, 9.0, 3.0, 8.0, 4.0, 7.0, 6.0))


@pytest.mark.parametrize(
    ("count", "low", "high", "confidence"),
    [
        (1, 1, 1, 0.0),
        (5, 1, 5, 0.9375),
        (6, 1, 6, 0.9688),
        (10, 2, 9, 0.9785),
        (30, 10, 21, 0.9572),
    ],
)
def test_the_interval_of_a_median_is_that_of_the_books(
    count: int, low: float, high: float, confidence: float
) -> None:
    samples = Samples(tuple(float(value) for value in range(1, count + 1)))

    assert (samples.low, samples.high) == (low, high)
    assert samples.confidence == pytest.approx(confidence, abs=1e-4)


@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=40))
def test_the_median_lies_in_its_interval_and_the_interval_among_the_values(
    values: list[float],
) -> None:
    samples = Samples(tuple(values))

    assert min(values) <= samples.low <= samples.median <= samples.high <= max(values)


def test_ratios_are_taken_round_by_round() -> None:
    slowing = Samples((1.0, 2.0, 40.0))
    twice = Samples((2.0, 4.0, 80.0))

    ratio = twice.over(slowing)

    assert ratio is not None
    assert ratio.values == (2.0, 2.0, 2.0)


def test_what_was_not_measured_is_neither_met_nor_missed() -> None:
    verdict = at_most("a target", of([]), 1.0, "ray is absent")

    assert (verdict.state, verdict.why) == ("not measured", "ray is absent")


@pytest.mark.parametrize(
    ("verdict", "state"),
    [
        (at_most("", TEN, 9.0), "met"),  # where the interval ends
        (at_most("", TEN, 8.9), "missed"),
        (at_most("", TEN, 2.0), "missed"),
        (at_least("", TEN, 2.0), "met"),
        (at_least("", TEN, 2.1), "missed"),
    ],
)
def test_a_target_is_met_when_all_of_the_interval_meets_it(verdict: object, state: str) -> None:
    assert getattr(verdict, "state", None) == state


def test_the_99th_of_a_hundred_is_the_last_but_one() -> None:
    assert percentile([float(value) for value in range(100)], 99) == 98.0
    assert percentile([3.0], 99) == 3.0
