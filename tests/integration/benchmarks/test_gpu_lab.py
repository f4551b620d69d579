"""The experiments for a GPU, rehearsed without one: none may fail there for a mistake in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks.gpu.command import EXPERIMENTS
from tests.integration.benchmarks.conftest import bench

pytestmark = [pytest.mark.usefixtures("phalanx_leak_check"), pytest.mark.timeout(240)]
SERIES = {
    "e1": {"kills": 5},
    "e2": {"errors": 8},
    "e3": {"signals": 3, "phalanx": 2},
    "e4": {"beside": 1, "unlisted": 1, "residue": 1},
    "e5": {"kills": 10, "aborts": 1},
    "e7": {"kills": 2},
    "e8": {"parked": 3},
    "e9": {"calm": 4, "kills": 4},
}
# These take longest: rehearsed by `make soak`.
SOAKED = ("e1", "e3", "e4", "e5", "e7", "e8", "e9", "e12")


def rehearse(name: str, out: Path, *words: str) -> tuple[int, dict[str, Any]]:
    """Return the exit code, and what is in the file."""
    done = bench("gpu", name, "--rehearse", "--out", str(out), *words)
    found: dict[str, Any] = json.loads((out / f"{name}.json").read_text())
    return done.returncode, found


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.soak] * (name in SOAKED)) for name in EXPERIMENTS],
)
def test_an_experiment_comes_to_its_end_and_leaves_nothing(name: str, tmp_path: Path) -> None:
    code, found = rehearse(name, tmp_path, "--limit", "200")

    assert (code, found["end"]) == (0, "done"), found.get("error", found)
    assert (found["left"], found["unkillable"], "error" in found) == ([], [], False)
    assert found["machine"]["python"]
    for series, rows in SERIES.get(name, {}).items():
        assert len(found[series]) == rows, found[series]
    match name:
        case "e1":
            plain = [row for row in found["kills"] if row["how"] == "plain"]
            assert all(0 < row["free"] < 15 for row in plain), found["kills"]
        case "e2":
            verdicts = {row["kind"]: (row["sticky"], row["default"]) for row in found["errors"]}
            assert verdicts["illegal address"] == (True, "restart")
            assert verdicts["out of memory"] == verdicts["pinned memory"] == (False, "None")
        case "e4":
            (residue,) = found["residue"]
            assert residue["state"] == "quarantined", residue
            assert residue["restored_after"] is not None
        case "e5":
            assert (found["hung"], found["wrong_weights"]) == (0, 0)
            assert all(row["right"] for row in found["kills"]), found["kills"]
        case "e7":
            assert (found["equal"], found["equal_losses"]) == (True, True)
        case "e9":
            assert found["all_equal"]
        case "e12":
            assert found["verdict"] == "PASS", found["violations"]
        case _:
            pass


def test_an_experiment_that_is_cut_off_keeps_what_it_has_and_leaves_nothing(tmp_path: Path) -> None:
    code, found = rehearse("e12", tmp_path, "--limit", "4")

    assert code == 1
    assert found["end"] == "cut off at 4 s"
    assert (found["name"], found["unkillable"]) == ("e12", [])
