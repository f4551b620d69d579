"""What a client is told of the end of its engine."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def test_an_engine_is_not_blamed_for_the_end_of_the_one_before() -> None:
    story: Any = import_module("phalanx.integrations.vllm.story")
    died: Any = import_module("vllm.v1.engine.exceptions").EngineDeadError

    story.tell_story("rank 1 died of the first engine")
    told = str(died())
    story.forget_story()

    assert "of the first engine" in told
    assert "of the first engine" not in str(died())
