"""Every recorded scenario gives OTP's trace: on the core, and a sample on real processes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from .__main__ import load, main
from .core import run_scenario
from .processes import ProcessDriver, why_not
from .scenario import Json

FILES = sorted((Path(__file__).parent / "vectors").glob("*.jsonl"))
VECTORS = [vector for path in FILES for vector in load(path)]

# Recorded in the same way, for what the vectors do not reach: supervisors that end in a batch, and
# instances that hang with different times to stop in.
RECORDED = sorted((Path(__file__).parent / "recorded").glob("*.jsonl"))

SAMPLE = 96


def words(value: Json, key: str) -> Iterator[str]:
    """Yield what stands under *key* anywhere in *value*."""
    if isinstance(value, dict):
        table = cast("dict[str, Json]", value)
        for name, below in table.items():
            if name == key and isinstance(below, str):
                yield below
            yield from words(below, key)
    elif isinstance(value, list):
        rows: list[Json] = [*value]
        for below in rows:
            yield from words(below, key)


def features(scenario: Json) -> set[str]:
    keys = ("strategy", "restart", "reason", "do", "on_shutdown", "auto_shutdown", "op")
    found = {f"{key}={word}" for key in keys for word in words(scenario, key)}
    return found | {f"requires={ability}" for ability in scenario["requires"]}


def sample() -> list[Json]:
    """Return scenarios that cover every feature, each at least thrice, and fill up evenly."""
    wanted: dict[str, int] = {}
    chosen: list[Json] = []
    for vector in VECTORS:
        found = features(vector["scenario"])
        if any(wanted.get(feature, 0) < 3 for feature in found):
            chosen.append(vector)
            for feature in found:
                wanted[feature] = wanted.get(feature, 0) + 1
    step = max(1, len(VECTORS) // max(1, SAMPLE - len(chosen)))
    return (chosen + [v for v in VECTORS[::step] if v not in chosen])[:SAMPLE]


def test_every_vector_file_is_there() -> None:
    assert len(VECTORS) == 586


@pytest.mark.timeout(60)
@pytest.mark.parametrize("path", FILES + RECORDED, ids=lambda path: path.stem)
def test_the_core_gives_the_trace_of_otp(path: Path) -> None:
    different = [
        v["scenario"]["id"] for v in load(path) if run_scenario(v["scenario"]) != v["trace"]
    ]

    assert different == []


@pytest.mark.parametrize("recorded", [False, True], ids=["sample", "recorded"])
def test_real_processes_give_the_trace_of_otp(phalanx_leak_check: None, recorded: bool) -> None:
    vectors = [vector for path in RECORDED for vector in load(path)] if recorded else sample()
    assert len(vectors) == (21 if recorded else SAMPLE)

    with ProcessDriver() as driver:
        different = [
            vector["scenario"]["id"]
            for vector in vectors
            if driver.run(vector["scenario"]) != vector["trace"]
        ]

    assert different == []


def test_every_known_scenario_can_be_run_with_real_processes() -> None:
    assert {why_not(vector["scenario"]) for vector in VECTORS} == {""}


def test_an_unequal_trace_is_shown_and_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    vector = json.loads(json.dumps(VECTORS[0]))
    vector["trace"]["teardown"].pop()
    path = tmp_path / "changed.jsonl"
    path.write_text(json.dumps(vector) + "\n" + json.dumps(VECTORS[1]) + "\n")

    code = main([str(path)])

    printed = capsys.readouterr().out
    assert code == 1
    assert printed.splitlines()[-1] == "1 of 2 traces equal"
    assert "+  stop top 1 shutdown" in printed
