"""The network between a node and its driver is cut, one way or both: nothing runs twice."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.support.node_groups import QUICK, Cluster, last_pulse
from tests.support.processes import wait_until
from tests.support.relayed_links import Relay, free_port

from phalanx.cluster.nodes.lease import over_at
from phalanx.runtime import Zmq

LEASE = QUICK.lease
SLACK = 3.0  # seconds that a loaded machine may take for what is due


@pytest.fixture
def behind(cluster_of: Callable[..., Cluster]) -> Iterator[tuple[Cluster, Relay]]:
    """One node that serves, and that is reached through a relay."""
    port, between = free_port(), free_port()
    options = Zmq(bind=f"tcp://127.0.0.1:{port}", advertise=f"tcp://127.0.0.1:{between}")
    with contextlib.closing(Relay("127.0.0.1", between, "127.0.0.1", port)) as relay:
        cluster = cluster_of(options=options)
        cluster.open(1)
        cluster.engine.cut_off(0)  # its starter would be cut off too
        yield cluster, relay
        relay.heal()


@pytest.mark.parametrize("way", ["both", "up", "down"])
def test_a_node_that_is_cut_off_ends_its_ranks_before_it_is_fenced(
    behind: tuple[Cluster, Relay], tmp_path: Path, way: str
) -> None:
    cluster, relay = behind
    cluster.start(0, "pulse", str(tmp_path / "pulse"))
    wait_until(lambda: last_pulse(tmp_path / "pulse"))

    relay.cut(way)
    cut_at = time.monotonic()

    cluster.told.wait("lost", 0)
    why, fenced_at = cluster.told.wait("fenced", 0)
    last = last_pulse(tmp_path / "pulse")
    assert cut_at < last <= cut_at + LEASE + 1.0
    assert last < fenced_at
    assert fenced_at <= over_at(cut_at, LEASE) + SLACK
    assert why == "its lease is over"


@pytest.mark.parametrize(("part", "times"), [(0.5, 1), (0.2, 3)])
def test_cuts_of_a_part_of_a_lease_lose_nothing(
    behind: tuple[Cluster, Relay], tmp_path: Path, part: float, times: int
) -> None:
    cluster, relay = behind
    cluster.start(0, "pulse", str(tmp_path / "pulse"))

    for way in ("both", "up", "down") * times:
        relay.cut(way)
        time.sleep(LEASE * part)  # what is tested is that this much passes
        relay.heal()
        time.sleep(LEASE * part)  # as is this

    seen = last_pulse(tmp_path / "pulse")
    wait_until(lambda: last_pulse(tmp_path / "pulse") > seen)
    assert cluster.told.of("lost") == []


def test_beats_that_are_long_under_way_keep_no_lease_for_longer_than_they_say(
    behind: tuple[Cluster, Relay], tmp_path: Path
) -> None:
    """A lease that ran from the arrival of an answer would be over too late here."""
    cluster, relay = behind
    cluster.start(0, "pulse", str(tmp_path / "pulse"))
    relay.delay(LEASE * 0.3)  # each way
    time.sleep(LEASE)  # so that all that is under way is late
    assert cluster.told.of("lost") == []

    relay.cut("down")
    cut_at = time.monotonic()

    _, fenced_at = cluster.told.wait("fenced", 0)
    last = last_pulse(tmp_path / "pulse")
    # What the relay held came for 0.3 leases more, and was for beats sent 0.6 leases before.
    assert last <= cut_at + LEASE * 0.7 + 1.0
    assert last < fenced_at
