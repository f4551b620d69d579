"""Each death leaves a report, as a value, an event and a file."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from tests.support.options import Make
from tests.support.rank_faults import OFTEN, kill

from phalanx.actors import Executor, Limits, RestartPolicy
from phalanx.runtime import ReportFolder, Runtime
from phalanx.supervision import Intensity, SpecError, Strategy, WorkerDied

LONG = 30.0


def died(ex: Executor[Any]) -> Any:
    with pytest.raises(WorkerDied) as caught:
        ex.collective_rpc("kill_self", LONG, (0,))
    return caught.value.report


def test_the_executors_folder_comes_before_the_runtimes_and_that_before_the_environments(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, shared, named = (tmp_path / name for name in ("mine", "shared", "named"))
    monkeypatch.setenv("PHALANX_REPORT_DIR", str(named))
    environments = make(world_size=1)
    with Runtime(console=None, stream=False, report_dir=shared) as runtime:
        runtimes = make(world_size=1, runtime=runtime)
        own = make(
            world_size=2,
            runtime=runtime,
            policy=RestartPolicy(report_dir=ReportFolder(mine, keep=2)),
        )

        told = [died(ex) for ex in (environments, runtimes, own)]
        for ex in (environments, runtimes, own):
            ex.close()

    files = [ReportFolder(path).read() for path in (named, shared, mine)]
    assert [[each.report for each in found] for found in files] == [[each] for each in told]
    report = told[-1]
    assert report.call.method == "kill_self"
    assert report.decision == "restart ranks 0, 1"
    assert report.why == "one_for_all, number 1 of at most 3 restarts in 60 s"
    assert report.evidence.rusage["ru_maxrss"] > 1000


def test_a_folder_that_cannot_be_written_to_is_refused_before_anything_starts(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(SpecError, match="policy.report_dir="):
        make(policy=RestartPolicy(report_dir=tmp_path / "file"))
    with pytest.raises(SpecError, match="report_dir="):
        Runtime(report_dir=tmp_path / "file")
    monkeypatch.setenv("PHALANX_REPORT_DIR", str(tmp_path / "file"))
    with pytest.raises(SpecError, match="PHALANX_REPORT_DIR="):
        make()


def fates(report: Any) -> list[tuple[str, str, bool, int]]:
    return [(call.method, call.fate, call.begun, call.retries_left) for call in report.calls]


def test_the_report_says_what_became_of_the_calls(make: Make) -> None:
    ex = make(world_size=1, limits=Limits(queue_depth=4), intensity=OFTEN)
    ex.collective_rpc("echo", LONG)

    kill(ex, 0, signal.SIGSTOP)  # so that it does not die before all calls are made
    again: dict[str, Any] = {"retries": 3}
    futures = [ex.collective_rpc("kill_self", args=(0,), non_block=True, **again)]
    futures += [ex.collective_rpc("echo", args=(n,), non_block=True) for n in range(5)]
    kill(ex, 0, signal.SIGCONT)
    answers = [future.result(LONG) for future in futures]

    assert answers == [[2], *([n] for n in range(5))]
    (report,) = ex.status().reports
    assert fates(report) == [
        ("kill_self", "sent_again", True, 2),
        *[("echo", "sent_again", False, 0)] * 3,
    ]
    assert report.waiting == 2


def test_a_call_that_failed_and_answers_that_were_kept_are_told_apart(make: Make) -> None:
    ex = make(world_size=2, strategy=Strategy.ONE_FOR_ONE, intensity=OFTEN)

    with pytest.raises(WorkerDied) as failed:
        ex.collective_rpc("kill_self", LONG, (1,))
    outcomes = ex.gather("kill_self", LONG, (1,), {"inc": 2})

    assert fates(failed.value.report) == [("kill_self", "failed", True, 0)]
    assert [str(outcome.kind) for outcome in outcomes] == ["ok", "dead"]
    assert fates(ex.status().reports[-1]) == [("kill_self", "kept", True, 0)]
    assert isinstance(outcomes[1].error, WorkerDied)
    assert outcomes[1].error.report == ex.status().reports[-1]


def test_where_the_group_gives_up_every_call_is_told_to_have_failed(make: Make) -> None:
    ex = make(world_size=1, limits=Limits(queue_depth=2), intensity=Intensity(0, 60.0))
    ex.collective_rpc("echo", LONG)

    kill(ex, 0, signal.SIGSTOP)  # as above
    dying = ex.collective_rpc("kill_self", args=(0,), non_block=True, retries=1)
    waiting = [ex.collective_rpc("echo", args=(n,), non_block=True) for n in range(3)]
    kill(ex, 0, signal.SIGCONT)
    errors = [future.exception(LONG) for future in (dying, *waiting)]

    assert all(isinstance(error, WorkerDied) for error in errors)
    (report,) = ex.status().reports
    assert fates(report) == [
        ("kill_self", "failed", True, 0),
        *[("echo", "failed", False, 0)] * 3,
    ]
    assert (report.decision, report.waiting) == ("give up", 0)
