"""After a restart an engine serves the weights of the last update, or nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

SaidBy = Callable[..., dict[str, Any]]


@pytest.mark.timeout(1600)
@pytest.mark.parametrize("how", ["replay", "hook"])
def test_a_loop_that_updates_weights_goes_on_with_the_newest_ones(
    said_by: SaidBy, how: str
) -> None:
    said = said_by("updated_weights.py", how)

    assert len({str(answers) for answers in said["right"]}) == 6  # each version answers otherwise
    assert said.get("killed") == said["right"], said.get("error")
    assert said["restarts"] == 6
    assert said["hook"] == (6 if how == "hook" else 0)


@pytest.mark.timeout(1600)
def test_without_a_replay_or_a_hook_the_first_restart_ends_the_engine(said_by: SaidBy) -> None:
    said = said_by("updated_weights.py", "neither")

    assert "weights may have been set by set_weights, and died with its workers" in said["error"]
    assert "killed" not in said
    assert said["ended"]
    assert said["restarts"] == 1
    assert said["after"] == "EngineEnded"
