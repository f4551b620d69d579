"""The checker, by value: what it accepts, and what it finds in histories that lie."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from phalanx.chaos import (
    INVARIANTS,
    RULES,
    History,
    Journal,
    Record,
    check,
    read_history,
    record_of,
)
from phalanx.chaos.call_records import Issued, Sent, Settled, Taken
from phalanx.chaos.group_records import (
    ChangePlanned,
    GroupBuilt,
    GroupDown,
    GroupEnded,
    GroupUp,
    NotStarted,
    RankDied,
    RankExited,
    RankReady,
    RankStarted,
)
from phalanx.chaos.referee_records import Complained, Examined, Left, LifeBegan, LifeEnded, Struck
from phalanx.chaos.worker_records import Began, Ended, Woke


class Teller:
    """Writes the history of a group that does everything right, in the order of the calls made."""

    def __init__(self, size: int = 2, **options: Any) -> None:
        self.records: list[Record] = []
        self.size = size
        self.now = 0.0
        self.calls = 0
        self.wires = 0
        self.epoch = 0
        self.incarnations = dict.fromkeys(range(size), 0)
        self.turns: dict[tuple[int, int], int] = {}
        self.add(LifeBegan, life=1, pid=100)
        built = {"strategy": "one_for_all", "intensity": 3, "period": 60.0, **options}
        self.add(GroupBuilt, group="g", world_size=size, **built)

    def add(self, kind: type[Record], **fields: Any) -> Any:
        self.now += 0.01
        record = kind(**{"at": self.now, **fields})
        self.records.append(record)
        return record

    def who(self, rank: int) -> dict[str, Any]:
        incarnation = self.incarnations[rank]
        return {"group": "g", "rank": rank, "incarnation": incarnation, "epoch": self.epoch}

    def start(self, *ranks: int, meets: bool = True, new_epoch: bool = True) -> None:
        self.epoch += new_epoch
        for rank in ranks:
            self.incarnations[rank] += 1
            self.add(RankStarted, **self.who(rank), pid=self.pid(rank))
        for rank in ranks:
            place = f"127.0.0.1:{7000 + self.epoch}" if meets else ""
            self.add(Woke, **self.who(rank), pid=self.pid(rank), rendezvous=place)
        for rank in ranks:
            self.add(RankReady, **self.who(rank), pid=self.pid(rank))
        self.add(GroupUp, group="g", epoch=self.epoch, world_size=self.size)

    def pid(self, rank: int) -> int:
        return 1000 + 100 * rank + self.incarnations[rank]

    def die(self, rank: int, decision: str = "restart", stopped: tuple[int, ...] = ()) -> None:
        who = {**self.who(rank), "pid": self.pid(rank)}
        self.add(RankExited, **who, reason="killed")
        self.add(RankDied, **who, reason="killed", decision=decision)
        self.add(GroupDown, group="g", epoch=self.epoch, cause="a death")
        for other in stopped:
            self.add(RankExited, **self.who(other), pid=self.pid(other), reason="shutdown")

    def issue(self, on_death: str = "fail", shape: str = "collective", **more: Any) -> int:
        self.calls += 1
        what = {"method": "m", "shape": shape, "on_death": on_death, **more}
        self.add(Issued, group="g", call=self.calls, **what)
        return self.calls

    def send(self, call: int, *ranks: int) -> int:
        self.wires += 1
        to = tuple((rank, self.incarnations[rank]) for rank in ranks or range(self.size))
        self.add(Sent, group="g", call=call, wire=self.wires, epoch=self.epoch, ranks=to)
        return self.wires

    def begin(self, call: int, wire: int, rank: int, **other: Any) -> None:
        key = rank, self.incarnations[rank]
        self.turns[key] = self.turns.get(key, 0) + 1
        fields = {**self.who(rank), "call": call, "wire": wire, "turn": self.turns[key]}
        self.add(Began, **{**fields, **other})

    def end(self, call: int, wire: int, rank: int, error: str = "") -> None:
        self.add(Ended, **self.who(rank), call=call, wire=wire, error=error)

    def take(self, call: int, wire: int, rank: int, **other: Any) -> None:
        said = {"by_call": call, "by_rank": rank, "by_wire": wire}
        said["by_incarnation"] = self.incarnations[rank]
        self.add(Taken, group="g", call=call, rank=rank, **{**said, **other})

    def settle(self, call: int, outcome: str = "value") -> None:
        self.add(Settled, group="g", call=call, outcome=outcome)

    def serve(self, on_death: str = "fail", **more: Any) -> int:
        call = self.issue(on_death, **more)
        wire = self.send(call)
        for rank in range(self.size):
            self.begin(call, wire, rank)
            self.end(call, wire, rank)
        self.settle(call)
        for rank in range(self.size):
            self.take(call, wire, rank)
        return call

    def close(self) -> None:
        self.add(Examined, group="g", ok=True)
        for rank in self.incarnations:
            self.add(RankExited, **self.who(rank), pid=self.pid(rank), reason="shutdown")
        self.add(GroupEnded, group="g", epoch=self.epoch, cause="")
        self.add(LifeEnded, life=1, closed=True)

    def history(self) -> History:
        return History.of(self.records, seed=7)

    def broken(self) -> set[str]:
        return {violation.invariant for violation in check(self.history())}


def whole(size: int = 2, **options: Any) -> Teller:
    teller = Teller(size, **options)
    teller.start(*range(size))
    teller.serve()
    return teller


# --- what is accepted ---------------------------------------------------------------------


def test_a_run_in_which_all_went_well_holds_every_invariant() -> None:
    teller = whole(3)
    call = teller.issue("retry", retries=1)
    wire = teller.send(call)
    teller.begin(call, wire, 0)
    teller.add(Struck, strike=1, fault="kill", target="1", rank=1, group="g", incarnation=1)
    teller.die(1, stopped=(0, 2))
    teller.start(0, 1, 2)
    wire = teller.send(call)
    for rank in range(3):
        teller.begin(call, wire, rank)
        teller.end(call, wire, rank)
    teller.settle(call)
    for rank in range(3):
        teller.take(call, wire, rank)
    teller.serve(shape="gather")
    teller.close()

    assert check(teller.history()) == ()


def test_a_call_that_failed_with_a_death_is_an_outcome() -> None:
    teller = whole()
    call = teller.issue()
    teller.begin(call, teller.send(call), 0)
    teller.die(1, stopped=(0,))
    teller.settle(call, "died")
    teller.start(0, 1)
    teller.close()

    assert teller.broken() == set()


def test_what_a_killed_driver_owed_is_excused() -> None:
    teller = whole()
    teller.send(teller.issue())
    teller.add(LifeEnded, life=1, closed=False)

    assert teller.broken() == set()


def test_a_rank_restarted_alone_under_one_for_one_is_right() -> None:
    teller = whole(strategy="one_for_one")
    teller.die(1)
    teller.start(1, meets=False, new_epoch=False)
    teller.serve()
    teller.close()

    assert teller.broken() == set()


def test_survivors_that_are_kept_are_right() -> None:
    teller = whole(3, survivors="keep")
    teller.die(1)
    teller.start(1)
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
    teller.add(Examined, group="g", ok=False, ended=True)
    teller.add(LifeEnded, life=1, closed=True)

    assert teller.broken() == set()


def test_starts_that_failed_may_explain_why_a_group_gave_up() -> None:
    teller = whole(intensity=1)
    teller.die(0, stopped=(1,))
    teller.add(NotStarted, group="g", ranks=((0, 2), (1, 2)), reason="no process")
    teller.add(GroupEnded, group="g", epoch=2, cause="give up")
    teller.add(LifeEnded, life=1, closed=True)

    assert teller.broken() == set()


# --- what is found ------------------------------------------------------------------------


def lost_call(teller: Teller) -> None:
    teller.send(teller.issue())


def two_outcomes(teller: Teller) -> None:
    teller.settle(teller.serve())


def outcome_of_no_call(teller: Teller) -> None:
    teller.settle(99, "died")


def sent_again_though_begun(teller: Teller) -> None:
    call = teller.issue("fail")
    teller.begin(call, teller.send(call), 0)
    teller.die(0, stopped=(1,))
    teller.start(0, 1)
    wire = teller.send(call)
    for rank in (0, 1):
        teller.begin(call, wire, rank)
        teller.end(call, wire, rank)
    teller.settle(call)


def retried_too_often(teller: Teller) -> None:
    call = teller.issue("retry", retries=1)
    for _ in range(2):
        teller.begin(call, teller.send(call), 0)
        teller.die(0, stopped=(1,))
        teller.start(0, 1)
    teller.begin(call, teller.send(call), 0)
    teller.settle(call, "died")


def delivered_twice(teller: Teller) -> None:
    call = teller.issue("retry", retries=3)
    wire = teller.send(call)
    for rank in (0, 1, 1):
        teller.begin(call, wire, rank)
        teller.end(call, wire, rank)
    teller.settle(call)


def answered_and_never_run(teller: Teller) -> None:
    call = teller.issue()
    wire = teller.send(call)
    teller.begin(call, wire, 0)
    teller.end(call, wire, 0)
    teller.settle(call)


def ranks_disagree_about_the_order(teller: Teller) -> None:
    one, two = teller.issue(), teller.issue()
    wires = {one: teller.send(one), two: teller.send(two)}
    for rank, order in ((0, (one, two)), (1, (two, one))):
        for call in order:
            teller.begin(call, wires[call], rank)
            teller.end(call, wires[call], rank)
    teller.settle(one)
    teller.settle(two)


def one_sending_in_two_epochs(teller: Teller) -> None:
    call = teller.issue()
    wire = teller.send(call)
    teller.begin(call, wire, 0)
    teller.begin(call, wire, 1, epoch=2)
    teller.settle(call, "died")


def answers_of_two_sendings(teller: Teller) -> None:
    call = teller.issue("retry", retries=1)
    first = teller.send(call)
    second = teller.send(call)
    for rank, wire in ((0, first), (0, second), (1, second)):
        teller.begin(call, wire, rank)
        teller.end(call, wire, rank)
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
    call = teller.issue(seconds=3.0)
    teller.begin(call, teller.send(call), 0)
    teller.settle(call, "timeout")


def out_of_time_without_a_limit(teller: Teller) -> None:
    teller.settle(teller.issue(), "timeout")


def ended_long_after_its_deadline(teller: Teller) -> None:
    call = teller.issue(seconds=3.0)
    teller.now += 30.0
    teller.settle(call, "timeout")


def told_of_a_death_that_was_none(teller: Teller) -> None:
    teller.settle(teller.issue(), "died")
    teller.now += 60.0


def told_of_the_death_of_another(teller: Teller) -> None:
    teller.settle(teller.issue(shape="single", rank=0), "died")
    teller.die(1)
    teller.now += 60.0


def told_of_an_end_that_was_none(teller: Teller) -> None:
    teller.add(GroupBuilt, group="h", world_size=1, strategy="one_for_all", intensity=3, period=1.0)
    what = {"method": "m", "shape": "collective", "on_death": "fail"}
    teller.add(Issued, group="h", call=99, **what)
    teller.add(Settled, group="h", call=99, outcome="closed")


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
    teller.die(0, stopped=(1,))
    teller.start(0, 1)
    teller.add(Woke, **teller.who(0), pid=2, outlived=(1001,))


def end_nobody_learnt_of(teller: Teller) -> None:
    teller.records = [r for r in teller.records if not isinstance(r, RankExited)]
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
        Struck, strike=1, fault="kill", target="0", group="g", rank=0, incarnation=1, lethal=True
    )
    teller.now += 11.0
    teller.die(0, stopped=(1,))
    teller.start(0, 1)


def same_place_in_two_epochs(teller: Teller) -> None:
    teller.die(0, stopped=(1,))
    teller.start(0, 1)
    teller.add(Woke, **teller.who(0), pid=2, rendezvous="127.0.0.1:7001", kept=True)


def two_places_in_one_epoch(teller: Teller) -> None:
    teller.add(Woke, **teller.who(0), pid=2, rendezvous="127.0.0.1:7999", kept=True)


def never_healed(teller: Teller) -> None:
    teller.add(Examined, group="g", ok=False, detail="it was not whole after 60 s")


def traffic_complained(teller: Teller) -> None:
    teller.add(Complained, error="AssertionError: 4 != 5")


def something_left(teller: Teller) -> None:
    teller.add(Left, what="process", name="4711 sleep 600")


@pytest.mark.parametrize(
    ("invariant", "lie"),
    [
        ("one_outcome", lost_call),
        ("one_outcome", two_outcomes),
        ("one_outcome", outcome_of_no_call),
        ("at_most_once", sent_again_though_begun),
        ("at_most_once", retried_too_often),
        ("at_most_once", delivered_twice),
        ("at_least_once", answered_and_never_run),
        ("one_order", ranks_disagree_about_the_order),
        ("one_epoch", one_sending_in_two_epochs),
        ("one_epoch", answers_of_two_sendings),
        ("own_reply", answer_of_another_call),
        ("own_reply", answer_of_another_rank),
        ("own_reply", answer_of_an_earlier_incarnation),
        ("own_reply", item_of_a_stream_left_out),
        ("in_time", out_of_time_too_early),
        ("in_time", out_of_time_without_a_limit),
        ("in_time", ended_long_after_its_deadline),
        ("with_cause", told_of_a_death_that_was_none),
        ("with_cause", told_of_the_death_of_another),
        ("with_cause", told_of_an_end_that_was_none),
        ("strategy", restarted_alone_though_all_are_tied),
        ("strategy", restarted_without_a_cause),
        ("intensity", went_on_past_its_intensity),
        ("intensity", gave_up_too_early),
        ("death_first", two_incarnations_at_once),
        ("death_first", woke_beside_its_predecessor),
        ("deaths_known", end_nobody_learnt_of),
        ("deaths_known", taken_for_dead),
        ("deaths_known", death_known_late),
        ("fresh_rendezvous", same_place_in_two_epochs),
        ("fresh_rendezvous", two_places_in_one_epoch),
        ("heals", never_healed),
        ("right_answers", traffic_complained),
        ("nothing_left", something_left),
    ],
)
def test_a_lie_is_found_by_its_rule(invariant: str, lie: Callable[[Teller], None]) -> None:
    teller = whole()
    lie(teller)
    teller.close()

    assert invariant in teller.broken()


def test_every_rule_has_a_name_and_every_name_a_rule() -> None:
    assert set(RULES) == set(INVARIANTS)


def test_a_violation_shows_the_fewest_records_and_the_seed() -> None:
    teller = whole()
    for _ in range(50):
        teller.serve()
    sent_again_though_begun(teller)
    for _ in range(50):
        teller.serve()
    teller.close()

    (violation,) = check(teller.history())

    assert violation.invariant == "at_most_once"
    assert [record.kind for record in violation.records] == [
        *("issued", "sent", "began"),
        *("sent", "began"),
    ]
    assert violation.render().endswith("again with seed 7")


def test_one_cause_is_not_told_a_thousand_times() -> None:
    teller = whole()
    for _ in range(1000):
        lost_call(teller)
    teller.close()

    assert 0 < len(check(teller.history())) <= 20


def test_every_record_survives_the_way_to_a_file_and_back() -> None:
    teller = whole(3)
    sent_again_though_begun(teller)
    teller.add(NotStarted, group="g", ranks=((0, 2), (1, 2)), reason="no process")
    teller.close()

    again = [record_of(record.to_json()) for record in teller.records]

    assert again == teller.records
    assert again != [replace(record, at=0.0) for record in teller.records]


@pytest.mark.parametrize("text", ["[]", "7", '{"kind": "nonsense"}', '{"kind": "left", "at": 1}'])
def test_a_line_that_is_no_record_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a record"):
        record_of(text)


def test_a_history_is_read_from_the_files_of_all_who_wrote_it(tmp_path: Path) -> None:
    teller = whole()
    teller.close()
    (tmp_path / "effects").mkdir()
    driver, worker = Journal(tmp_path, "driver"), Journal(tmp_path / "effects", "0-1")
    for record in teller.records:
        late = replace(record, at=record.at + 1000.0)
        (worker if isinstance(record, Began | Ended | Woke) else driver).write(late)
    driver.close()
    worker.close()

    history = read_history(tmp_path, seed=3)

    assert [record.kind for record in history.records] == [r.kind for r in teller.records]
    assert history.records[0].at == 0.0
    assert check(history) == ()


def test_a_line_cut_short_by_its_writers_death_is_left_out(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "driver")
    journal.write(LifeBegan(at=5.0, life=1, pid=1))
    journal.close()
    with open(tmp_path / "driver.jsonl", "a") as file:
        file.write('{"kind": "left", "at"')

    assert len(read_history(tmp_path).records) == 1


def test_a_journal_goes_on_when_its_descriptor_was_closed_by_a_fault(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "worker")
    os.close(journal._fd)

    journal.write(LifeBegan(at=5.0, life=1, pid=1))

    journal.close()
    assert journal.problem is None
    assert len(read_history(tmp_path).records) == 1
