"""The checker: applies every invariant to a history."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from phalanx.runtime import safe_text

from . import calls, delivery, groups

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from phalanx.chaos.history.events import Event
    from phalanx.chaos.history.history import History

Findings: TypeAlias = "Iterator[tuple[str, Iterable[Event]]]"
"""The results of a rule: messages, each with the events that show it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """An invariant that was broken.

    Attributes:
        invariant: Its name, a key of `INVARIANTS`.
        message: The violation, in one sentence.
        events: The fewest that show it, by time.
        seed: Of the schedule; None if the schedule was given.
    """

    invariant: str
    message: str
    events: tuple[Event, ...] = ()
    seed: int | None = None

    def render(self) -> str:
        """Return the violation as text, without control characters."""
        again = "" if self.seed is None else f"\n  reproduce with seed {self.seed}"
        shown = "".join(f"\n  {event.line()}" for event in self.events)
        text = f"{self.invariant}: {self.message}{shown}{again}"
        return "\n".join(safe_text(line) for line in text.split("\n"))


_MOST = 20  # violations of one rule; one cause may show in thousands of calls

RULES: Mapping[str, Callable[[History], Findings]] = {
    rule.__name__: rule
    for rule in (
        *(calls.one_outcome, calls.at_most_once, calls.at_least_once),
        *(delivery.sent_again, delivery.nothing_lost),
        *(calls.one_order, calls.one_epoch, calls.in_step, calls.in_time, calls.with_cause),
        *(calls.own_reply, groups.strategy, groups.intensity, groups.death_first),
        *(groups.one_incarnation, groups.deaths_known, groups.fresh_rendezvous, groups.heals),
        *(groups.right_answers, groups.nothing_left),
    )
}
"""The rules, by the names of their invariants."""

INVARIANTS = {
    name: (rule.__doc__ or "").partition("\n")[0].rstrip(".") for name, rule in RULES.items()
}
"""Every invariant by name, in words."""


def check(history: History) -> tuple[Violation, ...]:
    """Return the violations in *history*: of each rule the 20 with the fewest events."""
    violations: list[Violation] = []
    for name, rule in RULES.items():
        found = (
            Violation(
                invariant=name,
                message=message,
                events=tuple(sorted(set(events), key=lambda event: event.at)),
                seed=history.seed,
            )
            for message, events in rule(history)
        )
        violations += sorted(found, key=lambda each: len(each.events))[:_MOST]
    return tuple(violations)
