"""The small values the core is made of."""

from __future__ import annotations

import gc
import pickle
import threading
import weakref
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.supervised_actors import LIMIT

from phalanx.supervision import (
    GPU_WORKER,
    NORMAL,
    BackOff,
    CallTimeout,
    ChildRefused,
    Decider,
    Directive,
    Down,
    ExitKind,
    ExitReason,
    Intensity,
    NoDevice,
    PhalanxError,
    Restart,
    Rule,
    Unhealthy,
    is_broken_process_group,
)
from phalanx.supervision.core.machine import verdict
from phalanx.supervision.tree.monitors import Lifeline, link
from phalanx.supervision.tree.services import ThreadTimers

CRASH = ExitReason(ExitKind.CRASH)
SHUTDOWN = ExitReason(ExitKind.SHUTDOWN)


def test_a_callback_that_raises_is_reported_and_later_ones_are_still_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reported: list[BaseException | None] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: reported.append(args.exc_value))
    timers, called, error = ThreadTimers(), threading.Event(), SystemExit(3)

    def fail() -> None:
        raise error

    timers.call_at(0.0, fail)
    timers.call_at(0.0, called.set)

    assert called.wait(LIMIT)
    assert reported == [error]
    timers.close()


def test_both_ends_of_the_period_count() -> None:
    window = Intensity(1, 5.0).window().admit(1.0)

    assert window is not None
    assert window.admit(6.0) is None
    assert window.admit(6.000001) is not None


@given(st.integers(1, 10**6), st.floats(0, 1, exclude_max=True))
def test_delays_stay_within_the_cap(attempt: int, jitter: float) -> None:
    backoff = BackOff(0.2, 3.0, 20.0, 0.5)

    assert 0 <= backoff.delay(attempt, jitter) <= 20.0


def test_delays_grow_by_the_factor_and_start_over_after_a_healthy_time() -> None:
    backoff = BackOff(1.0, 2.0, 10.0, 0.0, reset_after=30.0)

    assert [backoff.delay(attempt) for attempt in (1, 2, 3, 4, 5, 6)] == [1, 2, 4, 8, 10, 10]
    assert BackOff(1e-300, maximum=1e300).delay(10**6) == 1e300
    assert backoff.attempt_after(4, healthy_for=29.9) == 5
    assert backoff.attempt_after(4, healthy_for=30.0) == 1


@pytest.mark.parametrize(
    ("restart", "reason", "directive", "wanted"),
    [
        (Restart.PERMANENT, CRASH, Directive.STOP, Directive.STOP),
        (Restart.TRANSIENT, NORMAL, Directive.RESTART, Directive.RESTART),
        (Restart.TEMPORARY, CRASH, Directive.RESTART, Directive.STOP),
        (Restart.TEMPORARY, CRASH, Directive.ESCALATE, Directive.ESCALATE),
        (Restart.TRANSIENT, NORMAL, Directive.RESUME, Directive.STOP),
    ],
)
def test_a_decider_goes_before_the_restart_type_but_for_what_is_temporary(
    restart: Restart, reason: ExitReason, directive: Directive, wanted: Directive
) -> None:
    assert verdict(restart, reason, directive) is wanted


def test_the_first_rule_that_applies_decides() -> None:
    decider = Decider(
        (
            Rule(KeyError, Directive.STOP, child="b"),
            Rule(LookupError, Directive.RESTART),
            Rule(ExitKind.KILLED, Directive.ESCALATE),
            Rule("unresponsive", Directive.STOP),
            Rule(lambda cause: "odd" in str(cause), Directive.RESUME),
        )
    )

    assert decider.directive(KeyError("k"), "a") is Directive.RESTART
    assert decider.directive(KeyError("k"), "b") is Directive.STOP
    assert decider.directive(ExitReason(ExitKind.KILLED)) is Directive.ESCALATE
    assert decider.directive(ExitReason(ExitKind.UNRESPONSIVE)) is Directive.STOP
    assert decider.directive(ValueError("odd")) is Directive.RESUME
    assert decider.directive(ValueError("even")) is None


