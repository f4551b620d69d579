"""Gateways, and ranks that the test plays."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.support.gateway_peers import Berth, Driver, Joined, Posting, Rank

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
    def make(posting: Posting, **options: Any) -> Rank:
        return made.enter_context(contextlib.closing(Rank(posting, **options)))

    with contextlib.ExitStack() as made:
        yield make


@pytest.fixture
def joined(rank_of: Callable[..., Rank]) -> Joined:
    """Makes room for a rank, which has joined and greeted."""

    def join(driver: Driver) -> tuple[Berth, Rank]:
        berth = driver.berth()
        rank = rank_of(berth.posting)
        rank.greets()
        assert isinstance(berth.next(), Frame)
        return berth, rank

    return join
