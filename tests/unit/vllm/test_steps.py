"""The steps of an engine, in which workers die; what they are made of is not vLLM's."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.integrations.vllm import compat
from phalanx.integrations.vllm.recovery import StaleEpoch
from phalanx.supervision import ExecutorClosed


@dataclass
class Output:
    """What stands for vLLM's ``ModelRunnerOutput``."""

    req_ids: list[str]
    req_id_to_index: dict[str, int]
    sampled_token_ids: list[list[int]] = field(default_factory=list[list[int]])


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    name = "phalanx.integrations.vllm.steps"
    monkeypatch.setitem(vars(compat), "ModelRunnerOutput", Output)
    monkeypatch.setitem(vars(compat), "init_logger", logging.getLogger)
    monkeypatch.delitem(sys.modules, name, raising=False)
    yield import_module(name)
    del sys.modules[name]


@dataclass
class Workers:
    """The group and its recovery at once: each call raises *error*, if there is one."""

    error: Exception | None = None
    epoch: int = 1
    down: int = 0
    rows: int = 0
    made: list[str] = field(default_factory=list[str])

    def collective_rpc(self, method: str, **_: Any) -> str:
        self.made.append(method)
        if self.error is not None:
            raise self.error
        return method

    def end_row(self) -> None:
        self.rows += 1


def steps_of(module: Any, workers: Workers) -> Any:
    def end_error() -> Exception:
        return RuntimeError("it has ended")

    return module.Steps(workers, workers, output_rank=0, samples=True, end_error=end_error)


def test_a_step_of_workers_that_were_known_to_be_dead_was_never_begun(module: Any) -> None:
    workers = Workers(error=StaleEpoch("gone"))
    flying = steps_of(module, workers).execute_model(SimpleNamespace())
    workers.down = 1
    idle = steps_of(module, workers).execute_model(SimpleNamespace())

    assert (flying.epoch, flying.begun) == (1, True)
    assert (idle.epoch, idle.begun, idle.req_ids) == (1, False, [])
    assert workers.rows == 0


def test_an_output_ends_the_row_of_restarts(module: Any) -> None:
    workers = Workers()

    assert steps_of(module, workers).execute_model(SimpleNamespace()) == "execute_model"

    assert workers.rows == 1


def test_drafts_are_taken_by_a_method_that_has_the_limit_of_a_step(module: Any) -> None:
    workers = Workers()
    steps = steps_of(module, workers)

    assert steps.take_draft_token_ids() == "take_draft_token_ids"
    workers.error = StaleEpoch("gone")
    assert steps.take_draft_token_ids() is None
    workers.error = ExecutorClosed("too many restarts")
    with pytest.raises(RuntimeError, match="it has ended"):
        steps.take_draft_token_ids()
