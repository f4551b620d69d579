"""What a history may lie about: each puts one lie into what a `Teller` has told."""

from __future__ import annotations

from tests.support.histories import Teller

from phalanx.chaos.history.events import (
    CallIssued,
    CallSettled,
    FaultInjected,
    GroupBuilt,
    GroupEnded,
    LeakFound,
    RankExited,
    RankStarted,
    SteadyStateChecked,
    WorkerStarted,
    WorkloadFailed,
)


def lost_call(teller: Teller) -> None:
    teller.send(teller.issue())


def two_outcomes(teller: Teller) -> None:
    teller.settle(teller.serve())


def outcome_of_no_call(teller: Teller) -> None:
    teller.settle(99, "died")


def sent_again_though_begun(teller: Teller) -> None:
    call = teller.begin_new()
    teller.restart()
    again(teller, call)


def retried_too_often(teller: Teller) -> None:
    call = teller.issue(retries=1)
    for _ in range(2):
        teller.begin(call, teller.send(call), 0)
        teller.restart()
    teller.begin(call, teller.send(call), 0)
    teller.settle(call, "died")


def run_by_a_rank_that_it_was_not_sent_to(teller: Teller) -> None:
    call = teller.issue(shape="single", rank=0)
    teller.run(call, teller.send(call, 0))
    teller.settle(call)


def delivered_twice(teller: Teller) -> None:
    call = teller.issue(retries=3)
    wire = teller.send(call)
    teller.run(call, wire, 0, 1, 1)
    teller.settle(call)


def answered_and_never_run(teller: Teller) -> None:
    call = teller.issue()
    wire = teller.send(call)
    teller.run(call, wire, 0)
    teller.settle(call)


def ranks_disagree_about_the_order(teller: Teller) -> None:
    one, two = teller.issue(), teller.issue()
    wires = {one: teller.send(one), two: teller.send(two)}
    for rank, order in ((0, (one, two)), (1, (two, one))):
        for call in order:
            teller.run(call, wires[call], rank)
    teller.settle(one)
    teller.settle(two)


def one_sending_in_two_epochs(teller: Teller) -> None:
    call = teller.issue()
    wire = teller.send(call)
    teller.begin(call, wire, 0)
    teller.begin(call, wire, 1, epoch=2)
    teller.settle(call, "died")


def answers_of_two_sendings(teller: Teller) -> None:
    call = teller.issue(retries=1)
    first = teller.send(call)
    second = teller.send(call)
    teller.run(call, first, 0)
    teller.run(call, second, 0, 1)
    teller.settle(call)
    teller.take(call, first, 0)
    teller.take(call, second, 1)


def answer_of_another_call(teller: Teller) -> None:
    call = teller.serve()
    teller.take(call, teller.wires, 1, by_call=call - 1)


def answer_of_another_rank(teller: Teller) -> None:
    teller.take(teller.serve(), teller.wires, 1, by_rank=0)


def answer_of_an_earlier_incarnation(teller: Teller) -> None:
    teller.take(teller.serve(), teller.wires, 1, by_incarnation=0)


def item_of_a_stream_left_out(teller: Teller) -> None:
    call = teller.serve()
    for item in (0, 2):
        teller.take(call, teller.wires, 1, by_item=item)


def out_of_time_too_early(teller: Teller) -> None:
    call = teller.begin_new(seconds=3.0)
    teller.settle(call, "timeout")


def out_of_time_without_a_limit(teller: Teller) -> None:
    teller.settle(teller.issue(), "timeout")


def ended_long_after_its_deadline(teller: Teller) -> None:
    call = teller.issue(seconds=3.0)
    teller.now += 30.0
    teller.settle(call, "timeout")


def told_of_a_death_that_was_none(teller: Teller) -> None:
    """Deaths come before and after, as they do all the time in a run."""
    teller.restart()
    call = teller.begin_new()
    teller.settle(call, "died", deaths=((1, 2),))
    teller.restart()


def told_of_a_death_without_a_report(teller: Teller) -> None:
    call = teller.begin_new()
    teller.die(0, stopped=(1,))
    teller.settle(call, "died", deaths=())
    teller.start(0, 1)


