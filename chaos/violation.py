"""What a history shows that may not happen.

Guarantees: a violation names the rule, says what went wrong, and holds the fewest records that
show it, by time; its text ends with the seed that leads there again, and does nothing to a
terminal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from phalanx.runtime import safe_text

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .record import Record

INVARIANTS = {
    "one_outcome": "every call has exactly one outcome",
    "at_most_once": "a call that may not run twice ran at most once on each rank",
    "at_least_once": "a call that was answered had run on every rank that answered",
    "sent_again": "a call that failed of a death had been begun, as often as it may be made",
    "nothing_lost": "no call and no answer got lost on its way",
    "one_order": "all ranks ran the group's calls in one order",
    "one_epoch": "no call ran in two epochs",
    "in_step": "no rank of a process group left a call by an exception for the next too early",
    "in_time": "no call failed for want of time before its deadline, or ended long after it",
    "with_cause": "a call failed with a death, or an end, only where there was one",
    "own_reply": "every answer belonged to its call",
    "strategy": "restarts took with them whom the strategy names",
    "intensity": "restarts kept to the intensity",
    "death_first": "no rank was started anew before it was gone",
    "deaths_known": "every death was noticed",
    "fresh_rendezvous": "every epoch met at a place of its own",
    "heals": "the group served again after the last fault",
    "right_answers": "the traffic found nothing wrong",
    "nothing_left": "nothing was left behind",
}
"""Every rule by name, and what it says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """One rule that was broken.

    Attributes:
        invariant: The rule's name, a key of `INVARIANTS`.
        message: What went wrong, in one sentence.
        records: The fewest records that show it, by time.
        seed: What the schedule was drawn from; None where it was given.
    """

    invariant: str
    message: str
    records: tuple[Record, ...] = ()
    seed: int | None = None

    def render(self) -> str:
        """Return it as a person reads it."""
        again = "" if self.seed is None else f"\n  again with seed {self.seed}"
        shown = "".join(f"\n  {record.line()}" for record in self.records)
        told = f"{self.invariant}: {self.message}{shown}{again}"
        return "\n".join(safe_text(line) for line in told.split("\n"))


def found(invariant: str, message: str, records: Iterable[Record]) -> Violation:
    """Return the violation of *invariant* that *records* show."""
    by_time = tuple(sorted(set(records), key=lambda record: record.at))
    return Violation(invariant=invariant, message=message, records=by_time)
