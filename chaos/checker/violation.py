"""`Violation`: an invariant that a history breaks, with the fewest events that show it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from phalanx.runtime import safe_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from phalanx.chaos.history.events import Event

Findings: TypeAlias = "Iterator[tuple[str, Iterable[Event]]]"
"""What a rule yields: a message, and the events that show it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """An invariant that was broken.

    Attributes:
        invariant: Its name, a key of `INVARIANTS`.
        message: What went wrong, in one sentence.
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
