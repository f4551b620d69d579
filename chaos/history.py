"""The history of one run: its records in the order of time.

Guarantees: a history is a value; whoever holds it needs nothing of the run any more.

Left to others: reading it from files (`journal`), judging it (`checker`).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from .call_records import Issued, Sent, Settled, Taken
from .group_records import GroupBuilt
from .record import Record
from .referee_records import LifeBegan, LifeEnded
from .worker_records import Began, Ended

if TYPE_CHECKING:
    from collections.abc import Iterable

R = TypeVar("R", bound=Record)


@dataclass(frozen=True)
class CallHistory:
    """What is known of one call."""

    issued: tuple[Issued, ...] = ()
    sent: tuple[Sent, ...] = ()
    began: tuple[Began, ...] = ()
    ended: tuple[Ended, ...] = ()
    settled: tuple[Settled, ...] = ()
    taken: tuple[Taken, ...] = ()

    @property
    def records(self) -> tuple[Record, ...]:
        """All of it, by time."""
        every = (*self.issued, *self.sent, *self.began, *self.ended, *self.settled, *self.taken)
        return tuple(sorted(every, key=lambda record: record.at))


@dataclass(frozen=True)
class History:
    """What happened in one run.

    Attributes:
        records: By time.
        seed: What the schedule was drawn from; None where it was given as a list.
        target: What was run, as it was named.
    """

    records: tuple[Record, ...]
    seed: int | None = None
    target: str = ""

    @classmethod
    def of(cls, records: Iterable[Record], *, seed: int | None = None, target: str = "") -> History:
        """Return the history of *records*, which may come in any order."""
        return cls(tuple(sorted(records, key=lambda record: record.at)), seed, target)

    def every(self, kind: type[R]) -> tuple[R, ...]:
        """Return the records of *kind*, by time."""
        return tuple(record for record in self.records if type(record) is kind)

    @cached_property
    def groups(self) -> dict[str, GroupBuilt]:
        """The executors that were built, by name."""
        return {built.group: built for built in self.every(GroupBuilt)}

    @cached_property
    def by_group(self) -> dict[str, tuple[Record, ...]]:
        """What concerns each group, by time."""
        found: dict[str, list[Record]] = defaultdict(list)
        for record in self.records:
            group = getattr(record, "group", "")
            if group:
                found[group].append(record)
        return {group: tuple(records) for group, records in found.items()}

    @cached_property
    def calls(self) -> dict[int, CallHistory]:
        """What is known of each call, by its number."""
        found: dict[int, dict[str, list[Any]]] = defaultdict(lambda: defaultdict(list))
        for record in self.records:
            if isinstance(record, Issued | Sent | Began | Ended | Settled | Taken):
                found[record.call][record.kind].append(record)
        return {
            number: CallHistory(**{kind: tuple(records) for kind, records in kinds.items()})
            for number, kinds in found.items()
        }

    @cached_property
    def excused(self) -> tuple[tuple[float, float], ...]:
        """When lives began and ended that nobody closed: what they owed, they owe no more."""
        began = {life.life: life.at for life in self.every(LifeBegan)}
        ended = {life.life: life for life in self.every(LifeEnded)}
        last = self.records[-1].at if self.records else 0.0
        return tuple(
            (at, ended[life].at if life in ended else last)
            for life, at in began.items()
            if life not in ended or not ended[life].closed
        )

    def is_excused(self, record: Record) -> bool:
        """Whether the driver that wrote *record* was killed later, or is still running."""
        return any(began <= record.at <= ended for began, ended in self.excused)
