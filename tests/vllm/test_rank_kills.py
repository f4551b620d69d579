"""A real engine on processors: its ranks are killed, and every answer is the one without kills."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

KINDS = "prefill,decode,twice,both,recovery,stop"


def untouched(result: dict[str, Any]) -> bool:
    """Whether no request was lost or changed, and the answers were worth comparing."""
    return (
        result["ok"]
        and result["varied"] > 5
        and all(each["lost"] == each["different"] == 0 for each in result["rounds"])
    )


def kills(result: dict[str, Any]) -> int:
    return sum(each["kills"] for each in result["rounds"])


@pytest.mark.timeout(1600)
@pytest.mark.parametrize("engine", ["inprocess", "core", "server"])
def test_every_answer_under_attack_is_the_one_without(
    survive: Callable[..., dict[str, Any]], engine: str
) -> None:
    result = survive("--engine", engine, "--kinds", KINDS, "--kills", "6", "--seed", "1")

    assert untouched(result), result["rounds"]
    assert kills(result) >= 6
    if engine == "server":
        told = result["told"]
        assert told["health"] == "serving"
        assert float(told["vllm:phalanx_recoveries_total"]) >= 6
        assert float(told["vllm:phalanx_recomputed_total"]) > 6
        assert float(told['vllm:phalanx_recovery_seconds_total{phase="restore"}']) > 0


@pytest.mark.timeout(1600)
def test_spare_processes_take_over(survive: Callable[..., dict[str, Any]]) -> None:
    result = survive("--standby", "2", "--kinds", "decode,both", "--kills", "4", "--seed", "2")

    assert untouched(result), result["rounds"]
    assert kills(result) >= 4


@pytest.mark.timeout(1600)
@pytest.mark.parametrize("engine", ["core", "server"])
def test_steps_that_overlap_are_all_begun_again(
    survive: Callable[..., dict[str, Any]], engine: str
) -> None:
    # Two pipeline stages: the engine core has sent the next step before the last one is there.
    options = ["--pipeline", "--kinds", "decode,prefill,both", "--kills", "3", "--seed", "4"]

    result = survive("--engine", engine, *options)

    assert untouched(result), result["rounds"]
    assert kills(result) >= 3


@pytest.mark.timeout(1600)
def test_prompts_that_are_computed_in_parts_go_on(survive: Callable[..., dict[str, Any]]) -> None:
    # Where nothing dies they fit into one step each; with what has been generated they do not.
    options = ["--engine", "inprocess", "--prefill-budget", "128", "--kinds", "decode,prefill"]

    result = survive(*options, "--kills", "3", "--seed", "3")

    assert untouched(result), result["rounds"]


@pytest.mark.timeout(1600)
@pytest.mark.parametrize("engine", ["inprocess", "core", "server"])
def test_one_restart_too_many_ends_the_engine_with_the_crash_report_in_the_clients_error(
    survive: Callable[..., dict[str, Any]], engine: str
) -> None:
    options = ["--engine", engine, "--restarts", "0", "--kinds", "decode", "--kills", "1"]

    struck = survive(*options, "--seed", "5")["rounds"][-1]

    assert struck["lost"] > 0
    assert "SIGKILL" in struck["error"]
    assert "more than 0 restarts" in struck["error"]


@pytest.mark.timeout(1600)
def test_the_stock_executor_loses_every_request_to_the_same_kill(
    survive: Callable[..., dict[str, Any]],
) -> None:
    ours = survive("--kills", "0")

    stock = survive("--stock", "--kinds", "decode", "--kills", "1", "--seed", "1")

    struck = stock["rounds"][-1]
    unfinished = [each for each in stock["answers"] if each["tokens"]]
    assert struck["lost"] > 0
    assert "EngineDeadError" in struck["error"]
    assert unfinished
    assert ours["answers"] == stock["answers"]
