"""The owner of the nodes: what it asks of gateway and engine, and when it tells."""

from __future__ import annotations

import errno
import heapq
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.cluster.driver.node_owner import NodeOwner
from phalanx.cluster.link.handshake import greeting_of
from phalanx.cluster.link.messages import (
    Launch,
    Leave,
    Message,
    NodeOrder,
    NotStarted,
    Started,
    Swept,
)
from phalanx.cluster.nodes.decide import NodeLimits
from phalanx.cluster.nodes.lease import over_at
from phalanx.runtime import Timer
from phalanx.supervision import AddressNotReached, NodeRefused, RuntimeFault

LIMITS = NodeLimits(lease=10.0, wait=60.0, join=20.0, leave=5.0, quarantine=600.0)
GREETING = greeting_of("0" * 32, "10.0.0.1")


NOTED = {"reserve", "release", "admitted", "suspected", "recovered", "lost", "fenced", "received"}
PASSED_OVER = {"forget", "put_aside", "emptied"}


class World:
    """Loop, gateway, engine and listener of one owner, on a clock that the test sets.

    Attributes:
        did: What was asked of gateway and engine, and told to the listener, in order.
        last: When the gateway last answered each node.
    """

    endpoint = "tcp://10.0.0.9:5555"
    key = "k"

    def __init__(self) -> None:
        self.now = 0.0
        self.did: list[tuple[Any, ...]] = []
        self.is_up = True
        self.is_ending = False
        self.answers_asks = True
        self.last: dict[int, float] = {}
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = 0
        this: Any = self
        self.owner = NodeOwner(this, this, lambda _: this, LIMITS, this)

    # the loop
    def time(self) -> float:
        return self.now

    def post(self, callback: Callable[[], None]) -> None:
        callback()

    def call_at(self, at: float, callback: Callable[[], None]) -> Timer:
        loop: Any = self
        timer = Timer(loop, at, callback)
        self._order += 1
        heapq.heappush(self._timers, (at, self._order, timer))
        return timer

    def note_cancelled_timer(self) -> None:
        pass

    def pass_time(self, until: float) -> None:
        while self._timers and self._timers[0][0] <= until:
            at, _, timer = heapq.heappop(self._timers)
            self.now = max(self.now, at)
            timer()
        self.now = until

    # the gateway
    def admit(self, number: int, key: str) -> None:
        self.did.append(("admit", number, key))

    def send(self, number: int, message: Message) -> bool:
        self.did.append(("send", number, message))
        return self.is_up

    def silence(self, number: int, why: str) -> bool:
        self.did.append(("silence", number))
        if self.is_up:
            self.owner.silenced(number, self.last.get(number, self.now))
        return self.is_up

    def ask(self, number: int) -> bool:
        if self.is_up and self.answers_asks:
            self.owner.asked(self.now)
        return self.is_up

    def kill(self, why: str) -> None:
        self.did.append(("kill",))

    # the engine
    def start(self, number: int, order: NodeOrder) -> None:
        assert order.lease == LIMITS.lease
        self.did.append(("start", number, order.endpoint))

    def shortage(self) -> str:
        return ""

    # the listener
    def refused(self, address: str, why: str) -> None:
        self.did.append(("refused", why))

    def failed(self, error: RuntimeFault) -> None:
        self.did.append(("failed", error))

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Note whatever else is asked or told of a node, by its name."""

        def note(*what: object) -> None:
            if name in NOTED:
                self.did.append((name, what[0]))

        if name not in NOTED | PASSED_OVER:
            raise AttributeError(name)
        return note

    # what tests do
    def join(self, number: int) -> None:
        self.owner.offered(number)
        self.owner.started(number, f"key {number}")
        self.owner.received(number, replace(GREETING, place=str(number)), self.now)
        self.last[number] = self.now

    def beat(self, number: int) -> None:
        self.last[number] = self.now
        self.owner.beat_received(number, self.now)

    def told(self) -> list[tuple[Any, ...]]:
        did, self.did = self.did, []
        return did


@pytest.fixture
def world() -> World:
    """One node that serves since 0."""
    world = World()
    world.owner.want(1)
    world.join(0)
    return world


def test_a_node_is_started_admitted_by_its_key_and_serves_once_it_has_greeted() -> None:
    world = World()

    world.owner.want(1)
    world.join(0)

    assert world.told() == [
        ("reserve", 0),
        ("start", 0, "tcp://10.0.0.9:5555"),
        ("admit", 0, "key 0"),
        ("admitted", 0),
    ]


def test_a_silent_node_is_silenced_and_fenced_a_lease_after_its_last_answer(world: World) -> None:
    world.pass_time(1.0)
    world.beat(0)
    world.told()

    world.pass_time(11.0)
    assert world.told() == [("suspected", 0), ("silence", 0), ("lost", 0), ("reserve", 1)]
    world.pass_time(over_at(1.0, 10.0) - 0.01)
    assert world.told() == []
    world.pass_time(over_at(1.0, 10.0) + 0.01)
    assert world.told() == [("fenced", 0), ("release", 0)]


def test_a_lost_node_is_not_fenced_while_it_is_unknown_when_its_last_answer_left(
    world: World,
) -> None:
    world.last.clear()
    world.owner.closed(0, 0.5)  # `silenced` tells 0.0, which is when the world stands
    assert ("lost", 0) in world.told()

    world.pass_time(over_at(0.0, 10.0) - 0.01)
    assert world.told() == []


def test_the_engine_fences_only_by_a_sweep(world: World) -> None:
    world.owner.gone(0, "its agent has died", swept=False)
    assert world.told()[-3:] == [("silence", 0), ("lost", 0), ("reserve", 1)]

    world.owner.gone(0, "its agent has swept", swept=True)
    assert world.told() == [("fenced", 0), ("release", 0)]


def test_what_comes_of_the_end_of_the_engine_is_judged_behind_it() -> None:
    world = World()
    world.owner.want(2)
    world.join(0)
    world.join(1)
    world.told()
    causes: list[tuple[str, bool]] = []

    def lost(number: int, why: str) -> None:
        node = world.owner.nodes.find(number)
        assert node is not None
        causes.append((why, node.counts_against_machine))

    world.lost = lost  # type: ignore[attr-defined]
    world.is_ending = True
    world.owner.closed(0, 1.0)
    world.owner.received(1, Swept(), 1.0)
    assert world.told() == []

    world.is_ending = False  # there is another
    for number in (0, 1):
        world.owner.gone(number, "the broker is dead", swept=False, counts_against_machine=False)

    assert causes == [("the broker is dead", False)] * 2
    assert [what for what in world.told() if what[0] == "fenced"] == [("fenced", 1)]


def test_a_driver_that_was_stopped_hears_first_and_judges_then(world: World) -> None:
    world.answers_asks = False
    world.told()
    world.pass_time(25.0)  # it asks the gateway at 2.5
    world.did.clear()  # whose silence was the driver's own

    for at in range(1, 26):
        world.last[0] = at
        world.owner.beat_received(0, float(at))
    world.answers_asks = True
    world.owner.asked(25.0)

    assert world.told() == []


def test_a_gateway_that_does_not_answer_is_killed(world: World) -> None:
    world.answers_asks = False
    world.told()

    world.pass_time(12.4)
    assert world.told() == []
    world.pass_time(12.6)
    assert world.told() == [("kill",)]


def test_a_driver_that_was_stopped_kills_no_gateway_whose_answer_it_has_not_read(
    world: World,
) -> None:
    world.answers_asks = False
    world.pass_time(3.0)  # it has asked at 2.5
    world.told()

    world.now = 30.0
    world.pass_time(39.9)
    assert world.told() == []
    world.pass_time(40.1)
    assert world.told() == [("kill",)]


def test_with_the_gateway_all_nodes_are_lost_and_fenced_a_lease_later(world: World) -> None:
    world.told()
    world.is_up = False
    world.endpoint = ""
    world.now = 3.0

    world.owner.down(3.0)
    assert world.told() == [("silence", 0), ("lost", 0), ("reserve", 1)]
    world.owner.offered(1)
    assert world.told() == []  # it could not be told where to greet
    world.is_up = True
    world.endpoint = "tcp://10.0.0.9:6666"
    world.owner.ready()
    assert world.told() == [("start", 1, "tcp://10.0.0.9:6666")]
    world.pass_time(over_at(3.0, 10.0) + 0.1)
    assert ("fenced", 0) in world.told()


def test_a_node_that_was_being_silenced_when_the_gateway_died_is_fenced_a_lease_later(
    world: World,
) -> None:
    silenced = world.owner.silenced
    world.owner.silenced = lambda *_: None  # type: ignore[method-assign]  # its answer is lost
    world.owner.closed(0, 1.0)
    world.owner.silenced = silenced  # type: ignore[method-assign]  # as before
    world.pass_time(30.0)
    assert ("fenced", 0) not in world.told()

    world.is_up = False
    world.owner.down(30.0)

    world.pass_time(over_at(30.0, 10.0) + 0.1)
    assert ("fenced", 0) in world.told()


def beginning() -> World:
    """Return a world with one node, which has begun and not greeted."""
    world = World()
    world.owner.want(1)
    world.owner.offered(0)
    world.owner.started(0, "k")
    world.told()
    return world


def test_a_node_with_another_python_is_refused_by_a_typed_error() -> None:
    world = beginning()

    world.owner.received(0, replace(GREETING, python="3.1.4"), 0.0)

    *rest, (_, error) = world.told()
    assert rest == [("silence", 0), ("release", 0)]
    assert isinstance(error, NodeRefused)
    assert "has Python 3.1" in str(error)
    assert world.owner.nodes.nodes == ()


def test_an_address_that_no_node_reaches_is_told_by_a_typed_error_with_the_option() -> None:
    world = beginning()

    world.owner.unreached(0, "alpha does not reach it: No route to host")

    *rest, (_, error) = world.told()
    assert rest == [("silence", 0), ("release", 0)]
    assert isinstance(error, AddressNotReached)
    assert error.address == world.endpoint
    assert "No route to host: give cluster.bind an address" in str(error)


def test_a_node_that_breaks_the_rules_of_its_link_is_lost(world: World) -> None:
    world.told()

    world.owner.misbehaved(0, "it has greeted twice")

    assert world.told() == [("silence", 0), ("lost", 0), ("reserve", 1)]


def test_what_a_lost_node_says_of_its_ranks_is_not_told(world: World) -> None:
    world.owner.received(0, Started(number=1, pids=(1,)), 0.5)
    assert world.told()[-1] == ("received", 0)
    world.owner.closed(0, 1.0)
    world.told()

    world.owner.received(0, Started(number=1, pids=(1,)), 1.5)
    world.owner.beat_received(0, 1.5)
    world.owner.send(0, Leave())

    assert world.told() == []


def test_a_launch_whose_order_cannot_be_sent_has_failed_and_the_reason_is_told(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(number: int, message: Message) -> bool:
        raise OSError(errno.EMFILE, "Too many open files")

    answers: list[Message] = []
    monkeypatch.setattr(world, "send", refuse)
    monkeypatch.setattr(world, "received", lambda _, answer: answers.append(answer), raising=False)

    world.owner.send(0, Launch(number=7, ranks=()))

    (answer,) = answers
    assert isinstance(answer, NotStarted)
    assert answer.number == 7
    assert "Too many open files" in answer.error


def test_close_ends_what_serves_and_gives_back_what_does_not_yet(world: World) -> None:
    world.owner.want(3)
    world.owner.offered(1)
    world.told()

    world.owner.close()

    assert world.told() == [
        ("silence", 2),
        ("release", 2),
        ("send", 0, Leave()),
        ("silence", 1),
        ("release", 1),
    ]
    world.owner.received(0, Swept(), 1.0)
    assert world.told() == [("fenced", 0), ("release", 0)]
    assert world.owner.nodes.nodes == ()


DOINGS = st.sampled_from(["offer", "join", "beat", "close", "gone", "doubt", "stray", "leave"])


@settings(max_examples=300)
@given(st.lists(st.tuples(DOINGS, st.integers(0, 5), st.floats(0.0, 9.0)), max_size=40))
def test_no_node_is_fenced_before_its_lease_is_over_unless_all_of_it_has_ended(
    doings: list[tuple[str, int, float]],
) -> None:
    world = World()
    world.owner.want(2)
    for what, number, later in doings:
        world.pass_time(world.now + later)
        serves = world.owner.nodes.find(number)
        if what == "offer":
            world.owner.offered(number)
        elif what == "join" and number not in world.last:
            world.join(number)
        elif what == "beat" and serves is not None and number in world.last:
            world.owner.beat_received(number, world.now)
            world.last[number] = world.now if serves.state != "lost" else world.last[number]
        elif what == "close":
            world.owner.closed(number, world.now)
        elif what == "gone":
            world.owner.gone(number, "so", swept=False)
        elif what == "doubt":
            world.owner.suspect_reported(number, "so")
        elif what == "stray":
            world.owner.misbehaved(number, "so")
        elif what == "leave":
            world.owner.leave(number)
        for entry in world.told():
            if entry[0] == "fenced":
                assert world.now >= over_at(world.last[entry[1]], LIMITS.lease) - 1e-9
