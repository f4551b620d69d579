"""What is to be injected: drawn, written down, or refused by name before anything starts."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from phalanx.actors import POINTS, WorkerActor
from phalanx.chaos import (
    FAULTS,
    TARGETS,
    Chaos,
    Fault,
    Schedule,
    ScheduledFault,
    load_run,
    run_chaos,
)
from phalanx.chaos.history.events import WorkloadFailed
from phalanx.chaos.history.journal import Journal
from phalanx.chaos.nemesis.catalog import FaultPattern
from phalanx.chaos.runner import load_plan, save_plan
from phalanx.runtime import find_gpus
from phalanx.supervision import SpecError

LATE = ScheduledFault(number=1, at=5.0, fault="kill")


def drawn(seed: int) -> Schedule:
    aims = [*map(FaultPattern.of, ("kill", "hang", "stop:driver", "stop:zygote", "exit"))]
    return Schedule.draw(
        seed, duration=100.0, rate=1.0, patterns=aims, targets=("random", "group"), points=POINTS
    )


def test_the_same_seed_gives_the_same_schedule() -> None:
    assert drawn(7) == drawn(7)
    assert drawn(7) != drawn(8)
    assert Schedule.from_json(drawn(7).to_json()) == drawn(7)


def test_a_drawn_schedule_holds_only_what_can_be_done() -> None:
    for strike in drawn(9):
        fault = FAULTS[strike.fault]
        assert not strike.point or strike.point in fault.points
        assert strike.target == "random" or strike.target in fault.targets
    assert 50 < len(drawn(9)) < 150


def test_a_schedule_that_would_be_empty_has_one_strike() -> None:
    for seed in range(20):
        drawn = Schedule.draw(seed, duration=4.0, rate=0.001, patterns=[FaultPattern("kill")])
        assert [strike.at < 4.0 for strike in drawn] == [True]


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("faults", {"faults": ("explode",)}),
        ("faults", {"faults": ()}),
        ("faults", {"faults": 3}),
        ("point", {"faults": ("kill@midnight",)}),
        ("point", {"faults": ("raise@closing",)}),
        ("points", {"points": ("midnight",)}),
        ("point", {"faults": ("start_raise",), "points": ("running",)}),
        ("point", {"faults": ("kill:zygote@running",)}),
        ("target", {"faults": ("kill:moon",)}),
        ("target", {"faults": ("hang:zygote",)}),
        ("target", {"faults": ("hang",), "targets": ("zygote", "store")}),
        ("targets", {"targets": ()}),
        ("point", {"faults": ("hang:0@before_send",)}),
        ("point", {"faults": ("node@running",)}),
        ("targets", {"targets": ("moon",)}),
        ("rate", {"rate": 0}),
        ("rate", {"rate": -1.0}),
        ("rate", {"rate": float("nan")}),
        ("rate", {"rate": 1e9}),
        ("target", {"faults": ("kill:\u00b2",)}),
        ("duration", {"duration": 0}),
        ("duration", {"duration": 2.0, "schedule": Schedule((LATE,))}),
        ("seed", {"seed": "seven"}),
        ("callers", {"callers": 0}),
        ("record", {"record": Path(__file__)}),
        ("record", {"record": "n" * 300}),
        ("schedule", {"schedule": [1]}),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(field: str, fields: dict[str, Any]) -> None:
    with pytest.raises(SpecError) as caught:
        Chaos(**fields)

    assert caught.value.field == field


@pytest.mark.parametrize("target", ["0", *TARGETS])
@pytest.mark.parametrize("fault", [each for each in FAULTS.values() if each.needs != "gpu"])
def test_a_fault_can_be_done_to_a_target_or_is_refused_by_name(fault: Fault, target: str) -> None:
    if target in ("0", "random", *fault.targets):
        plan = Chaos(faults=(f"{fault.name}:{target}",), targets=(target,))
        assert {(each.fault, each.target) for each in plan.planned} == {(fault.name, target)}
        return
    for fields in ({"faults": (f"{fault.name}:{target}",)}, {"targets": (target,)}):
        with pytest.raises(SpecError, match="can be done to random, a rank") as caught:
            Chaos(**{"faults": (fault.name,), **fields})  # type: ignore[arg-type]
        assert (caught.value.field, caught.value.value) == ("target", target)


@pytest.mark.skipif(bool(find_gpus().gpus()), reason="there is a GPU here")
def test_a_fault_of_a_gpu_is_refused_where_there_is_none() -> None:
    plan = Chaos(faults=("cuda_error",), duration=2.0)  # of a record that is merely read

    for each, field in ((plan, "faults"), (replace(plan, schedule=plan.planned), "schedule")):
        with pytest.raises(SpecError, match="needs an NVIDIA GPU") as caught:
            run_chaos(WorkerActor, each)
        assert caught.value.field == field


def test_a_plan_with_another_seed_has_its_schedule() -> None:
    plan = Chaos(seed=1)

    assert replace(plan, seed=2).planned == Chaos(seed=2).planned
    assert replace(plan, callers=2).planned == plan.planned


def test_the_seed_is_named_only_where_it_gives_the_schedule(tmp_path: Path) -> None:
    drawn = Chaos(seed=1, duration=5.0, faults=["kill", "hang"])
    part = Chaos(seed=1, duration=5.0, schedule=drawn.planned.only([1]))
    again: list[str] = []
    for plan in (drawn, part):
        save_plan(tmp_path, "mine:build", plan)
        assert load_plan(tmp_path)[1] == plan
        with closing(Journal(tmp_path, "driver-1")) as journal:
            journal.write(WorkloadFailed(at=1.0, error="wrong"))
        result = load_run(tmp_path)
        again.append(result.summary().partition("; ")[2])
        assert result.violations[0].seed == plan.drawn_from

    assert again == ["reproduce with --seed 1", "reproduce with --schedule"]


def test_a_draw_that_rounds_to_one_is_the_last_below_it() -> None:
    plan = Chaos(seed=71, duration=9_000.0, rate=1.0)

    assert max(each.draw for each in plan.planned) == 0.999999


def test_a_rank_may_be_a_number_in_a_schedule_of_ones_own() -> None:
    schedule = Schedule.from_json('[{"at": 1, "fault": "kill", "target": 1}]')

    assert [strike.target for strike in schedule] == ["1"]
    (stop,) = Schedule.from_json('[{"at": 1, "fault": "stop"}]')
    assert stop.seconds == FAULTS["stop"].seconds


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('[{"at": 1, "fault": "kill", "target": null}]', "a name, or the number of a rank"),
        ('[{"at": 1, "fault": "kill", "draw": 1.0}]', r"draw=1\.0"),
        ('[{"at": 1, "fault": "kill", "number": [1]}]', r"number=\[1\]"),
        ('[{"at": 1, "fault": "kill", "number": 2}, {"at": 2, "fault": "kill"}]', "number=2"),
        ('[{"at": 1, "fault": "stop", "target": "driver", "seconds": 9}]', "seconds=9"),
        ('[{"at": 1, "fault": "cut", "seconds": 1e10}]', "seconds=10000000000"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_a_list_that_makes_no_sense_is_refused(text: str, told: str) -> None:
    with pytest.raises(SpecError, match=told):
        Schedule.from_json(text)
