"""What a driver's stream has said is added up: deaths, recoveries by phase, service, readiness."""

from __future__ import annotations

import json
from typing import Any

import pytest

from phalanx.integrations.prometheus.driver_metrics import DriverMetrics
from phalanx.runtime import CrashReport, WorkerCrashed, WorkerLabels
from phalanx.runtime.event import fields
from phalanx.runtime.observe.log_channel import encode_record
from phalanx.supervision import ExitKind, ExitReason


def event(name: str, at: float, **more: Any) -> dict[str, Any]:
    return {"kind": "event", "event": f"phalanx.{name}", "at": at, "group": "g", **more}


def crashed(at: float, kind: str, rank: int | None = 1, **more: Any) -> dict[str, Any]:
    report = {"group": "g", "rank": rank, "reason": {"kind": kind}, "call": None, **more}
    return {"kind": "event", "event": "phalanx.worker_crashed", "at": at, "report": report}


def shown(at: float, phase: str = "serving", calls: int = 0, **rank: Any) -> list[dict[str, Any]]:
    """One picture of a group of one rank."""
    about = {"rank": 0, "incarnation": 1, "state": "up", "served": 0, "running_for": 0.0}
    group = {
        "event": "phalanx.group_state",
        "kind": "state",
        "group": "g",
        "phase": phase,
        "world_size": 1,
        "first": 0,
        "at": at,
        "calls": {"ok": calls},
        "ranks": [{**about, "pid": None, **rank}],
    }
    end: dict[str, Any] = {"groups": 1, "ended": {}, "at": at}
    return [group, {"event": "phalanx.status_ended", "kind": "state", **end}]


def metrics_of(*records: dict[str, Any], wall: float = 0.0) -> DriverMetrics:
    made = DriverMetrics()
    made.begin({}, 0.0)
    for record in records:
        made.take(record, float(record.get("at", 0.0)), wall)
    return made


def test_a_recovery_is_divided_into_phases_that_add_up_to_its_total() -> None:
    told = metrics_of(
        event("group_up", 1.0),
        event("group_down", 10.0, cause=""),
        event("worker_started", 12.0, rank=0, took=0.5),
        event("worker_started", 12.5, rank=1, took=1.5),
        event("worker_ready", 19.0, rank=0),
        event("worker_ready", 20.0, rank=1),
        event("checkpoint_restored", 20.0, rank=1, took=2.0),
        event("group_up", 21.0),
    )

    seconds = {phase: spent.sum for phase, spent in told.groups["g"].recoveries.items()}

    assert seconds == {
        "detect": 0.0,
        "gate": 2.5,
        "launch": 1.5,
        "start": 4.0,
        "restore": 2.0,
        "reform": 1.0,
        "total": 11.0,
    }
    assert sum(told.groups["g"].recoveries["total"].counts) == 1


def test_further_deaths_belong_to_the_recovery_under_way() -> None:
    told = metrics_of(
        event("group_down", 10.0, cause=""),
        event("group_down", 14.0, cause=""),
        event("group_up", 20.0),
    )

    assert told.groups["g"].recoveries["total"].sum == 10.0
    assert sum(told.groups["g"].recoveries["total"].counts) == 1


def test_the_first_start_is_no_recovery_and_no_time_down() -> None:
    told = metrics_of(*shown(1.0, "starting"), *shown(3.0, "starting"), event("group_up", 5.0))

    assert (told.groups["g"].serving, told.groups["g"].down) == (0.0, 0.0)
    assert told.groups["g"].recoveries["total"].sum == 0.0


def test_a_first_start_that_fails_is_no_time_down() -> None:
    told = metrics_of(event("group_down", 1.0, cause=""), event("group_ended", 2.0, cause="bug"))

    told.end("it has no executor just now", 60.0, is_alive=True)

    assert told.groups["g"].down == 0.0
    assert told.unready(60.0) == "group g has ended: bug"


def test_a_successor_does_not_end_the_recovery_of_the_driver_before_it() -> None:
    told = metrics_of(event("group_up", 1.0), event("group_down", 10.0, cause=""))

    told.end("driver 1 has closed its stream", 11.0)
    told.begin({}, 3600.0)
    told.take(event("group_up", 3600.0), 3600.0, 0.0)

    assert told.groups["g"].recoveries["total"].sum == 0.0


def test_service_is_counted_from_event_to_event_and_up_to_the_last_picture() -> None:
    told = metrics_of(
        event("group_up", 1.0),
        *shown(2.0),
        event("group_down", 5.0, cause=""),
        *shown(6.0, "mending"),
        event("group_up", 7.0),
        *shown(10.0),
    )

    assert (told.groups["g"].serving, told.groups["g"].down) == (7.0, 2.0)


