"""Decisions, by value: what is done, in order, for the rows that are easily got wrong."""

from __future__ import annotations

from typing import Any

import pytest

from phalanx.supervision import (
    KILLED,
    SHUTDOWN,
    ChildSpec,
    ExitKind,
    ExitReason,
    Intensity,
    Restart,
    Strategy,
    SupervisorSpec,
)
from phalanx.supervision.core.machine import Status, SupervisorMachine
from phalanx.supervision.core.messages import (
    Action,
    AlarmRang,
    Announce,
    BecomeReady,
    Booted,
    Event,
    Exit,
    Exited,
    KillChild,
    NotStarted,
    RetryDue,
    RetryLater,
    SetAlarm,
    StartChild,
    StartChildRequested,
    Started,
    StopRequested,
    TerminateChild,
    TerminateChildRequested,
)

CRASH = ExitReason(ExitKind.CRASH)


def start(ctx: Any) -> Any:
    raise AssertionError("nothing starts here")


class Bench:
    """A supervisor whose actions are read one by one; alarms and notices left out."""

    def __init__(self, *children: ChildSpec, strategy: Strategy, restarts: int = 5) -> None:
        spec = SupervisorSpec("top", strategy, Intensity(restarts, 60.0), children)
        self.machine = SupervisorMachine(spec)
        self.alarm = 0
        actions = self.deliver(Booted())
        while isinstance(actions[0], StartChild):
            actions = self.deliver(Started(actions[0].child, actions[0].serial))
        assert actions == [BecomeReady()]

    def serial(self, key: str) -> int:
        child = self.machine.children.get(key)
        assert child is not None
        return child.serial

    def deliver(self, event: Event, now: float = 1.0) -> list[Action]:
        actions = self.machine.handle(event, now)
        for action in actions:
            if isinstance(action, SetAlarm):
                self.alarm = action.alarm
        return [a for a in actions if not isinstance(a, Announce | SetAlarm)]

    def crash(self, key: str, reason: ExitReason = CRASH) -> list[Action]:
        return self.deliver(Exited(key, self.serial(key), reason))

    def told(self, actions: list[Action]) -> list[str]:
        """Return *actions* in short."""
        short = {StartChild: "start", TerminateChild: "stop", KillChild: "kill"}
        return [
            f"{short[type(a)]} {a.child}" if isinstance(a, StartChild | TerminateChild | KillChild)
            else type(a).__name__
            for a in actions
        ]  # fmt: skip


A, B, C = (ChildSpec(name, start) for name in "abc")


def test_one_for_all_waits_for_each_stop_before_the_next() -> None:
    bench = Bench(A, B, C, strategy=Strategy.ONE_FOR_ALL)
    a, b, c = (bench.serial(key) for key in "abc")

    assert bench.crash("b") == [TerminateChild("c", c, SHUTDOWN)]
    assert bench.deliver(Exited("c", c, SHUTDOWN)) == [TerminateChild("a", a, SHUTDOWN)]
    assert bench.told(bench.deliver(Exited("a", a, SHUTDOWN))) == ["start a"]
    assert b == bench.serial("b")


def test_a_crash_during_a_group_restart_is_absorbed_and_not_counted() -> None:
    bench = Bench(A, B, C, strategy=Strategy.ONE_FOR_ALL)
    a, c = bench.serial("a"), bench.serial("c")

    bench.crash("b")
    assert bench.deliver(Exited("a", a, CRASH)) == []  # c is being stopped: it has to wait
    actions = bench.deliver(Exited("c", c, SHUTDOWN))

    assert bench.told(actions) == ["start a"]
    for _ in range(3):
        assert isinstance(actions[0], StartChild)
        actions = bench.deliver(Started(actions[0].child, actions[0].serial)) or actions
    assert bench.machine.is_idle
    assert len(bench.machine.window.spent) == 1


def test_two_crashes_under_one_for_one_are_two_restarts() -> None:
    bench = Bench(A, B, strategy=Strategy.ONE_FOR_ONE)

    (first,) = bench.crash("a")
    assert bench.crash("b") == []
    assert isinstance(first, StartChild)
    (second,) = bench.deliver(Started("a", first.serial))

    assert isinstance(second, StartChild)
    assert second.child == "b"
    assert len(bench.machine.window.spent) == 2


