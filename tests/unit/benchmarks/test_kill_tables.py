"""What is said of systems that were killed."""

from __future__ import annotations

from benchmarks.kill.scenarios import SCENARIOS, Fate
from benchmarks.kill.subject import Outcome
from benchmarks.kill.systems import SYSTEMS
from benchmarks.recovery_peers import peers_text


def test_a_system_without_calls_is_not_said_to_have_left_one_unanswered() -> None:
    at_work, idle = SCENARIOS[:2]
    system = next(each for each in SYSTEMS if not each.calls)
    fates = [Fate(system, at_work, outcomes=[Outcome(works=3.0)]), Fate(system, idle, why="absent")]

    for there in (fates, fates[:1]):  # Ctrl-C came between the two
        row = peers_text(there).splitlines()[-1].split("|")
        assert [cell.strip() for cell in row[2:4]] == ["", "3.00 (3.00 to 3.00) s"]
