"""What is said of calls where a run ended early, or contestants broke."""

from __future__ import annotations

from benchmarks.harness.machine import describe
from benchmarks.rpc.run import FEW, MOST, Found, Plan
from benchmarks.rpc.table import text, values


def found(*ranks: int) -> Found:
    return Found(describe(), Plan(ranks=ranks, sizes=(0,), rounds=3), {})


def test_growth_that_was_measured_to_few_ranks_only_meets_no_target() -> None:
    made = found(1)
    made.growth[FEW, "phalanx"] = [1e-4, 1e-4]
    made.growth[FEW, "pyzmq"] = [1e-4]
    made.broken[MOST, "phalanx"] = "ended"

    held = next(each for each in values(made)["targets"] if "at most linear" in each["what"])

    assert held["state"] == "not measured"
    assert held["why"] == "phalanx broke: ended"
    assert "| phalanx    | 100 (100 to 100) us | -        | -     |" in text(made)


def test_the_confidence_that_is_told_is_that_of_so_many_rounds() -> None:
    assert "(75.0% confidence)" in text(found(1))
