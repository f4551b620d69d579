"""The built-in traffic, with an executor that answers as the test says."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.actors import Outcome, OutcomeKind
from phalanx.chaos.workload.generator import Mismatch, make_calls


class Gathering(random.Random):
    """The chance by which a round is a `gather`."""

    def random(self) -> float:
        return 0.6


@pytest.mark.parametrize(
    ("answer", "error"), [((1, 0, 0), KeyError), ((7, 7, 7), Mismatch)], ids=["right", "wrong"]
)
def test_an_error_in_a_part_of_a_gather_ends_the_round_once_the_others_are_checked(
    answer: tuple[int, int, int], error: type[Exception]
) -> None:
    def gather(_method: object, _timeout: float, args: tuple[Any, ...]) -> list[Outcome]:
        value = (1, args[0], 0) if answer[0] == 1 else answer
        failed = Outcome(0, OutcomeKind.ERROR, error=KeyError("of a rank"))
        return [failed, Outcome(1, OutcomeKind.OK, value)]

    executor: Any = SimpleNamespace(world_size=2, gather=gather)

    with pytest.raises(error):
        make_calls(executor, Gathering(1), 5.0)
