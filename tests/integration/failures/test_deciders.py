"""What an exception of a method means for the process that raised it."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.support.options import Make
from tests.support.rank_faults import OFTEN, kill, telling
from tests.support.workers import Echo, Late

from phalanx.actors import Executor, RestartPolicy
from phalanx.runtime import Fate
from phalanx.supervision import (
    GPU_WORKER,
    Decider,
    Directive,
    ExecutorClosed,
    ExitKind,
    Restart,
    Rule,
    Strategy,
)

LONG = 30.0
# In torch's own words.
STICKY = "CUDA error: device-side assert triggered\nCompile with TORCH_USE_CUDA_DSA"


class OutOfMemoryError(RuntimeError):
    """What torch's is called."""


class Gpuless(Echo):
    def trip(self) -> None:
        raise RuntimeError(STICKY)

    def exhaust(self) -> None:
        raise OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    def later(self) -> Any:
        return Late(RuntimeError(STICKY))

    def mistake(self) -> None:
        raise KeyError("shape")


USUAL = {"worker": Gpuless, "world_size": 1, "strategy": Strategy.ONE_FOR_ONE, "intensity": OFTEN}


def incarnation(ex: Executor[Any], rank: int = 0) -> int:
    found: int = ex.call("who", LONG, rank=rank)["incarnation"]
    return found


@pytest.mark.parametrize("method", ["trip", "later"])
def test_a_cuda_error_that_sticks_reaches_the_caller_and_ends_the_process(
    make: Make, method: str
) -> None:
    ex = make(world_size=2)

    with pytest.raises(RuntimeError, match="device-side assert") as raised:
        ex.call(method, LONG, rank=1)

    assert type(raised.value) is RuntimeError
    assert (incarnation(ex, 1), incarnation(ex, 0)) == (2, 1)
    report = ex.status().reports[-1]
    assert (report.rank, report.reason.kind) == (1, ExitKind.CRASH)
    assert "device-side assert" in str(report.reason)
    assert "ended by the decider (restart)" in report.stderr
    assert method == "later" or "in trip" in report.stderr


def test_a_cuda_error_that_sticks_ends_a_process_that_has_closed_its_stdout_too(make: Make) -> None:
    ex = make()
    ex.call(lambda _: sys.stdout.close(), LONG, rank=0)

    with pytest.raises(RuntimeError, match="device-side assert"):
        ex.call("later", LONG, rank=0)

    assert incarnation(ex) == 2
    assert ex.status().reports[-1].reason.kind is ExitKind.CRASH


def trip(worker: Any, ranks: tuple[int, ...], *, later: bool) -> Any:
    """Fail on *ranks* by a CUDA error that sticks, once for each rank."""
    if worker.ctx.rank in ranks and worker.ctx.incarnation == 1:
        return worker.later() if later else worker.trip()
    return worker.ctx.incarnation


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("ranks", [(1,), (0, 1)])
def test_a_cuda_error_that_sticks_costs_a_retry_as_a_death_does(
    make: Make, ranks: tuple[int, ...], later: bool
) -> None:
    ex = make(world_size=2, strategy=Strategy.ONE_FOR_ALL)

    answers = ex.collective_rpc(trip, LONG, (ranks,), {"later": later}, retries=1)

    assert answers == [2, 2]
    report = ex.status().reports[-1]
    assert "device-side assert" in str(report.reason)
    assert [(call.fate, call.begun) for call in report.calls] == [(Fate.SENT_AGAIN, True)]


@pytest.mark.parametrize("rank", [0, None])
def test_a_call_to_one_rank_is_made_again_too_and_not_more_often_than_asked(
    make: Make, rank: int | None
) -> None:
    ex = make()

    def ask(method: Any, **kwargs: Any) -> Any:
        if rank is None:
            return ex.submit(method, LONG, kwargs=kwargs, retries=1).result(LONG)
        return ex.call(method, LONG, kwargs=kwargs, retries=1, rank=rank)

    assert ask(trip, ranks=(0,), later=False) == 2
    with pytest.raises(RuntimeError, match="device-side assert"):
        ask("trip")

    assert incarnation(ex) == 4


def test_out_of_memory_and_mistakes_leave_the_worker_in_service(make: Make) -> None:
    ex = make()

    for method in ("exhaust", "mistake"):
        with pytest.raises((OutOfMemoryError, KeyError)):
            ex.call(method, LONG, rank=0)

    assert incarnation(ex) == 1


def test_the_users_decider_may_restart_after_any_error(make: Make) -> None:
    ex = make(
        policy=RestartPolicy(
            decider=Decider((Rule(KeyError, Directive.RESTART), *GPU_WORKER.rules))
        )
    )

    with pytest.raises(KeyError):
        ex.call("mistake", LONG, rank=0)
    assert incarnation(ex) == 2

    with pytest.raises(OutOfMemoryError):
        ex.call("exhaust", LONG, rank=0)
    assert incarnation(ex) == 2


@pytest.mark.parametrize(
    ("directive", "says"),
    [(Directive.STOP, "was stopped by the decider"), (Directive.ESCALATE, "escalated")],
)
def test_the_users_decider_may_end_the_group(make: Make, directive: Directive, says: str) -> None:
    ex = make(
        world_size=2, policy=RestartPolicy(decider=Decider((Rule(KeyError, directive, child="1"),)))
    )
    told: list[Any] = []
    once = threading.Event()

    ex.register_failure_callback(telling(told, once))
    with pytest.raises(KeyError):
        ex.call("mistake", LONG, rank=0)
    assert incarnation(ex, 0) == 1  # a rule for another rank

    with pytest.raises(KeyError):
        ex.call("mistake", LONG, rank=1)

    assert once.wait(LONG)
    assert says in str(told[0])
    assert len(told) == 1
    with pytest.raises(ExecutorClosed):
        ex.call("echo", LONG, rank=0)
    assert f"{directive} by the decider" in ex.status().reports[-1].decision


def test_the_users_decider_overrules_the_restart_type(make: Make) -> None:
    decider = Decider((Rule(ExitKind.KILLED, Directive.RESTART),))
    ex = make(policy=RestartPolicy(restart=Restart.TEMPORARY, decider=decider))

    kill(ex, 0)

    assert incarnation(ex) == 2


def test_the_decider_is_asked_once_about_each_exception(make: Make, tmp_path: Path) -> None:
    asked = tmp_path / "asked"

    def ask(cause: Any) -> bool:
        with asked.open("a") as file:
            file.write(f"{type(cause).__name__}\n")
        return False

    ex = make(policy=RestartPolicy(decider=Decider((Rule(ask, Directive.STOP),))))
    for _ in range(2):
        with pytest.raises(KeyError):
            ex.call("mistake", LONG, rank=0)

    assert asked.read_text().split() == ["KeyError", "KeyError"]
