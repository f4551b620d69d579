"""What the machine decides where neither OTP's traces nor the rules of the worlds say it."""

from __future__ import annotations

from typing import Any

from phalanx.supervision import (
    KILLED,
    SHUTDOWN,
    ChildSpec,
    Intensity,
    Strategy,
    SupervisorSpec,
)
from phalanx.supervision.core.machine import SupervisorMachine
from phalanx.supervision.core.messages import (
    Booted,
    Event,
    Exited,
    StartChild,
    Started,
    TerminateChild,
)


def start(ctx: Any) -> Any:
    raise AssertionError("nothing starts here")


def test_a_use_counts_also_if_the_child_is_stopped_for_a_sibling() -> None:
    spec = SupervisorSpec(
        "top",
        Strategy.ONE_FOR_ALL,
        Intensity(9, 60.0),
        [ChildSpec("a", start), ChildSpec("b", start)],
        fruitless_limit=2,
    )
    machine = SupervisorMachine(spec)

    def deliver(event: Event) -> None:
        for action in machine.handle(event, 0.0):
            if isinstance(action, StartChild):
                deliver(Started(action.child, action.serial))
            elif isinstance(action, TerminateChild):
                deliver(Exited(action.child, action.serial, SHUTDOWN, was_useful=True))

    deliver(Booted())
    for ended in ("a", "b", "a", "b"):  # each is stopped, of use, between two ends of its own
        deliver(Exited(ended, machine.children[ended].serial, KILLED))

    assert machine.ended is None