def test_a_rule_whose_predicate_returns_what_has_no_truth_does_not_apply() -> None:
    class Neither:
        def __bool__(self) -> bool:
            raise ValueError("neither")

    def vague(_cause: object) -> Any:
        return Neither()

    failed: list[BaseException] = []
    decider = Decider((Rule(vague, Directive.STOP),), Directive.RESTART)

    assert decider.directive(CRASH, failed=failed.append) is Directive.RESTART
    assert [type(error) for error in failed] == [ValueError]


def test_gpu_workers_go_on_after_a_lack_of_memory_and_restart_after_a_broken_context() -> None:
    class OutOfMemoryError(RuntimeError):
        """Named as torch names it, which the driver does not import."""

    class AcceleratorError(RuntimeError):
        """Likewise."""

    advice = "\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"  # torch's

    def of_cuda(text: str) -> Exception:
        return AcceleratorError(f"CUDA error: {text}{advice}")

    assert GPU_WORKER.directive(OutOfMemoryError("CUDA out of memory")) is Directive.RESUME
    assert GPU_WORKER.directive(of_cuda("out of memory")) is Directive.RESUME
    for text in ("an illegal memory access was encountered", "device-side assert triggered"):
        assert GPU_WORKER.directive(of_cuda(text)) is Directive.RESTART
        assert GPU_WORKER.directive(RuntimeError(f"CUDA error: {text}")) is Directive.RESTART
        wrapper = ValueError("the batch failed")
        wrapper.__cause__ = of_cuda(text)
        assert GPU_WORKER.directive(wrapper) is Directive.RESTART
        assert GPU_WORKER.directive(KeyError(f"how to mend the CUDA error: {text}")) is (
            Directive.RESUME
        )
    assert GPU_WORKER.directive(ValueError("bad shape")) is Directive.RESUME
    assert GPU_WORKER.directive(CRASH) is None


def test_errors_of_gloo_count_as_a_broken_process_group_and_others_do_not() -> None:
    backend_error = type("DistBackendError", (RuntimeError,), {})  # named as torch names it

    def wrapped(cause: Exception) -> Exception:
        error = KeyError("loss")
        error.__cause__ = cause
        return error

    gone = RuntimeError(
        "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] "
        "Connection closed by peer [127.0.0.1]:4711"
    )

    nccl = RuntimeError("NCCL error: remote process exited or there was a network error")
    for error in (gone, wrapped(gone), backend_error("Watchdog"), nccl):
        assert is_broken_process_group(error)
        assert GPU_WORKER.directive(error) is Directive.RESTART
    for error in (RuntimeError("shape mismatch"), ValueError("gloo"), wrapped(ValueError("x"))):
        assert not is_broken_process_group(error)
    assert not is_broken_process_group(CRASH)


@pytest.mark.parametrize(
    "error",
    [
        ChildRefused("not_found", "a"),
        CallTimeout("f", (1,), 2.0, sent=False, reports=("r",)),
        Unhealthy("f", (0,), 1.0, {0: "busy"}, {0: "busy for 3 s"}),
        NoDevice("rank 0", 2, leased={"cuda:0": ("a",)}, quarantined={}).after("5 s"),
    ],
)
def test_an_error_keeps_its_text_attributes_and_notes_when_it_is_pickled(
    error: PhalanxError,
) -> None:
    error.add_note("seen")

    again = pickle.loads(pickle.dumps(error))

    assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))


def test_a_monitor_that_another_cancels_at_the_end_is_not_called() -> None:
    line, told = Lifeline("a", print, print), list[Down]()
    line.monitor(lambda _: cancel())
    cancel = line.monitor(told.append)
    line.monitor(told.append)

    line.end(CRASH)

    assert told == [Down("a", CRASH)]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("ended", [0, 1])
def test_what_has_ended_is_not_kept_by_what_it_was_linked_to(ended: int, late: bool) -> None:
    ends: list[ExitReason] = []
    sides = [Lifeline(path, ends.append, lambda *_: None) for path in "ab"]
    gone = weakref.ref(sides[ended])

    if late:
        sides[ended].end(CRASH)
    link(*sides)
    sides[ended].end(CRASH)
    del sides[ended]
    gc.collect()

    assert gone() is None
    assert ends == [CRASH]
