"""What is said of groups on several machines: the whole interval, every round, or why not."""

from __future__ import annotations

import json

import pytest
from benchmarks.cluster.table import PEERS, ROWS, Found, Row, text, values, verdict

MACHINE = {
    **dict.fromkeys(("cpu", "cpus", "memory_gib", "kernel", "python", "torch", "load_before"), 1),
    "virtual": False,
}
TIME = Row("node.next", "next call", 2.0)


def found(key: str, *figures: float) -> Found:
    made = Found(MACHINE)
    for each in figures:
        made.note("", {key: each})
    return made


@pytest.mark.parametrize(
    ("row", "figures", "state"),
    [
        (TIME, [1.0] * 5 + [2.0] * 5, "met"),
        (TIME, [1.0] * 8 + [2.1] * 2, "missed"),  # the median does, its interval does not
        (TIME, [1.0] * 9 + [9.0], "met"),  # one that is far out is not in the interval
        (Row("cuts.0.3", "ranks lost", 0, "total"), [0.0] * 100, "met"),
        (Row("cuts.0.3", "ranks lost", 0, "total"), [0.0] * 99 + [1.0], "missed"),
        (Row("eight.epochs", "epochs", 1, "each"), [1.0] * 10, "met"),
        (Row("eight.epochs", "epochs", 1, "each"), [1.0] * 9 + [2.0], "missed"),
        (Row("start.memory", "memory", 85 << 20, "bytes"), [float(84 << 20)], "met"),
    ],
)
def test_a_target_is_met_by_the_whole_interval_and_by_every_count(
    row: Row, figures: list[float], state: str
) -> None:
    assert verdict(row, found(row.key, *figures)).state == state


def test_what_was_not_measured_says_why_by_the_part_of_the_run() -> None:
    made = Found(MACHINE)
    made.why["ray"] = "Ray is not in this environment"

    states = {row.key: verdict(row, made) for row in ROWS}

    assert states["ray.agent.known"].why == "Ray is not in this environment"
    assert states["rank.known"].why == "not asked for"
    assert {each.state for each in states.values()} == {"not measured"}


def test_a_part_that_broke_has_not_met_a_target_whatever_it_had_measured() -> None:
    made = found("silence.overlap", 0.0, 0.0)
    made.why["silence"] = "broke: AssertionError: ranks that were to be lost have answered"

    held = next(each for each in values(made)["targets"] if "two places at once" in each["what"])

    assert (held["state"], held["value"]) == ("not measured", 0.0)
    row = next(line for line in text(made).splitlines() if "two places at once" in line)
    assert "| 2      | 0       | not measured: broke: AssertionError" in row


def test_a_row_tells_its_median_its_tail_its_rounds_and_its_target() -> None:
    made = found("node.next", 1.0, 1.2, 1.1)
    made.note("calls", {"empty.4": 0.0005})
    made.tails["calls.empty.4"] = [0.004]
    made.note("accounts", {"calls": 10_000, "lost": 0})

    lines = [line.split("|")[1:-1] for line in text(made).splitlines() if line.startswith("|")]
    cells = {line[0].strip(): [cell.strip() for cell in line[1:]] for line in lines}

    assert cells["- ranks serve on a spare node"][0] == "-"  # the later row of that name: on Ray
    assert ["1.10 (1.00 to 1.20) s", "1.20 s", "3", "2.00 s", "met"] in [
        [cell.strip() for cell in line[1:]] for line in lines
    ]
    assert cells["empty call to 4 ranks of one far node"][:2] == ["500 (500 to 500) us", "4.00 ms"]
    assert cells["calls while nodes are killed and cut off"] == ["10000", "", "1", "", ""]
    assert cells["- calls lost"] == ["0", "", "1", "0", "met"]


def test_every_row_has_a_key_of_its_own_and_the_values_are_json() -> None:
    keys = [row.key for row in (*ROWS, *PEERS)]

    told = json.loads(json.dumps(values(found("rank.known", 0.01)), allow_nan=False))

    assert len(set(keys)) == len(keys)
    assert len(told["targets"]) == sum(row.most is not None for row in ROWS)
    assert told["figures"] == {"rank.known": [0.01]}
