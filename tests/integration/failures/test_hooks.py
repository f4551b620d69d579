"""Whatever a hook does, and whichever it is: the calls are answered and the group goes on."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.support.failing_hooks import Fickle
from tests.support.options import Make
from tests.support.rank_faults import OFTEN, kill, wait_for_view

from phalanx.actors import CheckpointPolicy, Executor, Limits, RestartPolicy, StopPolicy
from phalanx.supervision import (
    ExecutorClosed,
    ExitKind,
    ExitReason,
    Restart,
    Strategy,
    WorkerDied,
)

LONG = 30.0
RAISES = ["raise", "unpicklable", "interrupt", "exit"]
# To hang takes a limit's time: hooks whose own tests have that already do not do so here.
WAYS = [*RAISES, "exit at once", "kill"]
ENDS = {
    "raise": (ExitKind.CRASH, "ValueError: it went wrong"),
    "unpicklable": (ExitKind.CRASH, "Unpicklable: it went wrong"),
    "interrupt": (ExitKind.CRASH, "KeyboardInterrupt"),
    "exit": (ExitKind.CRASH, "3"),
    "exit at once": (ExitKind.CRASH, "3"),
    "kill": (ExitKind.KILLED, ""),
    "hang": (ExitKind.UNRESPONSIVE, " took longer than "),
}


@pytest.fixture
def when(tmp_path: Path) -> Path:
    return tmp_path / "when"


@pytest.fixture
def make(make: Make, when: Path) -> Make:
    def build(hook: str, how: str, **options: Any) -> Executor[Any]:
        if how == "hang":
            options.setdefault("limits", Limits(start=2.0))
        return make(Fickle, args=(hook, how, str(when)), intensity=OFTEN, **options)

    return build


def check(ex: Executor[Any], how: str) -> None:
    """Check that the last death was for what the hook did."""
    kind, text = ENDS[how]
    reason = ex.status().reports[-1].reason
    assert reason.kind == kind
    assert text in str(reason)


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("hook", ["on_start", "restore"])
def test_a_restart_in_which_it_goes_wrong_is_done_again(
    make: Make, when: Path, hook: str, how: str
) -> None:
    ex = make(hook, how, checkpoint=CheckpointPolicy(every_calls=1))
    assert ex.collective_rpc("add", LONG) == [1, 1]
    when.touch()

    kill(ex, 0)

    assert ex.collective_rpc("add", LONG, retries=9) == [2, 2]
    check(ex, how)
    assert not when.exists()


@pytest.mark.parametrize("how", [*WAYS, "hang"])
def test_on_failure_does_not_hide_what_it_was_run_for(make: Make, when: Path, how: str) -> None:
    ex = make("on_failure", how, world_size=1)
    when.touch()

    kill(ex, 0)

    assert ex.collective_rpc("rank", LONG, retries=9) == [0]
    if how in RAISES:
        reason = ex.status().reports[-1].reason
        assert reason.kind is ExitKind.CRASH
        assert reason.detail.endswith("ValueError: the first thing that went wrong")
    else:
        check(ex, how)


@pytest.mark.parametrize("how", WAYS)
def test_a_survivor_whose_on_reform_goes_wrong_is_replaced_too(
    make: Make, when: Path, how: str
) -> None:
    ex = make(
        "on_reform", how, policy=RestartPolicy(survivors="keep"), strategy=Strategy.ONE_FOR_ALL
    )
    when.touch()

    kill(ex, 1)

    assert ex.collective_rpc("rank", LONG, retries=9) == [0, 1]
    check(ex, how)
    assert ex.ranks[0].incarnation == 2
    assert ex.status().restarts_in_window == 1
    assert "same restart" in ex.status().reports[-1].decision


@pytest.mark.parametrize("how", [*WAYS, "hang"])
def test_a_spare_whose_on_standby_goes_wrong_is_replaced(make: Make, when: Path, how: str) -> None:
    when.touch()

    ex = make("on_standby", how, world_size=1, standby=1)

    wait_for_view(ex, lambda view: view.standby == 1 and not when.exists())
    assert ex.status().restarts == 0
    assert ex.collective_rpc("rank", LONG) == [0]


# The others are in checkpoints/test_checkpoints.py.
@pytest.mark.parametrize("how", ["interrupt", "exit", "exit at once"])
def test_every_call_counts_once_whatever_checkpoint_does(make: Make, when: Path, how: str) -> None:
    ex = make("checkpoint", how, checkpoint=CheckpointPolicy(every_calls=1))
    assert ex.collective_rpc("add", LONG) == [1, 1]
    when.touch()

    again = ex.collective_rpc("add", LONG, retries=9)

    assert again == [2, 2]
    assert not when.exists()
    assert ex.collective_rpc("add", LONG) == [3, 3]


@pytest.mark.parametrize("how", [*WAYS, "hang"])
def test_a_planned_restart_goes_on_whatever_on_stop_does(make: Make, when: Path, how: str) -> None:
    limits = Limits(stop=StopPolicy(ask=0.3, terminate=0.3))
    ex = make("on_stop", how, world_size=1, limits=limits)
    when.touch()

    ex.restart(timeout=LONG)

    assert not when.exists()
    assert ex.collective_rpc("rank", LONG) == [0]
    assert ex.status().restarts == 0
    when.touch()
    ex.close()
    assert not when.exists()


def _raise(error: BaseException, _reason: ExitReason) -> None:
    raise error


def test_a_failure_callback_that_raises_prevents_no_other_call(make: Make) -> None:
    ex = make("", "", policy=RestartPolicy(restart=Restart.TEMPORARY))
    told: list[ExitReason] = []
    for error in (ValueError("it went wrong"), KeyboardInterrupt(), SystemExit(3)):
        ex.register_failure_callback(partial(_raise, error))
    ex.register_failure_callback(told.append)

    kill(ex, 0)

    assert ex.wait_closed(LONG)
    assert [reason.kind for reason in told] == [ExitKind.KILLED]


def test_a_failure_callback_that_hangs_holds_up_no_call(make: Make) -> None:
    ex = make("", "", world_size=1, policy=RestartPolicy(restart=Restart.TEMPORARY))
    told, end = threading.Event(), threading.Event()

    def hang(_reason: ExitReason) -> None:
        told.set()
        end.wait(LONG)

    ex.register_failure_callback(hang)
    call = ex.collective_rpc("gated", args=("/nowhere",), non_block=True)

    kill(ex, 0)

    assert isinstance(call.exception(LONG), WorkerDied)
    assert told.wait(LONG)
    end.set()
    with pytest.raises(ExecutorClosed):
        ex.collective_rpc("rank", LONG)
    assert ex.wait_closed(LONG)
