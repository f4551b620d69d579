"""The nodes of a group: which ranks are placed on which, and how the loss of nodes is reported."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, cast

import pytest
from tests.support.processes import LONG, start_thread, wait_until

from phalanx.cluster.driver.node_pool import NodePool
from phalanx.cluster.driver.options import ClusterOptions
from phalanx.cluster.link.handshake import greeting_of
from phalanx.cluster.link.messages import NotStarted, RankLaunch, Withdraw
from phalanx.cluster.nodes import decide
from phalanx.cluster.nodes.decide import Nodes
from phalanx.supervision import NoNode, RuntimeFault

GREETING = greeting_of("0" * 32, "10.0.0.1")


class Options(ClusterOptions):
    def engine(self, loop: object, *, gpus_per_rank: float) -> Any:
        return loop


class World:
    """Loop, owner and listener of one pool.

    Attributes:
        nodes: Those of the owner.
        posted: What the loop has to call.
        did: What was told to the group or asked of the owner.
    """

    def __init__(self, nodes: int) -> None:
        self.nodes = Nodes(0)
        self.posted: list[Callable[[], None]] = []
        self.did: list[tuple[Any, ...]] = []
        this: Any = self
        options = Options(ranks_per_node=1)
        self.pool = NodePool(
            this, this, options, this, group="tp", preload=(), env={}, gpus_per_rank=0
        )
        self.pool._owner = this
        self.pool._ranks_per_node = 1
        self.pool._size = nodes
        for number in range(nodes):
            self.join(number)
        self.did.clear()

    def join(self, number: int) -> None:
        """Have the next node serve."""
        self.nodes, _ = decide.want(self.nodes, number + 1, 0.0)
        self.nodes, _ = decide.offered(self.nodes, number, 0.0)
        self.nodes, _ = decide.greeted(self.nodes, number, str(number), 0.0)
        self.pool.admitted(number, GREETING)

    def asked(self, what: str) -> list[Any]:
        """Return what the owner was asked: the numbers wanted, or the nodes that are to leave."""
        return [each[1] for each in self.did if each[0] == what]

    def time(self) -> float:
        return 0.0

    def post(self, callback: Callable[[], None]) -> None:
        self.posted.append(callback)

    def want(self, number: int, *, begins: bool = False) -> None:
        self.did.append(("want", number, begins))

    def lose(self, number: int, why: str, *, counts_against_machine: bool) -> None:
        counts = {"counts_against_machine": counts_against_machine}
        self.nodes, _ = decide.gone(self.nodes, number, why, 1.0, **counts)
        self.pool.lost(number, why)

    def fence(self, number: int) -> None:
        self.nodes, _ = decide.ended(self.nodes, number, "its last word", 2.0)
        self.pool.fenced(number, "its last word")

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *what, **_how: self.did.append((name, *what))


def test_a_node_that_was_asked_to_leave_is_given_no_rank_before_it_has_heard_that() -> None:
    world = World(2)
    assert world.pool.place(2, (0, 1)) == ""
    assert world.pool.place(1, ()) == ""
    assert ("leave", 1) in world.did

    assert world.pool.place(2, (1,)) == "2 nodes, of which 1 serve"


def test_a_rank_whose_node_may_still_run_is_moved_by_no_start_of_another() -> None:
    world = World(2)
    assert world.pool.place(2, (0, 1)) == ""
    world.lose(1, "silent", counts_against_machine=True)
    world.join(2)

    assert world.pool.place(2, (0,)) == ""
    assert world.pool.places()[1].node == 1
    assert "to be fenced" in world.pool.place(2, (1,))
    world.fence(1)
    assert world.pool.place(2, (1,)) == ""
    assert [each.node for each in world.pool.places().values()] == [0, 2]


def test_a_node_of_which_only_the_owner_knows_that_it_is_lost_is_not_fenced_either() -> None:
    world = World(3)
    assert world.pool.place(2, (0, 1)) == ""
    world.nodes, _ = decide.gone(world.nodes, 1, "silent", 1.0)

    assert "to be fenced" in world.pool.place(2, (0, 1))


def test_a_rank_whose_node_is_well_waits_for_no_other_node() -> None:
    world = World(2)
    assert world.pool.place(2, (0, 1)) == ""
    world.lose(1, "silent", counts_against_machine=True)
    world.fence(1)

    assert world.pool.place(2, (0,)) == ""
    assert world.pool.place(2, (1,)) == "2 nodes, of which 1 serve"


def test_a_start_that_waits_for_no_machine_puts_off_no_limit_of_one_that_does() -> None:
    world = World(2)
    assert world.pool.place(2, (0, 1)) == ""
    world.lose(1, "silent", counts_against_machine=True)
    world.fence(1)
    world.did.clear()

    assert world.pool.place(2, (1,), begins=True) == "2 nodes, of which 1 serve"
    assert world.pool.place(2, (0,), begins=True) == ""

    assert world.did == [("want", 2, True), ("want", 2, False)]


def test_machines_of_a_resize_that_is_given_up_are_let_go() -> None:
    world = World(1)
    assert world.pool.place(1, (0,)) == ""

    with world.pool.reserve_machines(3):
        world.join(1)
        assert not world.pool.has_machines(3)
        assert world.pool.place(1, (0,)) == ""  # a restart meanwhile
        assert world.asked("leave") == []

    assert world.asked("want") == [1, 3, 3, 1]
    assert world.asked("leave") == [1]


def test_a_machine_of_a_resize_that_is_given_up_before_its_node_serves_is_let_go_then() -> None:
    world = World(1)
    assert world.pool.place(1, (0,)) == ""
    with world.pool.reserve_machines(2):
        pass

    world.join(1)

    assert world.asked("leave") == [1]


def test_machines_that_a_recovery_waits_for_are_not_let_go_with_those_of_a_resize() -> None:
    world = World(2)
    assert world.pool.place(2, (0, 1)) == ""
    with world.pool.reserve_machines(3):
        world.lose(1, "silent", counts_against_machine=True)
        world.join(2)

    assert world.asked("leave") == []
    world.fence(1)
    assert world.pool.place(2, (1,)) == ""


def test_machines_of_a_resize_under_way_are_not_let_go_with_those_of_another() -> None:
    world = World(1)
    assert world.pool.place(1, (0,)) == ""
    with world.pool.reserve_machines(3) as reservation:
        world.join(1)
        world.join(2)
        assert world.pool.has_machines(3)
        reservation.is_confirmed = True
    world.nodes, _ = decide.suspect_reported(world.nodes, 2, "silent", 1.0)
    assert "to be heard" in world.pool.place(3, (0, 1, 2))

    with world.pool.reserve_machines(2):
        pass
    assert world.asked("leave") == []

    world.nodes, _ = decide.beat_received(world.nodes, 2, 2.0)
    assert world.pool.place(3, (0, 1, 2)) == ""
    assert world.pool.place(1, (0,)) == ""  # what was reserved is no longer
    assert world.asked("want")[-1] == 1
    assert world.asked("leave") == [1, 2]


def test_what_is_short_is_told_to_each_that_waits_for_it() -> None:
    world = World(1)
    with world.pool.reserve_machines(2) as one, world.pool.reserve_machines(3) as other:
        world.pool.failed(RuntimeFault("no machine in 600 s"))

        errors: list[NoNode] = []
        for each in (one, other):
            with pytest.raises(NoNode, match="no machine in 600 s") as caught:
                world.pool.await_machines(each, None, lambda: True)
            errors.append(caught.value)
    assert errors[0] is not errors[1]


def test_a_launch_that_is_not_answered_in_time_fails_and_names_the_nodes() -> None:
    world = World(2)
    assert world.pool.place(2, (0, 1)) == ""
    ranks = [RankLaunch(rank=rank, incarnation=1, entry="m:f", label="tp") for rank in (0, 1)]
    nothing: Any = None
    told: list[str] = []

    def launch() -> None:
        with pytest.raises(RuntimeFault) as caught:
            world.pool.launch(
                ranks,
                {},
                on_exit=nothing,
                on_output=nothing,
                deadline=time.monotonic(),
                is_wanted=lambda: True,
            )
        told.append(str(caught.value))

    thread = start_thread(launch)
    wait_until(lambda: sum(isinstance(each[-1], Withdraw) for each in world.did) == 2)
    for number in (1, 2):
        world.pool.received(number - 1, NotStarted(number=number, error="it was withdrawn"))
    thread.join(LONG)

    host = GREETING.host
    nodes = f"node 0 ({host}), node 1 ({host})"
    assert told == [f"the ranks were not started: {nodes}: no answer in 0 s"]


def test_nothing_is_requested_once_the_pool_is_closed() -> None:
    world = World(1)
    world.pool.emptied()
    with world.pool.reserve_machines(2) as reservation:
        world.did.clear()
        world.pool.close()
        assert not world.pool.await_machines(reservation, None, lambda: True)
    world.pool.place(2, (0, 1))

    assert world.asked("want") == world.asked("leave") == []


def test_nodes_that_are_lost_of_one_cause_are_told_at_once_and_each_other_one_by_itself() -> None:
    world = World(4)
    assert world.pool.place(4, range(4)) == ""
    for rank in range(4):
        process = cast("Any", type("Process", (), {"lost": lambda _: None, "device": "cpu"}))()
        process.node, process.rank, process.incarnation = rank, rank, 7
        world.pool._processes[rank, 7] = process
    world.did.clear()

    for number in (0, 1):
        world.lose(number, "the broker has ended", counts_against_machine=False)
    for number in (2, 3):
        world.lose(number, "its link has ended", counts_against_machine=True)
    world.pool.fenced(0, "its last word")
    for callback in world.posted:
        callback()

    ranks = [tuple(what[1]) for what in world.did if what[0] == "lost"]
    assert ranks == [(2,), (3,), (0, 1)]
    names = [what[0] for what in world.did]
    assert names.index("fenced") > len(names) - 1 - names[::-1].index("lost")
