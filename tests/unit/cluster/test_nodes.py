"""Decisions about nodes: which are asked for, serve, are lost and fenced."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.cluster.nodes import decide
from phalanx.cluster.nodes.decide import (
    HELD,
    Admit,
    AskForNode,
    Dismiss,
    Fenced,
    Lose,
    NodeAction,
    NodeDecision,
    NodeLimits,
    Nodes,
    NodeState,
    NoNode,
    PutAside,
    Recovered,
    Suspect,
)

LIMITS = NodeLimits(lease=10.0, wait=60.0, join=20.0, leave=5.0, quarantine=600.0)


def serving(wanted: int = 1) -> Nodes:
    """Return nodes that are all up since 0; the machine of each is named as its number."""
    nodes, _ = decide.want(Nodes(0, LIMITS), wanted, 0.0)
    for number in range(wanted):
        nodes, _ = decide.offered(nodes, number, 0.0)
        nodes, _ = decide.greeted(nodes, number, str(number), 0.0)
    return nodes


def pass_time(nodes: Nodes, at: float) -> NodeDecision:
    """Have *nodes* decide whatever is due until *at*."""
    actions = list[NodeAction]()
    while nodes.due() <= at:
        nodes, more = decide.time_passed(nodes, nodes.due())
        actions += more
    return nodes, tuple(actions)


def test_as_many_nodes_as_are_wanted_are_asked_for_and_admitted_when_they_greet() -> None:
    nodes, actions = decide.want(Nodes(0, LIMITS), 2, 0.0)
    assert actions == (AskForNode(0), AskForNode(1))

    nodes, actions = decide.offered(nodes, 1, 3.0)
    assert actions == ()
    nodes, actions = decide.greeted(nodes, 1, "boot", 4.0)
    assert actions == (Admit(1),)
    assert decide.want(nodes, 2, 5.0)[1] == ()
    assert decide.want(nodes, 3, 5.0)[1] == (AskForNode(2),)


def test_silence_makes_a_suspect_then_a_loss_and_the_lease_fences() -> None:
    nodes, actions = pass_time(serving(), 2.5)
    assert actions == (Suspect(0, "silent for 2.5 s"),)

    nodes, actions = pass_time(nodes, 10.0)
    assert actions == (Lose(0, "silent for 10.0 s"), AskForNode(1))
    assert pass_time(nodes, 59.0)[1] == ()  # not before it is known when the last answer left
    nodes, _ = decide.answers_ended(nodes, 0, 0.1)
    nodes, actions = pass_time(nodes, 11.29)
    assert actions == ()
    nodes, actions = pass_time(nodes, 11.3)
    assert actions == (Fenced(0, "its lease is over"),)
    assert nodes.find(0) is None


def test_a_report_makes_a_suspect_at_once_and_one_that_sends_a_beat_goes_on() -> None:
    nodes, actions = decide.suspect_reported(serving(), 0, "Ray: unavailable", 1.0)
    assert actions == (Suspect(0, "Ray: unavailable"),)

    nodes, actions = decide.beat_received(nodes, 0, 9.9)

    assert actions == (Recovered(0),)
    assert pass_time(nodes, 12.3)[1] == ()


def test_a_node_whose_link_closed_is_lost_at_once_and_for_good() -> None:
    nodes, actions = decide.gone(serving(), 0, "its link closed", 1.0)

    assert actions == (Lose(0, "its link closed"), AskForNode(1))
    for late in (
        decide.beat_received(nodes, 0, 1.1),
        decide.suspect_reported(nodes, 0, "", 1.1),
        decide.gone(nodes, 0, "", 1.1),
        decide.leave(nodes, 0, 1.1),
    ):
        assert late == (nodes, ())
    assert decide.greeted(nodes, 0, "0", 1.1)[1] == (Dismiss(0, "not wanted any longer"),)


def test_the_word_that_all_has_ended_fences_at_once() -> None:
    lost, _ = decide.gone(serving(), 0, "its link closed", 1.0)

    assert decide.ended(lost, 0, "the agent", 1.5)[1] == (Fenced(0, "the agent"),)
    assert decide.ended(serving(), 0, "its last word", 1.5)[1] == (
        Lose(0, "its last word"),
        AskForNode(1),
        Fenced(0, "its last word"),
    )


def test_a_new_node_on_the_machine_of_a_lost_one_fences_it() -> None:
    nodes, _ = decide.gone(serving(), 0, "its link closed", 1.0)
    nodes, _ = decide.offered(nodes, 1, 2.0)

    nodes, actions = decide.greeted(nodes, 1, "0", 3.0)

    assert [type(each) for each in actions] == [Fenced, Admit]
    assert [node.number for node in nodes.nodes] == [1]


@pytest.mark.parametrize("slots", [("", ""), ("1", "2")])
def test_a_machine_that_was_lost_twice_is_put_aside_and_another_asked_for(
    slots: tuple[str, str],
) -> None:
    nodes, at = serving(), 0.0
    for number in (0, 1):
        at += 10.0
        nodes, _ = decide.gone(nodes, number, "its link closed", at)
        nodes, _ = decide.offered(nodes, number + 1, at)
        nodes, actions = decide.greeted(nodes, number + 1, "0", at, slots[number])

    assert actions[-2:] == (PutAside(2, at + 600.0), AskForNode(3))
    assert len(actions) == 2 + (slots[0] == slots[1])  # it has ended what was left in its slot
    assert Admit(2) in pass_time(decide.beat_received(nodes, 2, at + 599.0)[0], at + 600.0)[1]
    _, actions = pass_time(nodes, at + 600.0)  # it has been silent all the while
    assert Admit(2) not in actions
    assert Lose(2, "silent for 600.0 s") in actions


@pytest.mark.parametrize(("apart", "counts_against_machine"), [(601.0, True), (1.0, False)])
def test_losses_far_apart_or_that_count_against_no_machine_put_nothing_aside(
    apart: float, counts_against_machine: bool
) -> None:
    nodes, at = serving(), 0.0
    for number in range(5):
        at += apart
        nodes, _ = decide.gone(
            nodes, number, "it closed", at, counts_against_machine=counts_against_machine
        )
        nodes, _ = decide.offered(nodes, number + 1, at)
        nodes, actions = decide.greeted(nodes, number + 1, "0", at)
        assert actions[-1] == Admit(number + 1)


def test_a_node_that_does_not_greet_in_time_is_given_up_and_another_asked_for() -> None:
    nodes, _ = decide.want(Nodes(0, LIMITS), 1, 0.0)
    nodes, _ = decide.offered(nodes, 0, 0.0)

    nodes, actions = decide.time_passed(nodes, 20.0)

    assert actions == (Dismiss(0, "its node has not greeted in 20 s"), AskForNode(1))
    assert nodes.find(1, NodeState.ASKED)


def test_a_machine_that_does_not_come_is_told_once_for_each_time_that_nodes_are_wanted() -> None:
    nodes, _ = decide.want(Nodes(0, LIMITS), 1, 0.0)
    nodes, actions = decide.time_passed(nodes, 60.0)
    assert actions == (NoNode("no machine in 60 s"),)
    assert nodes.due() == math.inf

    nodes, actions = decide.want(nodes, 1, 500.0)
    assert (actions, nodes.due()) == ((), 560.0)
    assert decide.want(nodes, 1, 550.0)[0].due() == 560.0
    nodes, _ = decide.offered(nodes, 0, 700.0)
    assert decide.greeted(nodes, 0, "0", 701.0)[1] == (Admit(0),)


def test_machines_that_do_not_come_for_one_reason_are_told_once() -> None:
    nodes, _ = decide.want(Nodes(0, LIMITS), 3, 0.0)

    nodes, actions = decide.time_passed(nodes, 60.0)

    assert actions == (NoNode("no machine in 60 s"),)
    assert decide.time_passed(nodes, 61.0)[1] == ()


def test_the_wait_for_a_machine_begins_anew_with_each_start_that_needs_one() -> None:
    nodes, _ = decide.greeted(
        decide.offered(decide.want(Nodes(0, LIMITS), 2, 0.0)[0], 0, 1.0)[0], 0, "a", 2.0
    )
    nodes, _ = decide.ended(nodes, 0, "its last word", 55.0)

    nodes, _ = decide.want(nodes, 2, 55.0, begins=True)
    again, _ = decide.want(nodes, 2, 60.0)  # the same start looks again

    assert decide.time_passed(again, 114.9)[1] == ()
    assert set(decide.time_passed(again, 115.0)[1]) == {NoNode("no machine in 60 s")}


def test_machines_that_are_wanted_no_longer_are_asked_for_no_longer() -> None:
    nodes, _ = decide.want(serving(2), 5, 1.0)
    nodes, _ = decide.offered(nodes, 2, 2.0)

    nodes, actions = decide.want(nodes, 4, 3.0)
    assert actions == (Dismiss(4, "not wanted any longer"),)
    nodes, actions = decide.want(nodes, 1, 4.0)
    assert actions == (Dismiss(3, "not wanted any longer"),)
    assert [each.number for each in nodes.nodes] == [0, 1, 2]  # the others serve, or begin to
    assert decide.want(nodes, 4, 5.0)[1] == (AskForNode(5),)


def test_a_node_that_cannot_serve_is_not_replaced_by_one_like_it() -> None:
    nodes, _ = decide.want(Nodes(0, LIMITS), 1, 0.0)
    nodes, _ = decide.offered(nodes, 0, 0.0)

    nodes, actions = decide.unfit(nodes, 0, "Python 3.12 there, 3.11 here")

    why = "Python 3.12 there, 3.11 here"
    assert actions == (Dismiss(0, why), NoNode(why))
    assert nodes.due() == math.inf


def test_a_node_that_is_left_over_ends_in_good_order_or_by_its_lease() -> None:
    nodes, _ = decide.want(serving(2), 1, 1.0)
    nodes, actions = decide.leave(nodes, 1, 1.0)
    assert actions == (Dismiss(1, "not wanted any longer"),)

    assert decide.ended(nodes, 1, "its last word", 2.0)[1] == (Fenced(1, "its last word"),)
    nodes, _ = decide.beat_received(nodes, 0, 5.9)
    nodes, actions = decide.time_passed(nodes, 6.0)
    assert actions == (Lose(1, "has not ended in 5 s"),)


EVENTS: dict[str, Callable[[Nodes, int, float], NodeDecision]] = {
    "offered": decide.offered,
    "greeted": lambda nodes, number, at: decide.greeted(nodes, number, f"m{number % 3}", at),
    "beat_received": decide.beat_received,
    "suspect_reported": lambda nodes, number, at: decide.suspect_reported(nodes, number, "", at),
    "gone": lambda nodes, number, at: decide.gone(nodes, number, "", at),
    "ended": lambda nodes, number, at: decide.ended(nodes, number, "", at),
    "answers": decide.answers_ended,
    "leave": decide.leave,
    "time": lambda nodes, _number, at: decide.time_passed(nodes, at),
}


@given(
    wanted=st.integers(1, 4),
    steps=st.lists(
        st.tuples(
            st.sampled_from(sorted(EVENTS)), st.integers(0, 8), st.sampled_from([0.1, 3, 11, 70])
        ),
        max_size=60,
    ),
)
def test_whatever_happens_a_lost_node_stays_lost_and_is_fenced_once(
    wanted: int, steps: list[tuple[str, int, float]]
) -> None:
    nodes, actions = decide.want(Nodes(0, LIMITS), wanted, 0.0)
    happened = list(actions)
    at = 0.0
    for name, number, later in steps:
        at += later
        before = {node.number: node.state for node in nodes.nodes}
        nodes, actions = EVENTS[name](nodes, number, at)
        happened += actions
        for node in nodes.nodes:
            if before.get(node.number) is NodeState.LOST:
                assert node.state is NodeState.LOST
        lost = {each.number for each in happened if isinstance(each, Lose)}
        held = {node.number for node in nodes.nodes if node.state in HELD}
        assert not lost & held
        admitted = {each.number for each in happened if isinstance(each, Admit)}
        assert held <= admitted
    for node in nodes.nodes:
        if node.state is NodeState.LOST:
            nodes, _ = decide.answers_ended(nodes, node.number, at)
    while any(node.state is NodeState.LOST for node in nodes.nodes):
        nodes, actions = decide.time_passed(nodes, nodes.due())
        happened += actions
        for node in nodes.nodes:
            if node.state is NodeState.LOST:
                nodes, _ = decide.answers_ended(nodes, node.number, at)
    fenced = [each.number for each in happened if isinstance(each, Fenced)]
    asked = [each.number for each in happened if isinstance(each, AskForNode)]
    assert len(fenced) == len(set(fenced))
    assert {each.number for each in happened if isinstance(each, Lose)} <= set(fenced)
    assert len(asked) == len(set(asked))


def test_nodes_that_do_not_join_are_replaced_until_some_in_a_row_have_failed() -> None:
    nodes, _ = decide.want(Nodes(0, LIMITS), 1, 0.0)
    for number in range(2):
        nodes, _ = decide.offered(nodes, number, 1.0)
        nodes, actions = decide.gone(nodes, number, "exit code 1", 1.5)
        assert actions == (Dismiss(number, "exit code 1"), AskForNode(number + 1))

    nodes, _ = decide.offered(nodes, 2, 2.0)
    nodes, actions = decide.gone(nodes, 2, "exit code 1", 2.5)

    why = "3 nodes in a row have not joined; the last of them: exit code 1"
    assert actions == (Dismiss(2, why), NoNode(why))
    assert nodes.nodes == ()


def test_nodes_that_begin_and_end_with_the_gateway_or_the_broker_are_not_in_that_row() -> None:
    nodes, _ = decide.want(Nodes(0, LIMITS), 1, 0.0)

    for number in range(5):
        nodes, _ = decide.offered(nodes, number, 1.0)
        nodes, actions = decide.gone(nodes, number, "the broker", 1.5, counts_against_machine=False)
        assert actions == (Dismiss(number, "the broker"), AskForNode(number + 1))


def test_the_wait_for_a_machine_goes_on_though_what_gives_machines_is_replaced() -> None:
    nodes, _ = decide.want(Nodes(0, LIMITS), 1, 0.0)

    for number in range(2):
        nodes, actions = decide.gone(nodes, number, "the broker", 5.0, counts_against_machine=False)
        assert actions == (Dismiss(number, "the broker"), AskForNode(number + 1))

    assert nodes.due() == LIMITS.wait


def test_an_address_that_the_first_node_does_not_reach_is_reached_by_none() -> None:
    nodes, _ = decide.want(Nodes(0, LIMITS), 2, 0.0)
    nodes, _ = decide.offered(nodes, 0, 1.0)

    nodes, actions = decide.unreached(nodes, 0, "no route", 6.0)

    assert actions == (Dismiss(0, "no route"), NoNode("no route"))
    assert nodes.find(0) is None


def test_a_node_that_does_not_reach_what_others_have_reached_is_replaced() -> None:
    nodes, _ = decide.want(Nodes(0, LIMITS), 2, 0.0)
    nodes, _ = decide.offered(nodes, 0, 1.0)
    nodes, _ = decide.greeted(nodes, 0, "a", 1.0)
    for number in range(1, 3):
        nodes, _ = decide.offered(nodes, number, 1.0)
        nodes, actions = decide.unreached(nodes, number, "no route", 6.0)
        assert actions == (Dismiss(number, "no route"), AskForNode(number + 1))
    nodes, _ = decide.offered(nodes, 3, 1.0)

    nodes, actions = decide.unreached(nodes, 3, "no route", 6.0)

    assert NoNode("3 nodes in a row have not joined; the last of them: no route") in actions
    assert decide.unreached(nodes, 0, "no route", 7.0) == (nodes, ())  # it has joined


def test_a_node_that_joins_ends_a_row_of_failures() -> None:
    nodes, _ = decide.want(Nodes(0, LIMITS), 1, 0.0)
    for number in range(5):
        nodes, _ = decide.offered(nodes, number, 1.0)
        if number % 2:
            nodes, _ = decide.greeted(nodes, number, str(number), 1.0)
        nodes, actions = decide.gone(nodes, number, "so", 1.5)
        assert AskForNode(number + 1) in actions
