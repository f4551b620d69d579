"""Each death leaves a report, as a value, an event and a file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from phalanx.actors import Executor
from phalanx.runtime import ReportFolder, Runtime
from phalanx.supervision import SpecError, WorkerDied

Make = Callable[..., Executor[Any]]
LONG = 30.0


def reports_in(path: Path) -> list[Any]:
    return [each.report for each in ReportFolder(path).read()]


def died(ex: Executor[Any]) -> Any:
    with pytest.raises(WorkerDied) as caught:
        ex.collective_rpc("kill_self", LONG, (0,), {"inc": ex.ranks[0].incarnation})
    return caught.value.report


def test_the_file_is_what_the_caller_was_told(make: Make, tmp_path: Path) -> None:
    ex = make(world_size=2, report_dir=tmp_path / "reports")

    told = died(ex)
    ex.close()

    assert reports_in(tmp_path / "reports") == [told]
    assert told.call.method == "kill_self"
    assert told.decision == "restart ranks 0, 1"
    assert told.why == "one_for_all, number 1 of at most 3 restarts in 60 s"
    assert told.evidence.rusage["ru_maxrss"] > 1000


def test_the_executors_folder_comes_before_the_runtimes_and_that_before_the_environments(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, shared, named = (tmp_path / name for name in ("mine", "shared", "named"))
    monkeypatch.setenv("PHALANX_REPORT_DIR", str(named))
    environments = make(world_size=1)
    with Runtime(console=None, stream=False, report_dir=shared) as runtime:
        runtimes = make(world_size=1, runtime=runtime)
        own = make(world_size=1, runtime=runtime, report_dir=ReportFolder(mine, keep=2))

        told = [died(ex) for ex in (environments, runtimes, own)]
        for ex in (environments, runtimes, own):
            ex.close()

    assert [reports_in(path) for path in (named, shared, mine)] == [[each] for each in told]


def test_a_folder_that_cannot_be_written_to_is_refused_before_anything_starts(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(SpecError, match="report_dir="):
        make(report_dir=tmp_path / "file")
    with pytest.raises(SpecError, match="report_dir="):
        Runtime(report_dir=tmp_path / "file")
    monkeypatch.setenv("PHALANX_REPORT_DIR", str(tmp_path / "file"))
    with pytest.raises(SpecError, match="PHALANX_REPORT_DIR="):
        make()
