"""A CUDA error on any ranks is a lost step, wherever it is raised; a poison request ends alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.mark.timeout(1600)
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_request_outlives_the_device_errors_of_its_workers(
    said_by: Callable[..., dict[str, Any]], ranks: int
) -> None:
    said = said_by("device_errors.py", str(ranks))

    assert "a mistake" in said["refused"]  # and nothing else kept it from starting
    assert said["shared"] == []
    assert (said["started"], said["left"]) == (2, [])
    assert "illegal memory access" in said["report"]
    rounds = {name: each for name, each in said.items() if name.endswith(("True", "False"))}
    for name, each in rounds.items():
        right = said[f"right {name.rpartition(' ')[2]}"]
        assert each["answers"] == right["answers"], name
        expected = {"right": 0, "after": 0, "replay": 2}.get(name.partition(" ")[0], 1)
        assert (each["restarts"], each["left"]) == (expected, []), name
    assert len(rounds) == {1: 8, 2: 17}[ranks]

    right, poison = said["right False"]["answers"], said["poison"]
    assert [finish for _, finish in poison["answers"]] == ["length", "error", "length", "length"]
    assert [poison["answers"][n] for n in (0, 2, 3)] == [right[n] for n in (0, 2, 3)]
    assert poison["restarts"] == 3
