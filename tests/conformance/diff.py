"""A difference between two traces, for people: the step, what led to it, what differs."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator

from .scenario import Json


def difference(vector: Json, trace: Json) -> str:
    """Return where *trace* departs from the recorded one, line by line."""
    scenario = vector["scenario"]
    lines = [f"--- {scenario['id']} ({scenario['kind']})"]
    diff = difflib.unified_diff(
        list(_lines(scenario, vector["trace"])),
        list(_lines(scenario, trace)),
        "OTP",
        "phalanx",
        lineterm="",
        n=6,
    )
    return "\n".join([*lines, *diff])


def _lines(scenario: Json, trace: Json) -> Iterator[str]:
    start = trace["start"]
    yield f"start -> {json.dumps(start['result'])}"
    yield from _events(start["events"])
    for step, record in zip(scenario["steps"], trace["steps"], strict=False):
        shown = {key: value for key, value in step.items() if key != "at"}
        yield f"at {step['at']}: {json.dumps(shown)} -> {json.dumps(record['result'])}"
        yield from _events(record["events"])
        if record.get("orphans"):
            yield "  orphans:"
            yield from _events(record["orphans"])
    yield f"final: {json.dumps(trace['final'])}"
    yield "teardown:"
    yield from _events(trace["teardown"])


def _events(events: list[Json]) -> Iterator[str]:
    for event in events:
        yield "  " + " ".join(map(str, event))
