"""Which ranks count as hung, by value: no process, no thread, a virtual clock."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.actors.calls.rank import Progress
from phalanx.actors.health.hang_detector import Suspect, find_hung
from phalanx.runtime import Pulse

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
