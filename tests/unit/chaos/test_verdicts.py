"""What a result says of its run, by value: whether it shows anything, and in which words."""

from __future__ import annotations

from tests.support.histories import Teller, whole

from phalanx.chaos import Chaos, ChaosResult, Schedule, ScheduledFault, render_page
from phalanx.chaos.checker.checker import check
from phalanx.chaos.history.events import (
    FaultInjected,
    FaultMissed,
    GroupBuilt,
    GroupEnded,
    WorkloadFailed,
)

KILL = ScheduledFault(number=1, at=0.5, fault="kill")
STRUCK = {"number": 1, "fault": "kill", "target": "0", "group": "g"}


def result(teller: Teller, *strikes: ScheduledFault, interrupted: bool = False) -> ChaosResult:
    plan = Chaos(duration=5.0, seed=7, schedule=Schedule(strikes))
    history = teller.history()
    return ChaosResult("mine", plan, history, check(history), interrupted=interrupted)


def test_a_run_whose_faults_all_missed_is_not_ok_and_says_why() -> None:
    teller = whole()
    strike = {"fault": "kill", "target": "store", "why": "there was no store process"}
    for number in (1, 2):
        teller.add(FaultMissed, number=number, **strike)
    teller.close()

    missed = result(teller, KILL)

    assert missed.violations == ()
    assert not missed.ok
    assert "missed     2 kill: there was no store process" in missed.render()
    assert missed.render().endswith("INCONCLUSIVE: none of the 1 faults could be injected")
    assert "there was no store process" in render_page(missed)
    assert "INCONCLUSIVE: none of the 1 faults" in render_page(missed)


def test_a_run_that_was_cut_before_its_first_fault_says_so() -> None:
    teller = whole()
    teller.close()

    cut = result(teller, KILL, interrupted=True)

    assert not cut.ok
    assert cut.render().endswith("before the first fault was injected (interrupted)")


def test_a_run_without_a_call_but_its_own_is_not_ok() -> None:
    teller = Teller()
    teller.start(0, 1)
    teller.add(FaultInjected, **STRUCK)
    teller.serve(shape="gather", method="_ping")
    teller.close()

    idle = result(teller, KILL)

    assert idle.violations == ()
    assert not idle.ok
    assert idle.inconclusive == "its traffic made no call"


def test_a_run_with_a_fault_and_a_call_shows_something_and_so_does_one_of_calls_alone() -> None:
    alone = whole()
    alone.close()
    struck = whole()
    struck.add(FaultInjected, **STRUCK)
    struck.close()

    assert result(alone).ok
    assert result(struck, KILL).ok


def test_the_table_says_how_many_groups_were_built_and_gave_up() -> None:
    teller = whole(intensity=0)
    teller.die(0, decision="give up", stopped=(1,))
    teller.add(GroupEnded, group="g", epoch=1, cause="too many")
    once = result(teller).render()
    about = {"strategy": "one_for_all", "intensity": 0, "period": 60.0}
    teller.add(GroupBuilt, group="h", world_size=2, **about)

    assert "groups     1 built, 1 gave up" in once
    assert "groups     2 built, 1 gave up" in result(teller).render()


def test_control_characters_of_a_worker_do_nothing_to_a_terminal() -> None:
    teller = whole()
    teller.add(WorkloadFailed, error="ValueError: \x1b]0;mine\x07\rgone", trace="\x1b[2J\nagain")
    teller.close()

    told = result(teller).render()

    assert "\\x1b]0;mine\\x07\\x0dgone" in told
    assert not {"\x1b", "\x07", "\r"} & set(told)
