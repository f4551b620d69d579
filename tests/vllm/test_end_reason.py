"""What a client is told of the end of its engine."""

from __future__ import annotations

import subprocess
import sys
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


_PROGRAM = """
from phalanx.integrations.vllm import story
from vllm.v1.engine.exceptions import EngineDeadError

story.tell_story("rank 1 died")
print(EngineDeadError())
"""


def test_a_program_that_another_client_has_started_gets_the_reason_too() -> None:
    import_module("phalanx.integrations.vllm.story")  # names the file, in this environment

    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=300, check=False
    )

    assert "rank 1 died" in done.stdout, done.stderr
