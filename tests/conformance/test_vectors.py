"""Every recorded scenario gives OTP's trace: on the core, and a sample on real processes."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from .__main__ import load, main
from .core import run_scenario
from .processes import ProcessWorld
from .scenario import Json
from .shell_processes import ShellProcesses

FILES = sorted((Path(__file__).parent / "vectors").glob("*.jsonl"))
VECTORS = [vector for path in FILES for vector in load(path)]

# Recorded in the same way, for what the vectors do not reach: supervisors that end in a batch, and
# instances that hang with different times to stop in.
RECORDED = sorted((Path(__file__).parent / "recorded").glob("*.jsonl"))

SAMPLE = 96
FEATURE = re.compile(r'"(strategy|restart|reason|do|on_shutdown|auto_shutdown|op)": "(\w+)"')


def features(scenario: Json) -> set[object]:
    return {*FEATURE.findall(json.dumps(scenario)), *scenario["requires"]}


def sample() -> list[Json]:
    """Return scenarios that cover every feature, each at least thrice, and fill up evenly."""
    wanted = Counter[object]()
    chosen: list[Json] = []
    for vector in VECTORS:
        found = features(vector["scenario"])
        if any(wanted[feature] < 3 for feature in found):
            chosen.append(vector)
            wanted.update(found)
    step = max(1, len(VECTORS) // max(1, SAMPLE - len(chosen)))
    return (chosen + [v for v in VECTORS[::step] if v not in chosen])[:SAMPLE]


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
    assert (len(VECTORS), len(vectors)) == (586, 21 if recorded else SAMPLE)

    with ShellProcesses() as shells:
        different = [
            vector["scenario"]["id"]
            for vector in vectors
            if ProcessWorld(vector["scenario"], shells).run() != vector["trace"]
        ]

    assert different == []


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
    assert re.search(r"\+.*'stop', 'top', 1, 'shutdown'", printed)
