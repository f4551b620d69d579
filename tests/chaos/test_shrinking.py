"""Smaller schedules that still fail: which are tried, and what becomes of real runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.chaos.plants import PLANTS, Planted
from tests.transport import TRANSPORT

from phalanx.actors import Executor
from phalanx.chaos import Schedule, Strike, load_run, run_chaos, shrink_run
from phalanx.chaos.shrinking import smaller
from phalanx.runtime import Runtime
from phalanx.supervision import SpecError

pytestmark = pytest.mark.timeout(180)


def schedule(count: int) -> Schedule:
    return Schedule(
        tuple(Strike(number=i + 1, at=3.0 * i, fault="kill", point="queued") for i in range(count))
    )


def search(whole: Schedule, fails: Callable[[Schedule], bool]) -> tuple[Schedule, list[Schedule]]:
    asked: list[Schedule] = []
    questions = smaller(whole)
    try:
        candidate = next(questions)
        while True:
            asked.append(candidate)
            candidate = questions.send(fails(candidate))
    except StopIteration as end:
        return end.value, asked


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
        options: Any = {"runtime": runtime, "start_timeout": 30.0, "transport": TRANSPORT}
        return Executor(Planted, 2, preload=(), **options)

    strikes = [("slow", 0.1), ("raise", 0.3), ("kill", 0.5), ("slow", 0.7)]
    whole = Schedule(
        tuple(Strike(number=i + 1, at=at, fault=f) for i, (f, at) in enumerate(strikes))
    )
    with monkeypatch.context() as patch:
        PLANTS["only the dead restarted"].put(patch)
        run_chaos(build, duration=1.5, schedule=whole, seed=1, record=tmp_path / "run")
        shrunk = shrink_run(tmp_path / "run", target=build, runs=12, repeat=1)

    assert shrunk.schedule is not None
    assert [strike.fault for strike in shrunk.schedule] == ["kill"]
    assert shrunk.before == 4
    kept = tmp_path / "run-shrunk"
    assert Schedule.from_json((kept / "schedule.json").read_text()) == shrunk.schedule
    assert {each.invariant for each in load_run(kept).violations} >= {"strategy"}

    again = shrink_run(kept, target=build, runs=1, out=tmp_path / "none")  # without the plant

    assert again.result is None
    assert not (tmp_path / "none").exists()
    with pytest.raises(SpecError, match="is there already"):
        shrink_run(tmp_path / "run", target=build)


def test_what_cannot_be_shrunk_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="no record of a run"):
        shrink_run(tmp_path)
    with pytest.raises(SpecError, match="runs=0"):
        shrink_run(tmp_path, runs=0)
    with pytest.raises(SpecError, match="seconds=0"):
        shrink_run(tmp_path, seconds=0)
