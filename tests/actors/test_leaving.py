"""Ranks that have yet to leave their process group: who is given up, and when all are cut off."""

from __future__ import annotations

import pytest

from phalanx.actors.health.survivors import Leaving, judge_leaving
from phalanx.runtime import Pulse

REDUCE = "all_reduce (/x/torch/distributed/distributed_c10d.py:3252)"
GATHER = "all_gather (/x/torch/distributed/distributed_c10d.py:4012)"
COMPUTE = "train (/home/me/model.py:7)"


def pulse(connections: int | None, where: str = REDUCE, epoch: int = 3) -> Pulse:
    return Pulse((where, COMPUTE), connections, epoch)


@pytest.mark.parametrize(
    ("before", "now", "follows"),
    [
        # nobody is left
        ({}, {}, Leaving()),
        ({0: pulse(0)}, {}, Leaving()),
        # one look is none
        ({}, {0: pulse(0)}, Leaving()),
        ({0: None}, {0: pulse(0)}, Leaving()),
        ({0: pulse(0)}, {0: None}, Leaving()),
        # without a connection for two of them
        ({0: pulse(0)}, {0: pulse(0)}, Leaving(frozenset({0}))),
        ({0: pulse(0), 2: pulse(0)}, {0: pulse(0), 2: pulse(0)}, Leaving(frozenset({0, 2}))),
        # those who wait for it come free by its end
        ({0: pulse(0), 1: pulse(2)}, {0: pulse(0), 1: pulse(2)}, Leaving(frozenset({0}))),
        # the last connection has ended since: the error may be on its way
        ({0: pulse(1)}, {0: pulse(0)}, Leaving()),
        # it has come to another operation
        ({0: pulse(0)}, {0: pulse(0, GATHER)}, Leaving()),
        # they wait for each other
        ({0: pulse(1), 1: pulse(1)}, {0: pulse(1), 1: pulse(1)}, Leaving(part=True)),
        # one of them may yet come to what the other waits for
        ({0: pulse(1), 1: Pulse((COMPUTE,))}, {0: pulse(1), 1: Pulse((COMPUTE,))}, Leaving()),
        ({0: pulse(1), 1: None}, {0: pulse(1), 1: None}, Leaving()),
        # it has ended its call, and is leaving
        ({0: pulse(0, epoch=4)}, {0: pulse(0, epoch=4)}, Leaving()),
        ({0: pulse(2), 1: pulse(1, epoch=4)}, {0: pulse(2), 1: pulse(1, epoch=4)}, Leaving()),
        # no gloo, or one that is at work
        ({0: pulse(None)}, {0: pulse(None)}, Leaving()),
        ({0: pulse(None), 1: pulse(1)}, {0: pulse(None), 1: pulse(1)}, Leaving(part=True)),
    ],
)
def test_what_follows_from_two_looks(
    before: dict[int, Pulse | None], now: dict[int, Pulse | None], follows: Leaving
) -> None:
    assert judge_leaving(before, now, epoch=4) == follows