def told_of_the_death_before_it_was_sent(teller: Teller) -> None:
    teller.restart()
    call = teller.begin_new()
    teller.settle(call, "died")


def told_of_the_death_of_another(teller: Teller) -> None:
    """Under one_for_one: under another strategy that death takes the rank as well."""
    teller.add(GroupBuilt, group="g", world_size=2, strategy="one_for_one", intensity=3, period=60)
    call = teller.issue(shape="single", rank=0)
    teller.begin(call, teller.send(call, 0), 0)
    teller.die(1, "restart rank 1")
    teller.settle(call, "died")
    teller.start(1, meets=False, new_epoch=False)


def told_of_the_death_of_a_later_rank(teller: Teller) -> None:
    """Under rest_for_one, which restarts two ranks and keeps the one that the call was sent to."""
    built = {"group": "g", "world_size": 3, "intensity": 3, "period": 60.0}
    teller.add(GroupBuilt, strategy="rest_for_one", **built)
    call = teller.issue(shape="single", rank=0)
    teller.begin(call, teller.send(call, 0), 0)
    teller.die(1, "restart ranks 1, 2", stopped=(2,))
    teller.settle(call, "died")
    teller.start(1, 2)


def told_of_an_end_that_was_none(teller: Teller) -> None:
    teller.add(GroupBuilt, group="h", world_size=1, strategy="one_for_all", intensity=3, period=1.0)
    what = {"method": "m", "shape": "collective"}
    teller.add(CallIssued, group="h", call=99, **what)
    teller.add(CallSettled, group="h", call=99, outcome="closed")


def told_of_an_end_that_came_later(teller: Teller) -> None:
    teller.settle(teller.issue(), "closed")
    teller.serve()


def restarted_alone_though_all_are_tied(teller: Teller) -> None:
    teller.die(1)
    teller.start(1)


def restarted_without_a_cause(teller: Teller) -> None:
    teller.add(RankExited, **teller.who(0), pid=1, reason="shutdown")
    teller.start(0)


def went_on_past_its_intensity(teller: Teller) -> None:
    for _ in range(4):
        teller.now += 1.0
        teller.die(0, stopped=(1,))
        teller.now += 1.0
        teller.start(0, 1)


def gave_up_too_early(teller: Teller) -> None:
    teller.die(0, "give up", stopped=(1,))
    teller.add(GroupEnded, group="g", epoch=1, cause="give up")


def two_incarnations_at_once(teller: Teller) -> None:
    teller.start(0, 1)


def woke_beside_its_predecessor(teller: Teller) -> None:
    teller.restart()
    teller.add(WorkerStarted, **teller.who(0), pid=2, outlived=(1001,))


def woke_of_a_process_older_than_the_end_of_its_predecessor(teller: Teller) -> None:
    teller.restart()
    teller.add(WorkerStarted, **teller.who(0), pid=2, age=0.5)


def end_nobody_learnt_of(teller: Teller) -> None:
    teller.events = [r for r in teller.events if not isinstance(r, RankExited)]
    teller.add(RankStarted, group="g", rank=7, incarnation=1, epoch=1, pid=7)


def taken_for_dead(teller: Teller) -> None:
    call = teller.issue()
    wire = teller.send(call)
    teller.die(0, stopped=(1,))
    teller.begin(call, wire, 0)
    teller.settle(call, "died")
    teller.start(0, 1)


def death_known_late(teller: Teller) -> None:
    teller.add(
        FaultInjected,
        number=1,
        fault="kill",
        target="0",
        group="g",
        rank=0,
        incarnation=1,
        lethal=True,
    )
    teller.now += 11.0
    teller.restart()


def same_place_in_two_epochs(teller: Teller) -> None:
    teller.restart()
    teller.add(WorkerStarted, **teller.who(0), pid=2, rendezvous="127.0.0.1:7001", kept=True)


def two_places_in_one_epoch(teller: Teller) -> None:
    teller.add(WorkerStarted, **teller.who(0), pid=2, rendezvous="127.0.0.1:7999", kept=True)


