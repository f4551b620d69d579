"""What a client is told of the end of its engine."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

from tests.support.programs import run_python

_PROGRAM = """
from vllm.plugins import load_general_plugins  # as an API server does
from phalanx.integrations.vllm.engine_state import EngineState
from vllm.v1.engine.exceptions import EngineDeadError

load_general_plugins()
EngineState().set("ended", "rank 1 died")
print(EngineDeadError())
"""


def test_an_engine_is_not_blamed_for_the_end_of_the_one_before() -> None:
    import_module("phalanx.integrations.vllm.executor")
    state: Any = import_module("phalanx.integrations.vllm.engine_state").EngineState
    died: Any = import_module("vllm.v1.engine.exceptions").EngineDeadError

    state().set("ended", "rank 1 died of the first engine")
    told = str(died())
    state()

    assert "of the first engine" in told
    assert "of the first engine" not in str(died())


def test_a_program_that_another_client_has_started_gets_the_reason_too() -> None:
    import_module("phalanx.integrations.vllm.executor")  # names the folder, in this environment
    assert "PHALANX_VLLM_STATE" in os.environ

    done = run_python("-c", _PROGRAM, timeout=300)

    assert "rank 1 died" in done.stdout, done.stderr
