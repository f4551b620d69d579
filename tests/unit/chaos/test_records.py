"""Records survive the way to a file and back, and what is none is refused."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support import false_histories as lies
from tests.support.histories import whole

from phalanx.chaos.checker.checker import check
from phalanx.chaos.history.events import (
    CallBegan,
    CallEnded,
    CallIssued,
    DriverStarted,
    RanksNotStarted,
    WorkerStarted,
    event_of,
)
from phalanx.chaos.history.journal import Journal, read_history
from phalanx.chaos.instrumentation import driver_probe
from phalanx.chaos.instrumentation.worker_probe import InstrumentedCall


def test_every_record_survives_the_way_to_a_file_and_back() -> None:
    teller = whole(3)
    lies.sent_again_though_begun(teller)
    teller.add(RanksNotStarted, group="g", ranks=((0, 2), (1, 2)), reason="no process")
    teller.close()

    again = [event_of(record.to_json()) for record in teller.events]

    assert again == teller.events
    assert again != [replace(record, at=0.0) for record in teller.events]


@pytest.mark.parametrize(
    "text", ["[]", "7", '{"kind": "nonsense"}', '{"kind": "LeakFound", "at": 1}']
)
def test_a_line_that_is_no_record_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not an event"):
        event_of(text)


def test_a_history_is_read_from_the_files_of_all_who_wrote_it(tmp_path: Path) -> None:
    teller = whole()
    teller.close()
    (tmp_path / "effects").mkdir()
    driver, worker = Journal(tmp_path, "driver"), Journal(tmp_path / "effects", "0-1")
    for record in teller.events:
        late = replace(record, at=record.at + 1000.0)
        (worker if isinstance(record, CallBegan | CallEnded | WorkerStarted) else driver).write(
            late
        )
    driver.close()
    worker.close()

    history = read_history(tmp_path, seed=3)

    assert [record.kind for record in history.events] == [r.kind for r in teller.events]
    assert history.events[0].at == 0.0
    assert check(history) == ()


def test_a_line_cut_short_by_its_writers_death_is_left_out(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "driver")
    journal.write(DriverStarted(at=5.0, number=1, pid=1))
    journal.close()
    with open(tmp_path / "driver.jsonl", "a") as file:
        file.write('{"kind": "LeakFound", "at"')

    assert len(read_history(tmp_path).events) == 1


def test_the_time_to_a_deadline_counts_from_the_time_of_its_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter((1.0, 3.0))  # its thread loses the processor in between
    monkeypatch.setattr(driver_probe, "now", lambda: next(times))
    journal = Journal(tmp_path, "driver-1")
    group: Any = SimpleNamespace(name="g", probe=SimpleNamespace(journal=journal))
    made: Any = SimpleNamespace(
        options=SimpleNamespace(deadline=6.0), shape=SimpleNamespace(name="POOL"), retries=0, rank=0
    )

    driver_probe.ObservedCall(group, "m", InstrumentedCall(1, "m")).issued(made)
    journal.close()

    (issued,) = read_history(tmp_path).every(CallIssued)
    assert issued.seconds is not None
    assert issued.at + issued.seconds == 6.0


PROBED = """
import sys
from pathlib import Path
from phalanx.chaos.instrumentation.worker_probe import InstrumentedCall, WorkerProbe

probe = WorkerProbe(Path(sys.argv[1]), "g", 0, 1)
call = InstrumentedCall(1, "items", is_stream=True)
probe.invoke(lambda method, args, kwargs: iter((1, 2)), call, (), {}, 5).close()
"""


def test_a_stream_that_is_closed_before_its_first_item_has_ended(tmp_path: Path) -> None:
    # A process of its own: a probe observes it for good.
    subprocess.run([sys.executable, "-c", PROBED, str(tmp_path)], check=True, timeout=60)

    assert [each.call for each in read_history(tmp_path).every(CallEnded)] == [1]


STARTED = """
import sys, time
from pathlib import Path
from types import SimpleNamespace
from phalanx.chaos.instrumentation import worker_probe

def read(pid, read=worker_probe.procfs.read):
    time.sleep(0.2)  # as on a busy machine
    return read(pid)

worker_probe.procfs.read = read
probe = worker_probe.WorkerProbe(Path(sys.argv[1]), "g", 0, 1)
probe.woke(SimpleNamespace(rendezvous=None, epoch=1), kept=False)
"""


def test_a_pause_in_its_report_makes_no_process_older(tmp_path: Path) -> None:
    before = time.monotonic()
    subprocess.run([sys.executable, "-c", STARTED, str(tmp_path)], check=True, timeout=60)

    (started,) = map(json.loads, next(tmp_path.glob("worker-*.jsonl")).read_text().splitlines())
    assert started["at"] - started["age"] >= before - 0.02


NOTED = """
import sys
from pathlib import Path
from types import SimpleNamespace
from phalanx.chaos.instrumentation.worker_probe import WorkerProbe

for group, incarnation in (("draft-a[b]", 1), ("a[b]", 1), ("a[b]", 2)):
    probe = WorkerProbe(Path(sys.argv[1]), group, 0, incarnation)
    probe.woke(SimpleNamespace(rendezvous=None, epoch=incarnation), kept=False)
"""


def test_a_worker_is_beside_earlier_incarnations_of_its_own_group_only(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", NOTED, str(tmp_path)], check=True, timeout=60)

    found = read_history(tmp_path).every(WorkerStarted)
    assert [len(each.outlived) for each in found] == [0, 0, 1]