def never_healed(teller: Teller) -> None:
    teller.add(SteadyStateChecked, group="g", ok=False, detail="it was not whole after 60 s")


def traffic_failed(teller: Teller) -> None:
    teller.add(WorkloadFailed, error="AssertionError: 4 != 5")


def something_left(teller: Teller) -> None:
    teller.add(LeakFound, what="process", name="4711 sleep 600")


def descriptors_heap_up(teller: Teller) -> None:
    for count in range(100):
        teller.descriptors = 20 + count
        teller.serve()


def went_on_without_the_other(teller: Teller, *, joined: bool = True) -> None:
    """Rank 0 raises, and begins the next call before rank 1 has ended the first."""
    calls = [teller.issue() for _ in range(2)]
    first, second = [teller.send(call) for call in calls]
    for rank in (0, 1):
        teller.begin(calls[0], first, rank)
    teller.end(calls[0], first, 0, "ValueError", joined=joined)
    teller.begin(calls[1], second, 0)
    teller.end(calls[0], first, 1)
    teller.settle(calls[0], "error")
    teller.begin(calls[1], second, 1)
    for rank in (0, 1):
        teller.end(calls[1], second, rank)
    teller.settle(calls[1])
    for rank in (0, 1):
        teller.take(calls[1], second, rank)


def went_on_with_a_call_of_its_own(teller: Teller) -> None:
    """Rank 0 raises, and begins a call to it alone before rank 1 has ended the first."""
    first, own = teller.issue(), teller.issue(shape="single", rank=0)
    wires = teller.send(first), teller.send(own, 0)
    for rank in (0, 1):
        teller.begin(first, wires[0], rank)
    teller.end(first, wires[0], 0, "ValueError", joined=True)
    teller.run(own, wires[1], 0)
    teller.end(first, wires[0], 1)
    teller.settle(first, "error")
    teller.settle(own)


def passed_over(teller: Teller) -> None:
    """Rank 1 never hears of a call, and runs the next."""
    lost = teller.issue(retries=1)
    wire = teller.send(lost)
    teller.run(lost, wire, 0)
    teller.serve()
    teller.restart()
    again(teller, lost)


def unsettled_call(teller: Teller) -> None:
    """Both ranks answer a call that is made again for want of these answers."""
    lost = teller.issue(retries=1)
    wire = teller.send(lost)
    teller.run(lost, wire)
    teller.serve()
    teller.restart()
    again(teller, lost)


def again(teller: Teller, call: int) -> None:
    wire = teller.send(call)
    teller.run(call, wire)
    teller.settle(call)


def retry_never_made(teller: Teller) -> None:
    call = teller.begin_new(retries=2)
    teller.die(0, stopped=(1,))
    teller.settle(call, "died")
    teller.start(0, 1)


def retry_counted_that_none_had_begun(teller: Teller) -> None:
    """A call waits behind another at the first death, and has begun at the second."""
    first, second = (teller.issue(retries=1) for _ in range(2))
    wire = teller.send(first)
    teller.send(second)
    for rank in (0, 1):
        teller.begin(first, wire, rank)
    teller.restart()
    again(teller, first)
    teller.begin(second, teller.send(second), 0)
    teller.die(0, stopped=(1,))
    teller.settle(second, "died")
    teller.start(0, 1)


def failed_and_never_begun(teller: Teller) -> None:
    """Each rank dies in a call, and another that had waited behind it fails as well."""
    first, second = teller.issue(), teller.issue()
    wire = teller.send(first)
    teller.send(second)
    for rank in (0, 1):
        teller.begin(first, wire, rank)
    teller.die(0, stopped=(1,))
    teller.settle(first, "died")
    teller.settle(second, "died")
    teller.start(0, 1)


def sent_again_behind_a_later_one(teller: Teller) -> None:
    call = teller.begin_new(retries=1)
    teller.restart()
    teller.serve()
    again(teller, call)


def answered_before_it_had_run(teller: Teller) -> None:
    call = teller.issue()
    wire = teller.send(call)
    for rank in (0, 1):
        teller.begin(call, wire, rank)
    teller.end(call, wire, 0)
    teller.settle(call)
    teller.end(call, wire, 1)