def test_deaths_are_counted_by_rank_and_reason_and_hung_seconds_by_the_call() -> None:
    told = metrics_of(
        crashed(1.0, "killed"),
        crashed(2.0, "killed"),
        crashed(3.0, "unresponsive", call={"running_for": 5.5}),
        crashed(4.0, "crash", rank=None),
    )

    group = told.groups["g"]
    assert group.deaths == {("1", "killed"): 2, ("1", "unresponsive"): 1, ("standby", "crash"): 1}
    assert group.hung == {"1": 5.5}
    detect = group.recoveries["detect"]
    assert (sum(detect.counts), detect.sum) == (1, 5.5)


def test_a_death_by_an_exception_of_a_long_text_is_counted() -> None:
    reason = ExitReason(ExitKind.CRASH, "a key is missing; " * 10_000, 1)
    labels = WorkerLabels(child="root/g/1", group="g", rank=1)
    report = CrashReport.of(labels, reason, at="", at_monotonic=1.0)
    record = json.loads(encode_record(fields(WorkerCrashed(report=report, at=1.0))))

    told = metrics_of({**record, "kind": "event"})

    assert told.groups["g"].deaths == {("1", "crash"): 1}


@pytest.mark.parametrize(
    ("before", "after", "moves"),
    [
        ({"served": 1}, {"served": 2}, True),
        ({"running_for": 1.0}, {"running_for": 2.0}, False),
        ({"running_for": 1.0}, {"running_for": 0.5}, True),
        ({"served": 1}, {"served": 1}, False),
        ({"calls": 1}, {"calls": 2}, True),
        ({"served": 1, "running_for": 0.1}, {"served": 1, "running_for": 0.0}, False),
    ],
)
def test_progress_is_a_call_that_has_begun_or_ended(
    before: dict[str, Any], after: dict[str, Any], moves: bool
) -> None:
    told = metrics_of(*shown(10.0, **before), wall=100.0)

    for record in shown(11.0, **after):
        told.take(record, 11.0, 101.0)

    assert (told.groups["g"].progressed_at == 101.0) is moves


def test_a_group_that_is_down_is_not_ready_before_the_next_picture_says_so() -> None:
    told = metrics_of(event("group_up", 1.0), *shown(2.0))
    assert told.unready(2.5) == ""

    told.take(event("group_down", 2.6, cause=""), 2.6, 0.0)

    assert told.unready(2.7) == "group g is down"
    assert told.unwell(2.7) == ""


def test_a_rank_that_is_not_up_is_named() -> None:
    told = metrics_of(*shown(2.0, "mending", state="starting"))

    assert told.unready(2.5) == "group g is mending: rank 0 is starting"


def test_a_driver_that_falls_silent_is_unwell_and_one_without_executors_is_not() -> None:
    told = metrics_of(*shown(2.0))
    assert told.unwell(11.0) == ""
    assert told.unwell(13.0) == "the driver has not answered for 11 s"

    told.end("it has no executor just now", 14.0, is_alive=True)

    assert told.unwell(15.0) == ""
    assert told.unready(15.0) == "it has no executor just now"


def test_a_group_that_has_ended_by_itself_counts_as_down_until_it_is_back() -> None:
    told = metrics_of(event("group_up", 1.0), event("group_ended", 5.0, cause="too many deaths"))

    for record in shown(6.0, "ended"):
        told.take(record, 6.0, 0.0)
    told.end("it has no executor just now", 8.0, is_alive=True)

    assert told.unready(8.0) == "group g has ended: too many deaths"
    assert (told.groups["g"].serving, told.groups["g"].down) == (4.0, 3.0)
    told.begin({}, 9.0)
    for record in (event("group_up", 9.0), *shown(10.0)):
        told.take(record, 10.0, 0.0)
    assert told.unready(10.5) == ""
    assert (told.groups["g"].serving, told.groups["g"].down) == (5.0, 4.0)


def test_a_group_that_was_closed_counts_no_more() -> None:
    told = metrics_of(event("group_up", 1.0), *shown(2.0), event("group_ended", 5.0, cause=""))

    told.end("driver 1 has closed its stream", 9.0)

    assert (told.groups["g"].serving, told.groups["g"].down) == (4.0, 0.0)
    assert told.groups["g"].now is None


def test_groups_that_have_ended_are_not_kept_without_limit() -> None:
    told = metrics_of(*({**event("group_up", 1.0), "group": f"g{n}"} for n in range(1000)))

    assert len(told.groups) == 256
    assert "g999" in told.groups
