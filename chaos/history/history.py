"""The history of one run: its events by time, with indexes by group and call."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar, cast

from . import events as ev

if TYPE_CHECKING:
    from collections.abc import Iterable

E = TypeVar("E", bound=ev.Event)
Worker = tuple[str, int, int]
"""A group, a rank and an incarnation."""


@dataclass(frozen=True)
class CallHistory:
    """The events of one call, by kind and time."""

    issued: tuple[ev.CallIssued, ...] = ()
    sent: tuple[ev.CallSent, ...] = ()
    began: tuple[ev.CallBegan, ...] = ()
    ended: tuple[ev.CallEnded, ...] = ()
    settled: tuple[ev.CallSettled, ...] = ()
    replies: tuple[ev.ReplyReceived, ...] = ()


@dataclass(frozen=True)
class History:
    """The events of one run.

    Attributes:
        events: By time.
        seed: Of the schedule; None if the schedule was given.
    """

    events: tuple[ev.Event, ...]
    seed: int | None = None

    @classmethod
    def of(cls, events: Iterable[ev.Event], *, seed: int | None = None) -> History:
        """Return the history of *events*, which may come in any order."""
        return cls(tuple(sorted(events, key=lambda event: event.at)), seed)

    @cached_property
    def _by_kind(self) -> dict[type[ev.Event], tuple[ev.Event, ...]]:
        found: dict[type[ev.Event], list[ev.Event]] = defaultdict(list)
        for event in self.events:
            found[type(event)].append(event)
        return {kind: tuple(events) for kind, events in found.items()}

    def every(self, kind: type[E]) -> tuple[E, ...]:
        """Return the events of *kind*, by time."""
        return cast("tuple[E, ...]", self._by_kind.get(kind, ()))

    @cached_property
    def groups(self) -> dict[str, ev.GroupBuilt]:
        """The executors that were built, by name."""
        return {built.group: built for built in self.every(ev.GroupBuilt)}

    @cached_property
    def by_group(self) -> dict[str, tuple[ev.Event, ...]]:
        """The events of each group, by time."""
        found: dict[str, list[ev.Event]] = defaultdict(list)
        for event in self.events:
            if group := getattr(event, "group", ""):
                found[group].append(event)
        return {group: tuple(events) for group, events in found.items()}

    @cached_property
    def calls(self) -> dict[int, CallHistory]:
        """The events of each call, by its number."""
        kinds = ev.CallIssued, ev.CallSent, ev.CallBegan, ev.CallEnded, ev.CallSettled
        found: dict[int, list[list[Any]]] = defaultdict(lambda: [[] for _ in fields(CallHistory)])
        event: Any
        for place, kind in enumerate((*kinds, ev.ReplyReceived)):
            for event in self.every(kind):
                found[event.call][place].append(event)
        return {call: CallHistory(*map(tuple, events)) for call, events in found.items()}

    @cached_property
    def settled(self) -> list[tuple[int, CallHistory, ev.CallIssued, ev.CallSettled]]:
        """The calls that were made and had an outcome: number, events, issue and first outcome."""
        return [
            (number, call, call.issued[0], call.settled[0])
            for number, call in self.calls.items()
            if call.issued and call.settled
        ]

    @cached_property
    def of_all_ranks(self) -> frozenset[int]:
        """The calls that all ranks of a group run."""
        shapes = ("collective", "gather")
        return frozenset(each.call for each in self.every(ev.CallIssued) if each.shape in shapes)

    @cached_property
    def sendings(self) -> dict[Worker, tuple[ev.CallSent, ...]]:
        """The sendings to each worker, in order."""
        found: dict[Worker, list[ev.CallSent]] = defaultdict(list)
        for sent in sorted(self.every(ev.CallSent), key=lambda each: each.wire):
            for who in sent.ranks:
                found[sent.group, *who].append(sent)
        return {worker: tuple(sendings) for worker, sendings in found.items()}

    @cached_property
    def began(self) -> dict[tuple[Worker, int], ev.CallBegan]:
        """When each worker first began a sending."""
        return {(each.worker, each.wire): each for each in reversed(self.every(ev.CallBegan))}

    @cached_property
    def ended(self) -> dict[tuple[Worker, int], ev.CallEnded]:
        """When each worker first ended a sending."""
        return {(each.worker, each.wire): each for each in reversed(self.every(ev.CallEnded))}

    @cached_property
    def _excused(self) -> tuple[tuple[float, float], ...]:
        """When drivers ran that did not close: their promises are void."""
        ended = {each.number: each for each in self.every(ev.DriverEnded)}
        last = self.events[-1].at if self.events else 0.0
        return tuple(
            (began.at, ended[began.number].at if began.number in ended else last)
            for began in self.every(ev.DriverStarted)
            if began.number not in ended or not ended[began.number].closed
        )

    def is_excused(self, event: ev.Event) -> bool:
        """Whether the driver that wrote *event* was killed later, or is still running."""
        return any(began <= event.at <= ended for began, ended in self._excused)
