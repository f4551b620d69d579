from __future__ import annotations

import os
from typing import TYPE_CHECKING

from phalanx.runtime.evidence import OutOfMemoryCounter

if TYPE_CHECKING:
    from pathlib import Path


def counter_of(path: Path) -> OutOfMemoryCounter:
    counter = OutOfMemoryCounter()
    counter._path = path
    return counter


def test_a_rise_of_the_counter_is_evidence_for_one_death_only(tmp_path: Path) -> None:
    events = tmp_path / "memory.events"
    events.write_text("oom 3\noom_kill 5\noom_group_kill 9\n")
    counter = counter_of(events)
    before = counter.sample()
    assert counter.take(before) == ""

    events.write_text("oom 4\noom_kill 6\noom_group_kill 9\n")

    assert "rose to 6" in counter.take(before)
    assert counter.take(before) == ""


def test_what_rose_before_a_start_is_no_evidence(tmp_path: Path) -> None:
    events = tmp_path / "memory.events"
    events.write_text("oom_kill 5\n")
    counter = counter_of(events)
    events.write_text("oom_kill 8\n")

    assert counter.take(counter.sample()) == ""


def test_a_counter_that_cannot_be_read_is_no_evidence(tmp_path: Path) -> None:
    assert counter_of(tmp_path / "gone").take(0) == ""


def test_this_machine_has_a_counter() -> None:
    counter = OutOfMemoryCounter()

    assert os.access(counter._path, os.R_OK)
    assert counter.sample() >= 0
