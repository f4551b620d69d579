"""The checker, by value: what it accepts, and what it finds in histories that lie."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from tests.support import false_histories as lies
from tests.support.histories import Teller, whole

from phalanx.chaos import INVARIANTS
from phalanx.chaos.checker.checker import RULES, check
from phalanx.chaos.history.events import (
    CallIssued,
    ChangePlanned,
    DriverEnded,
    FaultInjected,
    GroupDown,
    GroupEnded,
    GroupUp,
    RankDied,
    RankExited,
    RanksNotStarted,
    RankStarted,
    SteadyStateChecked,
)

# --- what is accepted ---------------------------------------------------------------------


def test_a_run_in_which_all_went_well_holds_every_invariant() -> None:
    teller = whole(3)
    call = teller.issue(retries=1)
    wire = teller.send(call)
    teller.begin(call, wire, 0)
    teller.add(FaultInjected, number=1, fault="kill", target="1", rank=1, group="g", incarnation=1)
    teller.die(1, stopped=(0, 2))
    teller.start(0, 1, 2)
    wire = teller.send(call)
    teller.run(call, wire)
    teller.settle(call)
    for rank in range(3):
        teller.take(call, wire, rank)
    teller.serve(shape="gather")
    teller.close()

    assert check(teller.history()) == ()


def test_ranks_that_share_no_process_group_need_not_wait_for_one_that_raised() -> None:
    teller = whole()
    lies.went_on_without_the_other(teller, joined=False)
    teller.close()

    assert check(teller.history()) == ()


@pytest.mark.parametrize("begun", [True, False])
def test_a_call_that_failed_with_a_death_is_an_outcome(begun: bool) -> None:
    teller = whole()
    if begun:
        call = teller.begin_new()
    else:
        call = teller.issue()
        teller.send(call)  # noted in the page of a rank, and nothing was done of it yet
    teller.die(1, stopped=(0,))
    teller.settle(call, "died")
    teller.start(0, 1)
    teller.close()

    assert teller.broken() == set()


def test_what_a_killed_driver_owed_is_excused() -> None:
    teller = whole()
    teller.send(teller.issue())
    teller.add(DriverEnded, number=1, closed=False)

    assert teller.broken() == set()


def test_survivors_that_are_kept_are_right() -> None:
    teller = whole(3, survivors="keep")
    teller.die(1)
    teller.start(1)
    teller.close()

    assert teller.broken() == set()


@pytest.mark.parametrize("survivors", ["restart", "keep"])
def test_a_start_may_be_told_of_after_a_death_that_came_later(survivors: str) -> None:
    teller = whole(survivors=survivors)
    teller.die(0, "restart ranks 0, 1", stopped=(1,))
    teller.epoch += 1  # both are being started, and one dies before it is told of the other
    for rank in (0, 1):
        teller.incarnations[rank] += 1
    teller.add(RankStarted, **teller.who(0), pid=1)
    teller.die(0, "restart ranks 0, 1")
    teller.add(RankStarted, **teller.who(1), pid=2)
    teller.add(RankExited, **teller.who(1), pid=2, reason="shutdown")
    teller.start(0, 1)
    teller.close()

    assert teller.broken() == set()


def test_a_start_may_be_told_of_after_the_death_of_a_rank_that_stayed_up() -> None:
    teller = whole(3, strategy="rest_for_one")
    stayed = teller.who(1)
    teller.die(2, "restart rank 2")
    teller.epoch += 1  # rank 2 is being started, and rank 1 dies before that is told
    teller.incarnations[2] += 1
    teller.add(RankExited, **stayed, pid=1, reason="killed")
    died = {**stayed, "epoch": teller.epoch}  # of its group
    teller.add(RankDied, **died, pid=1, reason="killed", decision="restart ranks 1, 2")
    teller.add(GroupDown, group="g", epoch=teller.epoch, cause="a death")
    teller.add(RankStarted, **teller.who(2), pid=2)
    teller.add(RankExited, **teller.who(2), pid=2, reason="shutdown")
    teller.start(1, 2)
    teller.close()

    assert teller.broken() == set()


def test_a_planned_restart_has_its_cause() -> None:
    teller = whole(strategy="one_for_one")
    teller.add(ChangePlanned, group="g", ranks=(0,))
    teller.add(RankExited, **teller.who(0), pid=1, reason="shutdown")
    teller.start(0, meets=False, new_epoch=False)
    teller.close()

    assert teller.broken() == set()


def test_the_death_of_a_spare_is_none_of_the_groups() -> None:
    teller = whole(intensity=0)
    spare = {"group": "g", "rank": None, "incarnation": -1, "epoch": 0, "pid": 1}
    teller.add(RankDied, **spare, reason="killed", decision="replace the spare")
    teller.add(GroupUp, group="g", epoch=1, world_size=2)
    teller.add(RankDied, **spare, reason="killed", decision="replace the spare")
    teller.add(GroupEnded, group="g", epoch=1, cause="give up")

    assert teller.broken() == {"intensity"}  # nothing that counts was behind its end


def test_a_group_that_gives_up_past_its_intensity_is_right() -> None:
    teller = whole(intensity=1)
    teller.die(0, stopped=(1,))
    teller.start(0, 1)
    teller.die(1, "give up: more than 1 restarts in 60 s", stopped=(0,))
    teller.add(GroupEnded, group="g", epoch=2, cause="give up")
    teller.add(SteadyStateChecked, group="g", ok=False, ended=True)
    teller.add(DriverEnded, number=1, closed=True)

    assert teller.broken() == set()


def test_a_group_that_its_decider_stops_need_not_exceed_its_intensity() -> None:
    teller = whole()
    teller.die(0, "rank 0: stop by the decider: stop the group", stopped=(1,))
    teller.add(GroupEnded, group="g", epoch=1, cause="normal (rank 0 was stopped by the decider)")
    teller.add(DriverEnded, number=1, closed=True)

    assert teller.broken() == set()


def test_a_call_that_a_group_refuses_while_it_ends_those_before_is_right() -> None:
    teller = whole()
    refused, accepted = teller.issue(), teller.begin_new()
    teller.settle(refused, "closed")
    wire = teller.wires
    teller.end(accepted, wire, 0)
    teller.run(accepted, wire, 1)
    teller.settle(accepted)
    teller.settle(teller.issue(), "closed")
    teller.close()

    assert teller.broken() == set()


def test_starts_that_failed_may_explain_why_a_group_gave_up() -> None:
    teller = whole(intensity=1)
    teller.die(0, stopped=(1,))
    teller.add(RanksNotStarted, group="g", ranks=((0, 2), (1, 2)), reason="no process")
    teller.add(GroupEnded, group="g", epoch=2, cause="give up")
    teller.add(DriverEnded, number=1, closed=True)

    assert teller.broken() == set()


@pytest.mark.parametrize("strategy", ["one_for_one", "rest_for_one"])
@pytest.mark.parametrize(
    "reason",
    [
        "hung: the ranks are out of step: rank 0 raised ValueError in 'm', rank 1 had not ended it",
        "the process group is broken: rank 1 raised RuntimeError: gloo in 'm'",
    ],
)
def test_ranks_that_are_out_of_step_are_all_restarted(strategy: str, reason: str) -> None:
    teller = whole(3, strategy=strategy)
    call = teller.issue(shape="single", rank=0)
    teller.begin(call, teller.send(call, 0), 0)
    teller.die(1, "restart ranks 0, 1, 2", stopped=(0, 2), reason=reason)
    teller.settle(call, "died")
    teller.start(0, 1, 2)
    teller.close()

    assert teller.broken() == set()

    teller = whole(3, strategy=strategy)
    teller.die(1, "restart rank 1", reason=reason)
    teller.start(1)
    teller.close()

    assert teller.broken() == {"strategy"}


@pytest.mark.parametrize("how", [{"strategy": "rest_for_one"}, {"survivors": "keep"}])
def test_ranks_that_got_no_process_have_others_restarted_with_them(how: dict[str, str]) -> None:
    teller = whole(3, **how)
    teller.die(2, "restart rank 2")
    teller.epoch += 1
    teller.incarnations[2] += 1
    teller.add(RankStarted, **teller.who(2), pid=2)
    teller.add(RanksNotStarted, group="g", ranks=((1, 2),), reason="no process")
    for rank in (1, 2):
        teller.add(RankExited, **teller.who(rank), pid=2, reason="shutdown")
    teller.start(1, 2)
    teller.close()

    assert teller.broken() == set()


def test_a_death_may_take_along_ranks_that_a_resize_has_added() -> None:
    teller = whole(strategy="rest_for_one")
    teller.add(ChangePlanned, group="g", world_size=3)
    for rank in range(2):
        teller.add(RankExited, **teller.who(rank), pid=1, reason="shutdown")
    teller.size = 3
    teller.incarnations[2] = 0
    teller.start(0, 1, 2)
    call = teller.issue(shape="single", rank=2)
    teller.begin(call, teller.send(call, 2), 2)
    teller.die(1, "restart ranks 1, 2", stopped=(2,))
    teller.settle(call, "died")
    teller.start(1, 2)
    teller.close()

    assert teller.broken() == set()


def test_a_rank_that_is_asked_to_end_may_take_its_time() -> None:
    teller = whole()
    victim = {"group": "g", "rank": 0, "incarnation": 1, "lethal": True}
    teller.add(FaultInjected, number=1, fault="term", target="0", **victim)
    teller.now += 11.0
    teller.restart()
    teller.close()

    assert teller.broken() == set()


def test_descriptors_that_are_opened_early_or_for_a_while_heap_up_nowhere() -> None:
    teller = whole()
    for turn in range(100):
        teller.descriptors = 20 if turn < 5 else 300 if turn % 10 == 3 else 200
        teller.serve()
    teller.close()

    assert teller.broken() == set()


def test_what_a_death_withdrew_was_not_passed_over() -> None:
    teller = whole(strategy="one_for_one")
    call = teller.issue()
    teller.send(call)  # no rank begins it
    teller.die(1)
    teller.start(1, meets=False, new_epoch=False)
    teller.serve()
    teller.run(call, teller.send(call))
    teller.settle(call)
    teller.close()

    assert teller.broken() == set()


@pytest.mark.parametrize("by", ["a death", "its caller"])
def test_a_call_behind_one_that_was_withdrawn_may_have_begun_unseen(by: str) -> None:
    teller = whole(strategy="one_for_one")
    withdrawn = teller.issue(seconds=0.0)
    teller.send(withdrawn)  # no rank begins it
    call = teller.issue(shape="single", rank=1)
    teller.send(call, 1)
    if by == "a death":
        teller.die(0)
        teller.start(0, meets=False, new_epoch=False)
    else:
        teller.settle(withdrawn, "timeout")
    teller.die(1)
    teller.settle(call, "died")
    teller.start(1, meets=False, new_epoch=False)
    if by == "a death":
        lies.again(teller, withdrawn)
    teller.close()

    assert teller.broken() == set()


def test_where_a_group_gives_up_no_call_is_made_again() -> None:
    teller = whole(intensity=0)
    call = teller.begin_new(retries=5)
    teller.die(0, "give up: more than 0 restarts in 60 s", stopped=(1,))
    teller.settle(call, "died")
    teller.add(GroupEnded, group="g", epoch=1, cause="give up")
    teller.add(DriverEnded, number=1, closed=True)

    assert teller.broken() == set()


def test_a_call_whose_caller_was_held_up_before_it_was_issued_is_not_a_later_one() -> None:
    teller = whole()
    teller.calls += 1
    held_up = teller.calls  # numbered, and not issued
    call = teller.begin_new(retries=1)
    teller.add(CallIssued, group="g", call=held_up, method="m", shape="collective")
    teller.restart()
    for each in (held_up, call):
        lies.again(teller, each)
    teller.close()

    assert teller.broken() == set()


# --- what is found ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("invariant", "lie"),
    [
        ("one_outcome", lies.lost_call),
        ("one_outcome", lies.two_outcomes),
        ("one_outcome", lies.outcome_of_no_call),
        ("at_most_once", lies.sent_again_though_begun),
        ("at_most_once", lies.retried_too_often),
        ("at_most_once", lies.delivered_twice),
        ("at_most_once", lies.run_by_a_rank_that_it_was_not_sent_to),
        ("at_least_once", lies.answered_and_never_run),
        ("at_least_once", lies.answered_before_it_had_run),
        ("sent_again", lies.retry_never_made),
        ("sent_again", lies.retry_counted_that_none_had_begun),
        ("sent_again", lies.failed_and_never_begun),
        ("sent_again", lies.sent_again_behind_a_later_one),
        ("nothing_lost", lies.passed_over),
        ("nothing_lost", lies.unsettled_call),
        ("one_order", lies.ranks_disagree_about_the_order),
        ("one_epoch", lies.one_sending_in_two_epochs),
        ("one_epoch", lies.answers_of_two_sendings),
        ("in_step", lies.went_on_without_the_other),
        ("in_step", lies.went_on_with_a_call_of_its_own),
        ("own_reply", lies.answer_of_another_call),
        ("own_reply", lies.answer_of_another_rank),
        ("own_reply", lies.answer_of_an_earlier_incarnation),
        ("own_reply", lies.item_of_a_stream_left_out),
        ("in_time", lies.out_of_time_too_early),
        ("in_time", lies.out_of_time_without_a_limit),
        ("in_time", lies.ended_long_after_its_deadline),
        ("with_cause", lies.told_of_a_death_that_was_none),
        ("with_cause", lies.told_of_a_death_without_a_report),
        ("with_cause", lies.told_of_the_death_before_it_was_sent),
        ("with_cause", lies.told_of_the_death_of_another),
        ("with_cause", lies.told_of_the_death_of_a_later_rank),
        ("with_cause", lies.told_of_an_end_that_was_none),
        ("with_cause", lies.told_of_an_end_that_came_later),
        ("strategy", lies.restarted_alone_though_all_are_tied),
        ("strategy", lies.restarted_without_a_cause),
        ("intensity", lies.went_on_past_its_intensity),
        ("intensity", lies.gave_up_too_early),
        ("death_first", lies.two_incarnations_at_once),
        ("death_first", lies.woke_beside_its_predecessor),
        ("death_first", lies.woke_of_a_process_older_than_the_end_of_its_predecessor),
        ("deaths_known", lies.end_nobody_learnt_of),
        ("deaths_known", lies.taken_for_dead),
        ("deaths_known", lies.death_known_late),
        ("fresh_rendezvous", lies.same_place_in_two_epochs),
        ("fresh_rendezvous", lies.two_places_in_one_epoch),
        ("heals", lies.never_healed),
        ("right_answers", lies.traffic_failed),
        ("nothing_left", lies.something_left),
        ("nothing_left", lies.descriptors_heap_up),
    ],
)
def test_a_lie_is_found_by_its_rule(invariant: str, lie: Callable[[Teller], None]) -> None:
    teller = whole(3 if lie is lies.told_of_the_death_of_a_later_rank else 2)
    lie(teller)
    teller.close()

    assert invariant in teller.broken()


def test_every_rule_has_a_name_and_every_name_a_rule() -> None:
    assert set(RULES) == set(INVARIANTS)


def test_a_violation_shows_the_fewest_records_and_the_seed() -> None:
    teller = whole()
    for _ in range(50):
        teller.serve()
    lies.sent_again_though_begun(teller)
    for _ in range(50):
        teller.serve()
    teller.close()

    (violation,) = check(teller.history())

    assert violation.invariant == "at_most_once"
    assert [record.kind for record in violation.events] == [
        *("CallIssued", "CallSent", "CallBegan"),
        *("CallSent", "CallBegan"),
    ]
    assert violation.render().endswith("reproduce with seed 7")


def test_a_history_twice_as_long_takes_twice_the_steps() -> None:
    def steps(deaths: int) -> int:
        teller = whole(strategy="one_for_one", intensity=1_000_000)
        for _ in range(deaths):
            calls = [teller.issue() for _ in range(3)]
            wires = [teller.send(call) for call in calls]
            teller.begin(calls[0], wires[0], 0)
            teller.die(0)
            for call in calls:
                teller.settle(call, "died")
            teller.start(0, meets=False, new_epoch=False)
        teller.close()
        history, count = teller.history(), 0

        def step(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal count
            count += event == "opcode"
            frame.f_trace_opcodes = True
            return step

        outer = sys.gettrace()
        sys.settrace(step)
        try:
            check(history)
        finally:
            sys.settrace(outer)
        return count

    assert steps(80) < 3 * steps(40)


def test_one_cause_is_not_told_a_thousand_times() -> None:
    teller = whole()
    for _ in range(1000):
        lies.lost_call(teller)
    teller.close()

    assert 0 < len(check(teller.history())) <= 20
