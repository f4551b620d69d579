"""What is taken for left behind by a run, and what for another program's."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.chaos import footprint
from phalanx.chaos.footprint import Footprint

OURS = 4819  # a process of the run


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for temporary files that other programs use too."""
    monkeypatch.setattr(footprint, "_folders", lambda: [tmp_path])
    monkeypatch.setattr(footprint, "_PATIENCE", 0.1)
    return tmp_path


def left(before: Footprint, made: set[Path] | None = None) -> list[str]:
    found = before.left(set(), {OURS}, made or set(), own=False)
    return [Path(each.name).name for each in found]


@pytest.mark.parametrize(
    "name", [f"phalanx-0-{OURS}-61723848", f"torch_{OURS}_17", f"sem.{OURS}", "phalanx"]
)
def test_a_new_file_that_is_named_for_a_process_of_the_run_was_left(
    shared: Path, name: str
) -> None:
    before = Footprint.now()

    (shared / name).touch()

    assert left(before) == [name]


@pytest.mark.parametrize(
    "name",
    [
        "1b6c145a-c36c-4819-b744-4991ce1c90b8",
        "tmp4819ab",
        "x4819",
        "48190",
        "phalanx-0-7777-4819",
        "report.txt",
    ],
)
def test_a_new_file_that_only_looks_like_it_is_another_programs(shared: Path, name: str) -> None:
    before = Footprint.now()

    (shared / name).touch()

    assert left(before) == []


def test_a_file_that_the_run_was_seen_to_make_was_left_whatever_its_name(shared: Path) -> None:
    before = Footprint.now()
    (shared / "old").touch()
    (shared / "anything").touch()

    assert left(before, {shared / "anything"}) == ["anything"]
    assert left(Footprint.now(), {shared / "anything"}) == []
