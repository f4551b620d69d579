"""Records survive the way to a file and back, and what is none is refused."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from tests.chaos import lies
from tests.chaos.teller import whole

from phalanx.chaos import (
    Journal,
    check,
    read_history,
    record_of,
)
from phalanx.chaos.group_records import (
    NotStarted,
)
from phalanx.chaos.referee_records import LifeBegan
from phalanx.chaos.worker_records import Began, Ended, Woke


def test_every_record_survives_the_way_to_a_file_and_back() -> None:
    teller = whole(3)
    lies.sent_again_though_begun(teller)
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
