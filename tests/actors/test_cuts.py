"""What is kept of the ranks' states, call by call, without any process."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from phalanx.actors.calls.call import Call, Shape, terms_of
from phalanx.actors.checkpoint.coordinator import Cuts
from phalanx.actors.group.messages import CutDue, CutsChanged
from phalanx.actors.spec.checkpoint_policy import CheckpointPolicy
from phalanx.runtime import FarFrame, Flag, Frame, Kind, Stamp, encode, store_snapshot

BOTH = (0, 1)


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def call(wire: int) -> Call:
    made = Call(wire, "add", Shape.COLLECTIVE, [], terms_of(now=0.0, timeout=None))
    made.wire = wire
    return made


def saved(wire: int, value: object = None) -> Frame:
    payload = store_snapshot(encode(value, "it"), Stamp(wire, 0, 2, 1, 0.0), None)
    assert payload.file is not None
    frame = FarFrame(Kind.SAVED, Flag.FILE, 1, wire, 1, 0, payload.tail)
    frame.fds, frame.lender = [payload.file], None
    return frame


@pytest.fixture
def told() -> list[Any]:
    return []


@pytest.fixture
def cuts(told: list[Any]) -> Iterator[Cuts]:
    yield from opened(CheckpointPolicy(every_calls=1), told)


def opened(policy: CheckpointPolicy, told: list[Any], *, together: bool = True) -> Iterator[Cuts]:
    cuts = Cuts(policy, None, together=together)
    cuts.open(cast("Any", None), told.append, can_reshard=False, size=2)
    yield cuts
    cuts.close(forget=True)


def take(cuts: Cuts, wire: int) -> None:
    assert cuts.mark(call(wire), BOTH, 2)
    for rank in BOTH:
        cuts.hear(rank, saved(wire))
        cuts.answered(rank, wire)


def latest(cuts: Cuts) -> int:
    found = cuts.kept.latest()
    return 0 if found is None else found.number


def test_a_cut_is_kept_when_the_last_rank_has_answered(cuts: Cuts) -> None:
    cuts.mark(call(1), BOTH, 2)
    for rank in BOTH:
        cuts.hear(rank, saved(1))
    cuts.answered(0, 1)
    assert latest(cuts) == 0

    cuts.answered(1, 1)

    assert latest(cuts) == 1
    assert not cuts.is_unsaved()


def test_a_cut_without_every_part_is_none(cuts: Cuts) -> None:
    take(cuts, 1)
    cuts.mark(call(2), BOTH, 2)
    cuts.hear(0, saved(2))
    for rank in BOTH:
        cuts.answered(rank, 2)

    assert latest(cuts) == 1
    assert cuts.is_unsaved()


@pytest.mark.parametrize("everybody", [True, False])
def test_a_loss_voids_what_is_not_answered_by_all(cuts: Cuts, everybody: bool) -> None:
    take(cuts, 1)
    cuts.mark(call(2), BOTH, 2)
    for rank in BOTH:
        cuts.hear(rank, saved(2))
    cuts.answered(0, 2)

    cuts.lose([0, 1] if everybody else [1], everybody=everybody)
    cuts.answered(1, 2)

    assert latest(cuts) == 1
    assert cuts.is_unsaved() is not everybody
    assert cuts.mark(call(3), BOTH, 2) == BOTH


def test_a_call_that_reached_some_ranks_only_leaves_nothing_open(cuts: Cuts) -> None:
    cuts.mark(call(1), BOTH, 2)
    cuts.hear(0, saved(1))

    cuts.abandon(1)

    assert not cuts._open
    cuts.answered(0, 1)
    assert latest(cuts) == 0


def test_descriptors_are_bounded_also_while_nobody_prunes(cuts: Cuts) -> None:
    before = descriptors()
    for wire in range(1, 400):
        take(cuts, wire)

    assert descriptors() - before < 150
    cuts.prune()
    assert descriptors() - before == 4
    assert latest(cuts) == 399


def test_a_call_to_some_ranks_has_a_cut_of_all_asked_for(cuts: Cuts, told: list[Any]) -> None:
    assert not cuts.mark(call(1), (1,), 2)

    assert told == [CutDue()]
    assert cuts.is_unsaved()


def test_numbers_go_on_where_an_executor_left_off(cuts: Cuts, told: list[Any]) -> None:
    take(cuts, 7)
    cuts.close(forget=False)

    cuts.open(cast("Any", None), told.append, can_reshard=False, size=2)
    take(cuts, 1)

    assert latest(cuts) == 8
    assert isinstance(told[-1], CutsChanged)


def test_a_rejected_cut_is_given_only_where_there_is_no_other(cuts: Cuts) -> None:
    for wire in (1, 2):
        take(cuts, wire)

    def chosen() -> int:
        gifts = cuts.kept.choose(BOTH, 2, lambda number, why: None)
        for gift in gifts.values():
            assert gift.age <= time.time()
            gift.close()
        return gifts[0].number

    assert chosen() == 2
    assert cuts.kept.reject(0, 2)
    assert not cuts.kept.reject(1, 2)
    assert chosen() == 1
    assert cuts.kept.reject(0, 1)
    assert chosen() == 1
