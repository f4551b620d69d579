"""Writes the drawn parts of ``docs/concepts/supervision.md`` from the code itself.

``python docs/draw_supervision.py`` rewrites the document; with ``--check`` it only says whether it
is up to date. Between ``<!-- drawn: NAME -->`` and ``<!-- end -->`` stands what the machine does,
never what somebody remembers that it does.
"""  # noqa: INP001 # a script

from __future__ import annotations

import re
import sys
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.supervision import (
    KILLED,
    NORMAL,
    SHUTDOWN,
    AutoShutdown,
    ChildSpec,
    Directive,
    ExitKind,
    ExitReason,
    Intensity,
    Restart,
    Strategy,
    SupervisorSpec,
)
from phalanx.supervision.core.machine import SupervisorMachine, verdict
from phalanx.supervision.core.messages import (
    Booted,
    Event,
    Exit,
    Exited,
    KillChild,
    NotStarted,
    Request,
    Retry,
    StartChild,
    Started,
    TerminateChild,
)

if TYPE_CHECKING:
    from collections.abc import Callable

DOCUMENT = Path(__file__).parent / "concepts/supervision.md"
CRASH = ExitReason(ExitKind.CRASH)
PLACE = re.compile(r"(<!-- drawn: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def never_called() -> None:
    """Stand for a start function: here the outcomes are events."""


class Scenario:
    """One supervisor, what happened to it and what it did."""

    def __init__(self, spec: SupervisorSpec, failing: tuple[str, ...] = ()) -> None:
        self.machine = SupervisorMachine(spec)
        self.said: list[str] = []
        self.failing = list(failing)
        self.serials: dict[str, int] = {}
        self._pending: deque[Event] = deque()

    def deliver(self, event: Event) -> None:
        """Let *event* happen, and everything that follows from it."""
        self._pending.append(event)
        while self._pending:
            for action in self.machine.handle(self._pending.popleft(), 0.0):
                self._perform(action)

    def _perform(self, action: Any) -> None:
        match action:
            case StartChild(key, serial) if self.machine.is_ready and key in self.failing:
                self.failing.remove(key)
                self.said.append(f"start {key}: fails")
                self._pending.append(NotStarted(key, serial, OSError("no")))
            case StartChild(key, serial):
                self.said.append(f"start {key}")
                self.serials[key] = serial
                self._pending.append(Started(key, serial))
            case TerminateChild(key, serial) | KillChild(key, serial):
                self.said.append(f"stop {key}")
                self._pending.append(Exited(key, serial, SHUTDOWN))
            case Retry(key):
                self.said.append(f"try {key} again, after what is in the mailbox")
                self._pending.append(action)
            case Exit():
                self.said.append("exit shutdown")
            case _:
                pass  # nothing is late here

    def crash(self, key: str) -> None:
        """Let child *key* crash."""
        self.deliver(Exited(key, self.serials[key], CRASH))


def booted(spec: SupervisorSpec, failing: tuple[str, ...] = ()) -> Scenario:
    """Return the scenario of a supervisor that has started its children."""
    scenario = Scenario(spec, failing)
    scenario.deliver(Booted())
    return scenario


def tree(scenario: Scenario, before: set[str], dead: str) -> list[str]:
    """Return the children as a drawn tree, each with what became of it."""
    children = list(scenario.machine.children.values())
    lines = [f"{scenario.machine.spec.id}  [{scenario.machine.spec.strategy}]"]
    for index, child in enumerate(children):
        branch = "└─" if index == len(children) - 1 else "├─"
        fate = "runs on" if child.incarnation == 1 else "started again"
        if child.shown != "running":
            fate = str(child.shown)
        mark = "crashed, " if child.key == dead else ""
        lines.append(f"{branch} {child.key}  {mark}{fate}")
    gone = sorted(before - {child.key for child in children})
    return [*lines, *(f"   {key}  gone for good" for key in gone)]


def drawn(spec: SupervisorSpec, dead: str, failing: tuple[str, ...] = (), adding: int = 0) -> str:
    """Return what becomes of a supervisor of which child *dead* crashes."""
    scenario = booted(spec, failing)
    for _number in range(adding):
        scenario.deliver(Request(None, lambda machine: machine.start_child(None)))
    before = set(scenario.machine.children)
    scenario.said.clear()
    scenario.crash(dead)
    did = [f"  {number}. {line}" for number, line in enumerate(scenario.said, 1)]
    return "\n".join(["```", *tree(scenario, before, dead), "", "what it did:", *did, "```"])


def group(strategy: Strategy, **options: Any) -> SupervisorSpec:
    """Return a supervisor of a, b, c and d, of which c is temporary."""
    children = [
        ChildSpec(
            name, never_called, restart=Restart.TEMPORARY if name == "c" else Restart.PERMANENT
        )
        for name in "abcd"
    ]
    return SupervisorSpec("top", strategy, Intensity(3, 60.0), children, **options)


def outcome(restart: Restart, reason: ExitReason) -> str:
    """Return what becomes of a child, in a word."""
    if verdict(restart, reason) is Directive.RESTART:
        return "restart"
    return "remove" if restart is Restart.TEMPORARY else "keep"


def exits() -> str:
    """Return the table of restart types and exits."""
    reasons = [NORMAL, SHUTDOWN, CRASH, KILLED, ExitReason(ExitKind.UNRESPONSIVE)]
    head = "| restart | " + " | ".join(str(reason.kind) for reason in reasons) + " |"
    rows = [
        f"| {restart} | " + " | ".join(outcome(restart, reason) for reason in reasons) + " |"
        for restart in Restart
    ]
    return "\n".join([head, "| --- " * (len(reasons) + 1) + "|", *rows])


def significant() -> str:
    """Return what the end of significant children does."""
    lines = ["```"]
    for auto in AutoShutdown:
        if auto is AutoShutdown.NEVER:
            continue
        children = [
            ChildSpec(name, never_called, restart=Restart.TRANSIENT, significant=name != "c")
            for name in "abc"
        ]
        spec = SupervisorSpec("top", children=children, auto_shutdown=auto)
        scenario = booted(spec)
        lines.append(f"{auto}: a and b are significant, c is not")
        for key in "ab":
            if scenario.machine.ended is not None:
                break
            scenario.said.clear()
            scenario.deliver(Exited(key, scenario.serials[key], NORMAL))
            lines.append(
                f"  {key} ends normally: " + (", ".join(scenario.said) or "nothing follows")
            )
    return "\n".join([*lines, "```"])


def giving_up() -> str:
    """Return the end of a supervisor past its intensity."""
    children = [ChildSpec(name, never_called) for name in "ab"]
    scenario = booted(SupervisorSpec("top", intensity=Intensity(1, 60.0), children=children))
    lines = ["```"]
    for number in (1, 2):
        scenario.said.clear()
        scenario.crash("a")
        lines.append(f"crash {number} of a: {', '.join(scenario.said)}")
    return "\n".join([*lines, "```"])


def template() -> SupervisorSpec:
    """Return a pool."""
    return SupervisorSpec(
        "pool",
        Strategy.SIMPLE_ONE_FOR_ONE,
        Intensity(3, 60.0),
        [ChildSpec("w", never_called)],
    )


DRAWN: dict[str, Callable[[], str]] = {
    "exits": exits,
    "one_for_one": lambda: drawn(group(Strategy.ONE_FOR_ONE), "b"),
    "one_for_all": lambda: drawn(group(Strategy.ONE_FOR_ALL), "b"),
    "rest_for_one": lambda: drawn(group(Strategy.REST_FOR_ONE), "b"),
    "simple_one_for_one": lambda: drawn(template(), "w#2", adding=3),
    "failed_restart": lambda: drawn(group(Strategy.ONE_FOR_ALL), "b", failing=("b",)),
    "significant": significant,
    "giving_up": giving_up,
}


def written(text: str) -> str:
    """Return *text* with every drawn part made anew."""
    return PLACE.sub(lambda m: f"{m[1]}{DRAWN[m[2]]()}\n{m[3]}", text)


def main() -> int:
    """Rewrite the document, or check it; return the exit code."""
    text = DOCUMENT.read_text()
    fresh = written(text)
    if "--check" in sys.argv:
        sys.stdout.write("up to date\n" if text == fresh else "out of date: run without --check\n")
        return int(text != fresh)
    DOCUMENT.write_text(fresh)
    return 0


if __name__ == "__main__":
    sys.exit(main())
