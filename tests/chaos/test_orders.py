"""Who is struck once is struck once, whichever calls the order goes with."""

from __future__ import annotations

import pytest

from phalanx.chaos.pending import order_of
from phalanx.chaos.schedule import Strike


@pytest.mark.parametrize("target", ["random", "1", "standby", "zygote", "logs", "driver"])
def test_who_is_one_has_one_order_in_calls_of_every_shape(target: str) -> None:
    strike = Strike(number=3, at=0.0, fault="stop", target=target, point="after_reply")

    assert len({order_of(strike, rank).key for rank in (-1, 0, 1)}) == 1


def test_every_rank_of_a_group_has_an_order_of_its_own() -> None:
    strike = Strike(number=3, at=0.0, fault="stop", target="group", point="after_reply")

    assert len({order_of(strike, rank).key for rank in (0, 1, 2)}) == 3
