"""Survivors of groups that use NCCL, with a stand-in whose abort ends, hangs, lies or raises."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.support.fake_nccl import NcclKeeper
from tests.support.options import Make, with_defaults
from tests.support.processes import wait_until
from tests.support.rank_faults import OFTEN, kill, wait_healed
from tests.support.survivors import Keeper

from phalanx.actors import Executor, RestartPolicy
from phalanx.runtime import Runtime
from phalanx.supervision import Decider, Directive, Rule, WorkerDied

LONG = 60.0
Build = Callable[..., Executor[Any]]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Each abort: the rank, what it did, whether torch had a default group then."""
    return tmp_path / "aborts"


@pytest.fixture
def build(make: Make, torch_runtime: Runtime, log: Path) -> Build:
    def build(
        how: str = "end", *, worker: type[Keeper] = NcclKeeper, **options: Any
    ) -> Executor[Any]:
        env = {"FAKE_NCCL_ABORT": how, "FAKE_NCCL_RANK": "0", "FAKE_NCCL_LOG": str(log)}
        usual = with_defaults(
            options,
            policy=RestartPolicy(survivors="keep"),
            launch={"preload": ("torch",), "env": env},
            runtime=torch_runtime,
            intensity=OFTEN,
        )
        return make(worker, 3, **usual)

    return build


def interrupt(
    ex: Executor[Any], mark: Path, method: str = "reduce_in_world", *args: Any, gather: bool = False
) -> Any:
    """Kill rank 1 while all are in *method*; return the call's future."""
    call = ex.gather if gather else ex.collective_rpc
    busy = call(method, args=(str(mark), *args), non_block=True)
    wait_until(lambda: all(Path(f"{mark}.{rank}").exists() for rank in range(3)))
    kill(ex, 1)
    return busy


@pytest.mark.parametrize("method", ["reduce_in_part", "reduce_in_world"])
def test_every_group_is_aborted_and_the_survivors_meet_again(
    build: Build, log: Path, tmp_path: Path, method: str
) -> None:
    ex = build()
    before = [info.pid for info in ex.ranks]

    busy = interrupt(ex, tmp_path / "begun", method)

    assert isinstance(busy.exception(LONG), WorkerDied)
    wait_healed(ex, 1)
    assert ex.collective_rpc("total", LONG) == [3.0] * 3
    assert [info.pid for info in ex.ranks][0::2] == before[0::2]
    assert [loads for loads, *_ in ex.collective_rpc("kept", LONG)] == [1, 1, 1]
    lines = log.read_text().splitlines()
    # World and split group, twice: under the call that waits, and when the group is left.
    assert sorted(lines) == ["0 end False"] * 4 + ["2 end False"] * 4


@pytest.mark.parametrize("method", ["reduce_in_part", "reduce_in_reply", "reduce_in_output"])
def test_a_result_that_an_abort_has_made_undefined_is_not_answered(
    build: Build, tmp_path: Path, method: str
) -> None:
    ex = build()

    found = interrupt(ex, tmp_path / "begun", method, gather=True).result(LONG)

    assert [outcome.ok for outcome in found] == [False] * 3
    assert ex.collective_rpc("total", LONG, retries=5) == [3.0] * 3


def test_no_rank_is_aborted_before_each_knows_that_its_results_are_void(
    build: Build, tmp_path: Path
) -> None:
    call = interrupt(build(), tmp_path / "begun", "answer_after_an_abort", gather=True)

    assert "undefined" in str(call.result(LONG)[2].error)


def test_no_decider_is_asked_about_a_result_that_is_undefined(build: Build, tmp_path: Path) -> None:
    decider = Decider((Rule(Exception, Directive.RESTART),))
    ex = build(policy=RestartPolicy(survivors="keep", decider=decider))
    before = [info.pid for info in ex.ranks]

    interrupt(ex, tmp_path / "begun", "reduce_in_part").exception(LONG)

    assert ex.collective_rpc("total", LONG, retries=5) == [3.0] * 3
    assert [info.pid for info in ex.ranks][0::2] == before[0::2]


@pytest.mark.parametrize("worker", [NcclKeeper, Keeper])
def test_an_output_that_was_put_off_is_not_computed_in_the_next_group(
    build: Build, tmp_path: Path, worker: type[Keeper]
) -> None:
    ex = build(worker=worker)
    first = ex.gather("total_later", args=(str(tmp_path / "first"), 0.0), non_block=True)
    second = ex.gather("total_later", args=(str(tmp_path / "second"), 1.0), non_block=True)
    wait_until(lambda: all((tmp_path / f"first.{rank}").exists() for rank in range(3)))

    kill(ex, 1)

    for call in (first, second):
        assert [outcome.ok for outcome in call.result(LONG)] == [False] * 3
    assert ex.collective_rpc("total", LONG, retries=5) == [3.0] * 3


def test_an_item_of_a_stream_that_an_abort_has_made_undefined_is_not_sent(
    build: Build, tmp_path: Path
) -> None:
    ex = build()
    mark = tmp_path / "begun"
    stream = ex.stream("reduce_in_stream", args=(str(mark),), rank=0)
    assert next(stream) == 1.0
    with ThreadPoolExecutor(1) as threads:
        rest = threads.submit(list[Any], stream)
        wait_until(Path(f"{mark}.0").exists)
        kill(ex, 1)
        error = rest.exception(LONG)
    assert "undefined" in str(error)


def test_a_survivor_that_computes_on_after_the_abort_is_kept(build: Build, tmp_path: Path) -> None:
    ex = build(policy=RestartPolicy(survivors="keep", leave_within=30.0))
    before = [info.pid for info in ex.ranks]

    busy = interrupt(ex, tmp_path / "begun", "compute_after", 3.0)

    assert isinstance(busy.exception(LONG), WorkerDied)
    assert ex.collective_rpc("total", LONG, retries=5) == [3.0] * 3
    assert [info.pid for info in ex.ranks][0::2] == before[0::2]


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("hang", "the abort of its 2 NCCL process group(s) did not return within 5 s"),
        ("raise", "the abort of its 2 NCCL process group(s) failed: NCCL error: unhandled cuda"),
        ("lie", "it waits in an aborted process group and gets no error"),
    ],
)
def test_a_survivor_whose_abort_fails_is_replaced_and_the_report_says_so(
    build: Build, tmp_path: Path, how: str, why: str
) -> None:
    ex = build(how, policy=RestartPolicy(survivors="keep", leave_within=30.0))
    before = [info.pid for info in ex.ranks]

    busy = interrupt(ex, tmp_path / "begun")

    assert isinstance(busy.exception(LONG), WorkerDied)
    assert ex.collective_rpc("total", LONG, retries=5) == [3.0] * 3
    after = [info.pid for info in ex.ranks]
    reports = ex.status().reports
    told = "\n".join(report.render() for report in reports)
    assert [a == b for a, b in zip(before, after, strict=True)] == [False, False, True], told
    assert [report.rank for report in reports] == [1, 0]
    assert why in reports[-1].reason.detail
    assert ex.status().restarts_in_window == 1


def test_torch_neither_ends_nor_holds_up_a_survivor_where_the_user_does_not_say_so(
    build: Build,
) -> None:
    ex = build(launch={"rank_env": [{}, {"TORCH_NCCL_TRACE_BUFFER_SIZE": "7"}, {}]})  # its old name
    names = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_FR_BUFFER_SIZE")
    found = ex.collective_rpc("variables", LONG, args=(*names, "TORCH_NCCL_TRACE_BUFFER_SIZE"))
    assert found == [["0", "0", None], ["0", None, "7"], ["0", "0", None]]
