"""The lease: no rank of a node runs when the driver's machine holds the node for fenced.

The network delays, loses and cuts, each way; clocks differ in rate; the node process is stopped.
What decides is the code itself, on both sides.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from phalanx.cluster.nodes import decide
from phalanx.cluster.nodes.decide import Fenced, Lose, NodeLimits, Nodes, NodeState
from phalanx.cluster.nodes.lease import DRIFT, KILL_TIME, Lease

LEASE = 10.0
BEAT = LEASE / decide.BEATS_PER_LEASE
SIMULATED = 150.0  # seconds of each world
WORLDS = 400  # of which five show a fence 0.3 s too early, and one a driver that forgets the drift


class WrongLease(Lease):
    """It runs from when the answer arrived."""

    def answered(self, number: int, now: float) -> bool:
        if not super().answered(number, now):
            return False
        self.until = max(self.until, now + LEASE)
        return True


def test_a_lease_is_quiet_once_a_fifth_of_it_has_passed_without_an_answer() -> None:
    lease = Lease(0.0, LEASE)
    assert not lease.is_quiet(1.9)
    assert lease.is_quiet(2.0)
    number = lease.beat(2.0)
    assert lease.answered(number, 2.5)
    assert not lease.is_quiet(3.9)
    assert lease.is_quiet(4.0)


def test_the_round_trip_is_that_of_the_last_answered_beat() -> None:
    lease = Lease(0.0, LEASE)
    first, second = lease.beat(1.0), lease.beat(2.0)
    assert lease.round_trip == 0.0

    lease.answered(second, 2.5)
    lease.answered(first, 4.0)

    assert lease.round_trip == 0.5


class World:
    """One node and its driver, with the network between them.

    Attributes:
        ended_at: When the last process of the node ended; None while it runs.
        fenced_at: When the driver's machine held it for fenced; None if it never did.
    """

    def __init__(self, seed: int, make: Callable[[float, float], Lease], *, pauses: bool) -> None:
        chance = self._chance = random.Random(seed)
        self._rate = 1 + chance.uniform(-DRIFT, DRIFT)  # of the node's clock; the other's is 1
        self._cut_at = chance.uniform(5, 20)
        self._healed_at = self._cut_at + chance.choice([0.5, 3, 8, 9.5, 10.5, 15, 60, 1000])
        self._cut = chance.choice(["out", "in", "both"])
        self._delay = chance.choice([0.001, 0.05, 1.0, 4.0])
        self._paused = (chance.uniform(5, 30), chance.uniform(0, 20) if pauses else 0.0)
        self._queue = list[tuple[float, int, Callable[..., None], tuple[int, ...]]]()
        self._pushed = 0
        self._now = 0.0
        nodes, _ = decide.want(Nodes(1, NodeLimits(lease=LEASE)), 1, 0.0)
        nodes, _ = decide.offered(nodes, 0, 0.0)
        self._nodes, _ = decide.greeted(nodes, 0, "it", 0.0)
        self._nodes = replace(self._nodes, wanted=0)
        self._answered_at = 0.0
        self._lease = make(0.0, LEASE)
        self.ended_at: float | None = None
        self.fenced_at: float | None = None

    def run(self) -> bool:
        """Return whether a replacement could have been started while the node still ran."""
        self._at(0.0, self._beat)
        self._at(0.01, self._look_at_lease)
        self._at(0.0, self._drive)
        while self._queue and self._queue[0][0] <= SIMULATED:
            self._now, _, act, given = heapq.heappop(self._queue)
            act(*given)
        if self.fenced_at is None:
            return False
        return self.ended_at is None or self.ended_at > self.fenced_at

    def _at(self, time: float, act: Callable[..., None], *given: int) -> None:
        self._pushed += 1
        heapq.heappush(self._queue, (time, self._pushed, act, given))

    def _clock(self) -> float:
        return self._now * self._rate

    def _is_paused(self, act: Callable[..., None], *given: int) -> bool:
        began, lasted = self._paused
        if began <= self._now < began + lasted:
            self._at(began + lasted, act, *given)
            return True
        return False

    def _send(self, way: str, act: Callable[..., None], number: int) -> None:
        """Deliver after a delay; what a cut holds up is sent again after it, or lost."""
        begins = self._now
        if self._cut in (way, "both") and self._cut_at <= self._now < self._healed_at:
            if self._chance.random() < 0.3:
                return
            begins = self._healed_at
        self._at(begins + self._chance.expovariate(1 / self._delay), act, number)

    # --- the node -----------------------------------------------------------------------

    def _beat(self) -> None:
        if self.ended_at is None and not self._is_paused(self._beat):
            self._send("out", self._on_beat, self._lease.beat(self._clock()))
            self._at(self._now + BEAT / self._rate, self._beat)

    def _answer(self, number: int) -> None:
        if self.ended_at is not None or self._is_paused(self._answer, number):
            return
        if not self._lease.answered(number, self._clock()):
            self._end()

    def _look_at_lease(self) -> None:
        if self.ended_at is None and not self._is_paused(self._look_at_lease):
            if self._lease.is_over(self._clock()):
                self._end()
            else:
                due = self._lease.until / self._rate
                self._at(max(due, self._now + 1e-6), self._look_at_lease)

    def _end(self) -> None:
        if self.ended_at is None:
            self.ended_at = self._now + self._chance.uniform(0, KILL_TIME * 0.9)

    # --- the driver's machine -----------------------------------------------------------

    def _on_beat(self, number: int) -> None:
        if self._nodes.find(0, NodeState.UP, NodeState.SUSPECT):
            self._answered_at = self._now
            self._apply(decide.beat_received(self._nodes, 0, self._now))
            self._send("in", self._answer, number)

    def _drive(self) -> None:
        while self._nodes.due() <= self._now:
            self._apply(decide.time_passed(self._nodes, self._now))
        if self._nodes.nodes:
            self._at(min(self._nodes.due(), self._now + BEAT), self._drive)

    def _apply(self, decision: decide.NodeDecision) -> None:
        self._nodes, actions = decision
        for action in actions:
            if isinstance(action, Lose):
                self._nodes, _ = decide.answers_ended(self._nodes, 0, self._answered_at)
            elif isinstance(action, Fenced):
                self.fenced_at = self._now


def test_no_replacement_is_started_while_the_lost_node_runs() -> None:
    worlds = [World(seed, Lease, pauses=False) for seed in range(WORLDS)]

    assert [seed for seed, world in enumerate(worlds) if world.run()] == []
    assert sum(world.fenced_at is not None for world in worlds) > WORLDS / 4


def test_a_lease_that_runs_from_the_answer_is_found_out() -> None:
    overlaps = (seed for seed in range(WORLDS) if World(seed, WrongLease, pauses=False).run())

    assert len(list(itertools.islice(overlaps, 11))) == 11


def test_only_a_stopped_node_process_outlives_its_lease() -> None:
    """The guardian, which reads the same deadline, is for that."""
    worlds = [World(seed, Lease, pauses=True) for seed in range(WORLDS)]

    overlaps = [world for world in worlds if world.run()]

    assert len(overlaps) > 10  # so overlaps are found out
    for world in overlaps:
        began, lasted = world._paused
        assert world.fenced_at is not None
        until = world._lease.until / world._rate
        assert began <= until <= began + lasted


def test_silence_costs_one_lease_and_little_more() -> None:
    for seed in range(100):
        world = World(seed, Lease, pauses=False)
        world._delay = 0.001
        world._cut_at, world._healed_at, world._cut = 10.0, 1000.0, "both"
        world.run()
        assert world.fenced_at is not None
        assert world.fenced_at - 10.0 <= LEASE * (1 + DRIFT) + KILL_TIME + 0.1


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_million_worlds_have_no_overlap() -> None:
    assert [seed for seed in range(1_000_000) if World(seed, Lease, pauses=False).run()] == []


def test_an_answer_extends_the_lease_from_when_its_beat_was_sent() -> None:
    lease = Lease(0.0, 10.0)
    first, second = lease.beat(1.0), lease.beat(2.0)

    assert lease.answered(second, 9.0)
    assert lease.until == 12.0
    assert lease.answered(first, 9.5)  # older than one that was answered
    assert lease.answered(99, 9.5)  # never sent
    assert lease.until == 12.0


def test_a_lease_that_is_over_stays_over() -> None:
    lease = Lease(0.0, 10.0)
    late = lease.beat(9.9)

    assert not lease.is_over(9.99)
    assert lease.is_over(10.0)
    assert not lease.answered(late, 10.0)
    assert lease.is_over(10.0)
