"""What `bench kill` says of a system is what became of it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from benchmarks.harness.subprocess_driver import link_package
from benchmarks.harness.venvs import Environments
from benchmarks.kill import scenarios
from benchmarks.kill.subject import Outcome, Victim
from benchmarks.kill.systems import SYSTEMS

pytestmark = pytest.mark.usefixtures("phalanx_leak_check")


def test_a_killed_rank_and_then_a_killed_driver_are_told_as_they_were(tmp_path: Path) -> None:
    link_package(tmp_path)
    retrying = next(system for system in SYSTEMS if system.setting == "retries=10")
    with Victim(retrying, sys.executable, tmp_path, 2, 20.0) as victim:
        at_work = victim.kill_in_flight()
        idle = victim.kill_idle()
        driver = victim.kill_driver()

    assert at_work.got == "2 answers"
    assert (at_work.began, at_work.ended, at_work.failed) == (4, 3, 0)
    assert at_work.knows is not None
    assert at_work.works is not None
    assert at_work.works > at_work.knows > 2.0  # the call was made again, and takes that long
    assert idle.works is not None
    assert idle.failed == 0
    assert driver.gone is not None
    assert driver.left == victim.close() == []


def test_a_rank_that_had_ended_before_its_kill_ends_no_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def strike(victim: Victim) -> Outcome:
        raise ProcessLookupError(victim.version)

    gone, idle = scenarios.Scenario("gone", "", strike), scenarios.SCENARIOS[1]
    monkeypatch.setattr(scenarios, "SCENARIOS", (gone, idle))
    monkeypatch.setattr(scenarios, "SYSTEMS", SYSTEMS[:1])

    plan = scenarios.Plan(ranks=1, times=1)
    (broken, whole), code = scenarios.measure(plan, Environments())

    assert code == 0
    assert broken.why.startswith("broke: ProcessLookupError")
    assert (whole.why, len(whole.outcomes), whole.left) == ("", 1, [])
