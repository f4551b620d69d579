"""Smaller schedules that still fail: which are tried, and what becomes of real runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.chaos.targets import in_turn
from tests.support.planted_faults import PLANTS, Planted
from tests.support.transport import TRANSPORT
from tests.support.workers import Echo

from phalanx.actors import Executor, Launch, Limits
from phalanx.chaos import Chaos, ChaosResult, Schedule, Target, load_run, run_chaos, shrink_run
from phalanx.chaos.history.events import WorkloadFailed
from phalanx.chaos.history.journal import Journal
from phalanx.chaos.runner import save_plan
from phalanx.chaos.shrink import shrinker
from phalanx.chaos.shrink.ddmin import ddmin
from phalanx.runtime import Runtime
from phalanx.supervision import RuntimeFault, SpecError

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.timeout(180)


def schedule(count: int) -> Schedule:
    return in_turn(*["kill@queued"] * count, gap=3.0)


def search(whole: Schedule, fails: Callable[[Schedule], bool]) -> tuple[Schedule, list[Schedule]]:
    asked: list[Schedule] = []

    def ask(candidate: Schedule) -> bool:
        asked.append(candidate)
        return fails(candidate)

    return ddmin(whole, ask), asked


def record(folder: Path, target: str, plan: Chaos, *, fails: bool = True) -> None:
    save_plan(folder, target, plan)
    journal = Journal(folder, "driver-1")
    if fails:
        journal.write(WorkloadFailed(at=1.0, error="wrong"))
    journal.close()


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 40).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(1, n)))))
def test_what_is_needed_is_left_and_nothing_else(case: tuple[int, set[int]]) -> None:
    count, needed = case

    found, asked = search(schedule(count), lambda s: needed <= {each.number for each in s})

    assert {strike.number for strike in found} == needed
    assert all(strike.point == "" for strike in found)
    assert len(asked) == len(set(asked))
    assert search(schedule(count), lambda s: needed <= {e.number for e in s})[1] == asked


def test_a_moment_that_matters_is_kept() -> None:
    found, _ = search(schedule(6), lambda s: any(each.point == "queued" for each in s))

    assert [strike.point for strike in found] == ["queued"]


def test_a_failing_run_shrinks_to_the_one_fault_it_takes(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def build() -> Executor[Any]:
        launch = Launch(preload=(), transport=TRANSPORT)
        return Executor(Planted, 2, runtime=runtime, limits=Limits(start=30.0), launch=launch)

    whole = in_turn("raise", "kill", gap=0.2)
    with monkeypatch.context() as patch:
        PLANTS["only the dead restarted"].put(patch)
        run_chaos(build, duration=1.0, schedule=whole, seed=1, record=tmp_path / "run")
        shrunk = shrink_run(tmp_path / "run", target=build, runs=8, repeat=1)

    assert shrunk.schedule is not None
    assert [strike.fault for strike in shrunk.schedule] == ["kill"]
    assert shrunk.before == 2
    kept = tmp_path / "run-shrunk"
    assert Schedule.from_json((kept / "schedule.json").read_text()) == shrunk.schedule
    assert {each.invariant for each in load_run(kept).violations} >= {"strategy"}

    again = shrink_run(kept, target=build, runs=1, out=tmp_path / "none")  # without the plant

    assert again.result is None
    assert not (tmp_path / "none").exists()
    with pytest.raises(SpecError, match="it exists"):
        shrink_run(tmp_path / "run", target=build)


@pytest.mark.parametrize("failed", [3, 2], ids=["each time", "flaky"])
def test_what_failed_by_chance_is_not_taken_for_the_smallest(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, failed: int
) -> None:
    """The whole fails so often of three times; a smaller one did once, and does so no more."""
    whole = schedule(4)
    plan = Chaos(duration=30.0, schedule=whole, seed=1)
    asked: list[int] = []

    def run(target: Target, plan: Chaos, **_: Any) -> ChaosResult:
        asked.append(len(plan.planned))
        mends = failed == 2 and asked.count(4) == 2
        fails = len(plan.planned) == 4 and not mends
        fails |= len(plan.planned) == 2 and asked.count(2) == 1
        assert plan.record is not None
        plan.record.mkdir()
        record(plan.record, "it", plan, fails=fails)
        return load_run(plan.record)

    run(Target.of(Echo), replace(plan, record=tmp_path / "run"))
    monkeypatch.setattr(shrinker, "run_chaos", run)
    shrunk = shrink_run(tmp_path / "run", target=Echo)

    assert shrunk.schedule is not None
    assert len(shrunk.schedule) == len(whole)
    assert shrunk.is_flaky is (failed == 2)
    assert (shrunk.whole.failed, shrunk.whole.made) == (failed, 3)


@pytest.mark.parametrize("error", [RuntimeFault("no driver came up"), KeyError("of the target")])
def test_what_was_found_is_kept_where_a_later_run_cannot_be_made(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception
) -> None:
    def run(target: Target, plan: Chaos, **_: Any) -> ChaosResult:
        if len(plan.planned) < 4:
            raise error
        assert plan.record is not None
        plan.record.mkdir()
        record(plan.record, "it", plan)
        return load_run(plan.record)

    monkeypatch.setattr(shrinker, "run_chaos", run)
    run(Target.of(Echo), Chaos(duration=30.0, schedule=schedule(4), record=tmp_path / "run"))
    shrunk = shrink_run(tmp_path / "run", target=Echo, out=tmp_path / "a" / "b")

    assert not shrunk.complete
    assert load_run(tmp_path / "a" / "b").violations
    assert [each.name for each in (tmp_path / "a").iterdir()] == ["b"]


@pytest.mark.parametrize("out", ["/proc/new/folder", "n" * 300])
def test_a_folder_that_cannot_be_made_is_refused_before_any_run(out: str, tmp_path: Path) -> None:
    record(tmp_path, "it", Chaos())

    with pytest.raises(SpecError, match="cannot be made") as caught:
        shrink_run(tmp_path, target=Echo, out=out)
    assert caught.value.field == "out"


def local() -> Callable[[], None]:
    def within() -> None: ...

    return within


@pytest.mark.parametrize("given", [local(), partial(local), lambda: None])
def test_a_target_that_no_name_leads_to_is_refused_with_what_to_do(
    given: Callable[[], Any], tmp_path: Path
) -> None:
    record(tmp_path, Target.of(given).name, Chaos())

    with pytest.raises(SpecError, match=r"top level of a module; for others call .*target=\.\.\."):
        shrink_run(tmp_path)


def test_what_cannot_be_shrunk_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="no record of a run"):
        shrink_run(tmp_path)
    with pytest.raises(SpecError, match="runs=0"):
        shrink_run(tmp_path, runs=0)
    with pytest.raises(SpecError, match="seconds=0"):
        shrink_run(tmp_path, seconds=0)
