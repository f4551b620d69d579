"""What may not become of calls on their way: none gets lost, and what a death took is made again.

Guarantees: each rule is a pure function of the history. Nothing is concluded from how long
something took: a rank takes its calls, and gives its answers, in the order of their sending, so
what comes through shows what should have come before.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from functools import cached_property
from typing import TYPE_CHECKING

from .call_records import Issued, Sent
from .group_records import ChangePlanned, GroupEnded, NotStarted, RankDied, RankExited
from .violation import found
from .worker_records import Began, Ended

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .history import CallHistory, History
    from .record import Record
    from .violation import Violation

_REFUSED = ("error", "fault", "cancelled")  # it may never have left, or never have come to a method
_BEFORE = 5.0  # seconds that a death may be known before a call that fails of it is made
_AFTER = 10.0  # the same, after that call has failed
_MADE_ANEW = ("restart", "replace")  # how decisions begin after which the calls go on
_HEARD = 1.0  # seconds until the driver knows of an exception that a worker has written down

Worker = tuple[str, int, int]
"""Group, rank, incarnation."""


def nothing_lost(history: History) -> Iterator[Violation]:
    """No rank passes over a call for a later one, and no answer stays behind a later one."""
    ways = _Ways(history)
    yield from _passed_over(history, ways)
    yield from _unheard(history, ways)


def _passed_over(history: History, ways: _Ways) -> Iterator[Violation]:
    for worker, sendings in ways.sent.items():
        later: Sent | None = None  # the next that it began, and the next for all ranks
        later_of_all: Sent | None = None
        for sent in reversed(sendings):
            is_of_all = _shape(history, sent) == "collective"
            if (worker, sent.wire) in ways.began:
                later = sent
                later_of_all = sent if is_of_all else later_of_all
                continue
            # A death withdraws the calls for all ranks that none of them has begun; so does an
            # exception on one rank of a process group.
            after = later_of_all if is_of_all else later
            if after is None or not _should_have_come(history.calls[sent.call]):
                continue
            if ways.is_calm(sent, after):
                began = ways.began[worker, after.wire]
                yield found(
                    "nothing_lost",
                    f"rank {worker[1]} never began call {sent.call}, and began call {after.call}, "
                    "which was sent to it later",
                    (sent, after, began),
                )


def _unheard(history: History, ways: _Ways) -> Iterator[Violation]:
    """Find calls that went on though all their ranks had answered, and had answered later ones."""
    for number, call in history.calls.items():
        if not _should_have_come(call):
            continue
        settled = call.settled[0]
        for sent in call.sent:
            workers = [(sent.group, *who) for who in sent.ranks]
            ended = [ways.ended.get((worker, sent.wire)) for worker in workers]
            if any(end is None or end.error for end in ended):
                continue
            answers = [ways.heard_after(worker, sent.wire) for worker in workers]
            if all(at is not None and at < settled.at for at in answers):
                yield found(
                    "nothing_lost",
                    f"call {number} was answered by all its ranks, whose later answers were "
                    f"heard, and ended with {settled.outcome} after that",
                    (call.issued[0], sent, *(end for end in ended if end), settled),
                )
                break


def sent_again(history: History) -> Iterator[Violation]:
    """What a death took is made again, as often as it may be, and before what came later."""
    ways = _Ways(history)
    yield from _given_up_early(history, ways)
    yield from _overtaken(history)


def _given_up_early(history: History, ways: _Ways) -> Iterator[Violation]:
    """Find calls that failed of a death, with a retry left or though no rank had begun them."""
    for number, call in history.calls.items():
        if not call.issued or not call.settled or history.is_excused(call.issued[0]):
            continue
        issued, settled = call.issued[0], call.settled[0]
        if settled.outcome != "died" or not ways.goes_on(issued.group, issued.at, settled.at):
            continue
        retries = issued.retries if issued.on_death == "retry" else 0
        if len(call.sent) <= retries:
            what = f"had {retries} retries, and was sent {len(call.sent)} times"
        elif not retries and not any(ways.may_have_begun(sent) for sent in call.sent):
            what = "which no rank had begun"
        else:
            continue
        yield found(
            "sent_again",
            f"call {number} failed of a death, {what}",
            (issued, *call.sent, settled),
        )


def _overtaken(history: History) -> Iterator[Violation]:
    """Find calls for all ranks that were sent again behind one that was made later."""
    youngest: dict[tuple[str, int], tuple[Issued, Sent]] = {}  # of those sent in an epoch so far
    before: dict[int, Sent] = {}  # each call's latest sending
    for sent in sorted(history.every(Sent), key=lambda each: each.wire):
        issued = history.calls[sent.call].issued
        if not issued or issued[0].shape != "collective":
            continue
        where = sent.group, sent.epoch
        last = before.get(sent.call, sent)
        before[sent.call] = sent
        other = youngest.get(where)
        # Within an epoch a call may come back while others are under way.
        if other is not None and last.epoch < sent.epoch and other[0].at > last.at:
            yield found(
                "sent_again",
                f"call {sent.call} was sent again behind call {other[1].call}, which was made "
                "after it had been sent",
                (last, *other, sent),
            )
        if other is None or issued[0].at > other[0].at:
            youngest[where] = issued[0], sent


def _should_have_come(call: CallHistory) -> bool:
    """Whether nothing but a fault on its way could keep *call* from where it was sent to."""
    if not call.issued or not call.settled or call.issued[0].shape == "gather":
        return False  # a gather has its errors in its value
    return call.settled[0].outcome not in _REFUSED


def _shape(history: History, sent: Sent) -> str:
    issued = history.calls[sent.call].issued
    return issued[0].shape if issued else ""


class _Ways:
    """What went to each worker and what it did, in order."""

    def __init__(self, history: History) -> None:
        self._history = history
        self.sent: dict[Worker, list[Sent]] = defaultdict(list)
        for sent in sorted(history.every(Sent), key=lambda each: each.wire):
            for rank, incarnation in sent.ranks:
                self.sent[sent.group, rank, incarnation].append(sent)
        self.began = {(_whose(each), each.wire): each for each in reversed(history.every(Began))}
        self.ended = {(_whose(each), each.wire): each for each in reversed(history.every(Ended))}
        self._changes: dict[str, list[float]] = defaultdict(list)
        self._stops: dict[str, list[float]] = defaultdict(list)
        self._raised: dict[str, list[float]] = defaultdict(list)
        for group, records in history.by_group.items():
            kinds = RankDied | RankExited | ChangePlanned
            self._changes[group] = [each.at for each in records if isinstance(each, kinds)]
            self._stops[group] = [each.at for each in records if _stops_calls(each)]
            self._raised[group] = [
                each.at for each in records if isinstance(each, Ended) and each.joined
            ]

    def is_calm(self, one: Sent, other: Sent) -> bool:
        """Whether the group was left as it was between these two."""
        if _has_any(self._raised[one.group], one.at - _HEARD, other.at):
            return False
        return not _has_any(self._changes[one.group], one.at, other.at)

    @cached_property
    def _heard(self) -> dict[Worker, dict[int, float]]:
        """By worker and sending: when it, or a later one, was first known to be answered."""
        heard: dict[Worker, dict[int, float]] = {}
        for worker, sendings in self.sent.items():
            first: float | None = None
            heard[worker] = {}
            for sent in reversed(sendings):
                if first is not None:
                    heard[worker][sent.wire] = first
                call = self._history.calls[sent.call]
                is_last = call.sent[-1].wire == sent.wire
                is_asked = call.issued and call.issued[0].shape != "gather"
                if is_asked and is_last and call.settled and call.settled[0].outcome == "value":
                    at = call.settled[0].at
                    first = at if first is None else min(first, at)
        return heard

    def heard_after(self, worker: Worker, wire: int) -> float | None:
        """Return when an answer of *worker* was known that it had given after that to *wire*."""
        return self._heard.get(worker, {}).get(wire)

    def may_have_begun(self, sent: Sent) -> bool:
        """Whether some rank may have begun *sent*, perhaps without living to write it down."""
        return any(self._may_have_begun((sent.group, *who), sent) for who in sent.ranks)

    def _may_have_begun(self, worker: Worker, sent: Sent) -> bool:
        if (worker, sent.wire) in self.began:
            return True
        sendings = self.sent[worker]
        before = bisect_left(sendings, sent.wire, key=lambda each: each.wire)
        if not before:
            return True
        latest = sendings[before - 1]
        if (worker, latest.wire) in self.began:
            return (worker, latest.wire) in self.ended
        # It writes down what it begins before it can begin the next; but for what was withdrawn.
        return not self.is_calm(latest, sent)

    def goes_on(self, group: str, since: float, until: float) -> bool:
        """Whether every death about that time was one after which the calls go on."""
        return not _has_any(self._stops[group], since - _BEFORE, until + _AFTER)


def _stops_calls(record: Record) -> bool:
    """Whether calls may fail after *record* that were to be made again."""
    match record:
        case RankDied(rank=int(), decision=decision):
            return not decision.startswith(_MADE_ANEW)
        case GroupEnded(cause=cause):
            return bool(cause)
        case _:
            return isinstance(record, NotStarted | ChangePlanned)


def _has_any(times: list[float], since: float, until: float) -> bool:
    """Whether one of *times*, which are sorted, lies between these two."""
    index = bisect_left(times, since)
    return index < len(times) and times[index] <= until


def _whose(record: Began | Ended) -> Worker:
    return record.group, record.rank, record.incarnation
