"""Gateways, and ranks that the test plays."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.support.gateway_peers import Driver, Joined, Rank, RankAddress, Slot

from phalanx.runtime import Frame, Runtime
from phalanx.runtime.remote.options import Zmq


@pytest.fixture
def driver_of(runtime: Runtime) -> Iterator[Callable[[Zmq], Driver]]:
    with contextlib.ExitStack() as made:
        yield lambda options: made.enter_context(contextlib.closing(Driver(runtime, options)))


@pytest.fixture
def driver(driver_of: Callable[[Zmq], Driver]) -> Driver:
    return driver_of(Zmq())


@pytest.fixture
def rank_of() -> Iterator[Callable[..., Rank]]:
    def make(address: RankAddress, **options: Any) -> Rank:
        return made.enter_context(contextlib.closing(Rank(address, **options)))

    with contextlib.ExitStack() as made:
        yield make


@pytest.fixture
def joined(rank_of: Callable[..., Rank]) -> Joined:
    """Makes room for a rank, which has joined and greeted."""

    def join(driver: Driver) -> tuple[Slot, Rank]:
        slot = driver.add_rank()
        rank = rank_of(slot.address)
        rank.greets()
        assert isinstance(slot.next(), Frame)
        return slot, rank

    return join
