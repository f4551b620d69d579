"""The history of one run: its events by time, with indexes by group and call."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar, cast

from .events import (
    CallBegan,
    CallEnded,
    CallIssued,
    CallSent,
    CallSettled,
    DriverEnded,
    DriverStarted,
    Event,
    GroupBuilt,
    ReplyReceived,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

E = TypeVar("E", bound=Event)
Worker = tuple[str, int, int]
"""A group, a rank and an incarnation."""

_OF_CALLS = {
    CallIssued: "issued",
    CallSent: "sent",
    CallBegan: "began",
    CallEnded: "ended",
    CallSettled: "settled",
    ReplyReceived: "replies",
}


@dataclass(frozen=True)
class CallHistory:
    """The events of one call, by kind and time."""

    issued: tuple[CallIssued, ...] = ()
    sent: tuple[CallSent, ...] = ()
    began: tuple[CallBegan, ...] = ()
    ended: tuple[CallEnded, ...] = ()
    settled: tuple[CallSettled, ...] = ()
    replies: tuple[ReplyReceived, ...] = ()


@dataclass(frozen=True)
class History:
    """What happened in one run.

    Attributes:
        events: By time.
        seed: Of the schedule; None if the schedule was given.
        target: The name of what was run.
    """

    events: tuple[Event, ...]
    seed: int | None = None
    target: str = ""

    @classmethod
    def of(cls, events: Iterable[Event], *, seed: int | None = None, target: str = "") -> History:
        """Return the history of *events*, which may come in any order."""
        return cls(tuple(sorted(events, key=lambda event: event.at)), seed, target)

    @cached_property
    def _by_kind(self) -> dict[type[Event], tuple[Event, ...]]:
        found: dict[type[Event], list[Event]] = defaultdict(list)
        for event in self.events:
            found[type(event)].append(event)
        return {kind: tuple(events) for kind, events in found.items()}

    def every(self, kind: type[E]) -> tuple[E, ...]:
        """Return the events of *kind*, by time."""
        return cast("tuple[E, ...]", self._by_kind.get(kind, ()))

    @cached_property
    def groups(self) -> dict[str, GroupBuilt]:
        """The executors that were built, by name."""
        return {built.group: built for built in self.every(GroupBuilt)}

    @cached_property
    def by_group(self) -> dict[str, tuple[Event, ...]]:
        """The events of each group, by time."""
        found: dict[str, list[Event]] = defaultdict(list)
        for event in self.events:
            if group := getattr(event, "group", ""):
                found[group].append(event)
        return {group: tuple(events) for group, events in found.items()}

    @cached_property
    def calls(self) -> dict[int, CallHistory]:
        """The events of each call, by its number."""
        found: dict[int, dict[str, tuple[Any, ...]]] = defaultdict(dict)
        for kind, name in _OF_CALLS.items():
            of_kind: dict[int, list[Any]] = defaultdict(list)
            event: Any
            for event in self.every(kind):
                of_kind[event.call].append(event)
            for call, events in of_kind.items():
                found[call][name] = tuple(events)
        return {call: CallHistory(**kinds) for call, kinds in found.items()}

    @cached_property
    def sendings(self) -> dict[Worker, tuple[CallSent, ...]]:
        """What was sent to each worker, in that order."""
        found: dict[Worker, list[CallSent]] = defaultdict(list)
        for sent in sorted(self.every(CallSent), key=lambda each: each.wire):
            for who in sent.ranks:
                found[sent.group, *who].append(sent)
        return {worker: tuple(sendings) for worker, sendings in found.items()}

    @cached_property
    def began(self) -> dict[tuple[Worker, int], CallBegan]:
        """When each worker first began a sending."""
        return {(each.worker, each.wire): each for each in reversed(self.every(CallBegan))}

    @cached_property
    def ended(self) -> dict[tuple[Worker, int], CallEnded]:
        """When each worker first ended a sending."""
        return {(each.worker, each.wire): each for each in reversed(self.every(CallEnded))}

    @cached_property
    def _excused(self) -> tuple[tuple[float, float], ...]:
        """When drivers ran that did not close: their promises are void."""
        ended = {each.number: each for each in self.every(DriverEnded)}
        last = self.events[-1].at if self.events else 0.0
        return tuple(
            (began.at, ended[began.number].at if began.number in ended else last)
            for began in self.every(DriverStarted)
            if began.number not in ended or not ended[began.number].closed
        )

    def is_excused(self, event: Event) -> bool:
        """Whether the driver that wrote *event* was killed later, or is still running."""
        return any(began <= event.at <= ended for began, ended in self._excused)