def test_a_late_exit_of_an_earlier_incarnation_does_nothing() -> None:
    bench = Bench(A, strategy=Strategy.ONE_FOR_ONE)
    old = bench.serial("a")
    (again,) = bench.crash("a")
    assert isinstance(again, StartChild)
    bench.deliver(Started("a", again.serial))

    assert bench.deliver(Exited("a", old, CRASH)) == []
    assert len(bench.machine.window.spent) == 1


def test_a_failed_restart_is_tried_again_through_the_mailbox_and_counts_again() -> None:
    bench = Bench(A, strategy=Strategy.ONE_FOR_ONE, restarts=2)
    (first,) = bench.crash("a")
    assert isinstance(first, StartChild)

    assert bench.deliver(NotStarted("a", first.serial, OSError())) == [RetryLater("a", 0, 0)]
    (second,) = bench.deliver(RetryDue("a", 0))
    assert isinstance(second, StartChild)
    bench.deliver(NotStarted("a", second.serial, OSError()))

    (end,) = bench.deliver(RetryDue("a", 0))
    assert isinstance(end, Exit)
    assert end.reason.kind is ExitKind.SHUTDOWN


def test_terminating_a_restarting_child_makes_its_retry_void() -> None:
    bench = Bench(A, strategy=Strategy.ONE_FOR_ONE)
    (first,) = bench.crash("a")
    assert isinstance(first, StartChild)
    bench.deliver(NotStarted("a", first.serial, OSError()))
    bench.deliver(TerminateChildRequested(None, "a"))

    assert bench.deliver(RetryDue("a", 0)) == []


def test_a_temporary_sibling_is_not_started_again() -> None:
    temporary = ChildSpec("t", start, restart=Restart.TEMPORARY)
    bench = Bench(A, temporary, strategy=Strategy.ONE_FOR_ALL)
    serial = bench.serial("t")

    assert bench.told(bench.crash("a")) == ["stop t"]
    (again,) = bench.deliver(Exited("t", serial, SHUTDOWN))
    assert isinstance(again, StartChild)
    bench.deliver(Started("a", again.serial))

    assert list(bench.machine.children) == ["a"]


@pytest.mark.parametrize("reason", [CRASH, KILLED, SHUTDOWN])
def test_whatever_reason_a_stopped_child_ends_with_it_is_no_failure(reason: ExitReason) -> None:
    bench = Bench(A, strategy=Strategy.ONE_FOR_ONE, restarts=0)
    bench.deliver(TerminateChildRequested("caller", "a"))

    bench.deliver(Exited("a", bench.serial("a"), reason))

    child = bench.machine.children.get("a")
    assert child is not None
    assert child.status is Status.UNDEFINED
    assert bench.machine.ended is None


def test_a_child_past_its_shutdown_time_is_killed_and_past_that_given_up() -> None:
    bench = Bench(
        ChildSpec("a", start, shutdown=2.0, kill_within=1.0), strategy=Strategy.ONE_FOR_ONE
    )
    serial = bench.serial("a")

    assert bench.told(bench.deliver(StopRequested(SHUTDOWN), 0.0)) == ["stop a"]
    assert bench.deliver(AlarmRang(bench.alarm), 2.0) == [KillChild("a", serial)]
    assert bench.deliver(AlarmRang(bench.alarm), 3.0) == [Exit(SHUTDOWN)]


def test_instances_whose_time_is_over_are_killed_in_start_order() -> None:
    bench = Bench(ChildSpec("w", start, shutdown=2.0), strategy=Strategy.SIMPLE_ONE_FOR_ONE)
    keys = [f"w#{number}" for number in range(1, 13)]
    for _ in keys:
        (begun,) = bench.deliver(StartChildRequested(None, None))
        assert isinstance(begun, StartChild)
        bench.deliver(Started(begun.child, begun.serial))
    bench.deliver(StopRequested(SHUTDOWN), 0.0)

    actions = bench.deliver(AlarmRang(bench.alarm), 2.0)

    assert bench.told(actions) == [f"kill {key}" for key in keys]
