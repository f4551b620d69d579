"""Invariants of delivery: no message is lost, and calls interrupted by a death are sent again.

Durations are not evidence. A rank takes calls and sends replies in the order
in which they were sent, so each arrival shows which messages must have arrived before it.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from typing import TYPE_CHECKING

from phalanx.chaos.history import events as ev

if TYPE_CHECKING:
    from phalanx.chaos.history.history import CallHistory, History, Worker

    from .checker import Findings

_NOT_SENT = ("error", "fault", "cancelled")  # outcomes of calls that may not have reached a method
_WITHDRAWN = ("timeout", "cancelled")  # outcomes of calls that a worker may pass over
_BEFORE = 5.0  # seconds between a death and the issue of a call that fails with it
_AFTER = 10.0  # seconds between the end of a call that failed and the event of its death
_SENT_AGAIN = ("restart", "replace")  # how decisions begin after which calls are sent again
_REPORT_LAG = 1.0  # seconds until an exception that a worker has recorded reaches the driver


def nothing_lost(history: History) -> Findings:
    """No rank passes over a call that was sent to it, and no reply of all ranks is lost."""
    yield from _passed_over(history)
    yield from _unsettled_calls(history)


def _passed_over(history: History) -> Findings:
    changes = _Changes(history)
    for worker, sendings in history.sendings.items():
        later: ev.CallSent | None = None  # the next that it began, and the next for all ranks
        later_of_all: ev.CallSent | None = None
        for sent in reversed(sendings):
            call = history.calls[sent.call]
            is_of_all = any(issued.shape == "collective" for issued in call.issued)
            if (worker, sent.wire) in history.began:
                later = sent
                later_of_all = sent if is_of_all else later_of_all
                continue
            # A death withdraws the collective calls that no rank has begun, and so does an
            # exception on one rank of a process group.
            after = later_of_all if is_of_all else later
            if after is None or not _must_have_arrived(call):
                continue
            if not changes.between(sent, after.at):
                text = f"rank {worker[1]} did not begin call {sent.call}, and began call"
                began = history.began[worker, after.wire]
                yield f"{text} {after.call}, which was sent to it later", (sent, after, began)


def _unsettled_calls(history: History) -> Findings:
    """Find calls that went on although all their ranks had replied, and to later calls too."""
    later_replies = _later_replies(history)
    for number, call, _, settled in history.settled:
        for sent in call.sent if _must_have_arrived(call) else ():
            places = [((sent.group, *who), sent.wire) for who in sent.ranks]
            ended = [history.ended[place] for place in places if place in history.ended]
            if len(ended) < len(places) or any(end.error for end in ended):
                continue
            if all(later_replies.get(place, math.inf) < settled.at for place in places):
                text = f"all ranks replied to call {number}, and their later replies arrived; it"
                events = (*call.issued, sent, *ended, settled)
                yield f"{text} ended with {settled.outcome} after that", events
                break


def _later_replies(history: History) -> dict[tuple[Worker, int], float]:
    """Return by worker and sending when a reply of that worker to a later one was known."""
    later_replies: dict[tuple[Worker, int], float] = {}
    for worker, sendings in history.sendings.items():
        first = math.inf
        for sent in reversed(sendings):
            later_replies[worker, sent.wire] = first
            call = history.calls[sent.call]
            is_last = call.sent[-1].wire == sent.wire
            is_asked = call.issued and call.issued[0].shape != "gather"
            if is_asked and is_last and call.settled and call.settled[0].outcome == "value":
                first = min(first, call.settled[0].at)
    return later_replies


def sent_again(history: History) -> Findings:
    """A call fails with a death only if a rank had begun it and no retry was left."""
    may_begin = _may_begin(history)
    stops = {
        group: [each.at for each in events if _stops_calls(each)]
        for group, events in history.by_group.items()
    }
    for number, call, issued, settled in history.settled:
        since, until = issued.at - _BEFORE, settled.at + _AFTER
        if settled.outcome != "died" or _any(stops[issued.group], since, until):
            continue
        if history.is_excused(issued):
            continue
        places = {((each.group, *who), each.wire) for each in call.sent for who in each.ranks}
        begun = {wire for _, wire in places & may_begin}
        if len(begun) > issued.retries:
            continue
        what = "no rank had begun it"
        if begun:
            what = f"it had {issued.retries} retries, and was begun in {len(begun)} sendings"
        yield f"call {number} failed with a death: {what}", (issued, *call.sent, settled)
    yield from _overtaken(history)


def _may_begin(history: History) -> set[tuple[Worker, int]]:
    """Return by worker and sending what a worker began, perhaps without recording it.

    A worker records what it begins before it begins the next, except what was withdrawn: for its
    caller, or after a change.
    """
    changes = _Changes(history)
    gone: dict[tuple[str, int | None, int], float] = {}
    ends: tuple[ev.RankExited | ev.RankDied, ...]
    ends = (*history.every(ev.RankExited), *history.every(ev.RankDied))
    for each in sorted(ends, key=lambda each: each.at):
        gone.setdefault((each.group, each.rank, each.incarnation), each.at)
    found = set(history.began)
    for worker, sendings in history.sendings.items():
        until = math.nextafter(gone.get(worker, math.inf), -math.inf)
        may_come = True
        for sent in sendings:
            place = worker, sent.wire
            if may_come:
                found.add(place)
            if place in history.began:
                may_come = place in history.ended
            elif may_come:
                settled = history.calls[sent.call].settled
                withdrawn = any(each.outcome in _WITHDRAWN for each in settled)
                may_come = withdrawn or changes.between(sent, until)
    return found


def _overtaken(history: History) -> Findings:
    """Find collective calls that were sent again behind one that was made later.

    Calls get their numbers when their callers make them. A caller may lose its processor before its
    call is issued, so that the moment of that alone does not tell which was made first.
    """
    # So far, by group and epoch.
    earlier: dict[tuple[str, int], list[tuple[ev.CallIssued, ev.CallSent]]] = defaultdict(list)
    before: dict[int, ev.CallSent] = {}  # each call's latest sending
    for sent in sorted(history.every(ev.CallSent), key=lambda each: each.wire):
        issued = history.calls[sent.call].issued
        if not issued or issued[0].shape != "collective":
            continue
        last = before.get(sent.call, sent)
        before[sent.call] = sent
        others = earlier[sent.group, sent.epoch]
        # Within an epoch a call may come back while others are under way.
        for other in others if last.epoch < sent.epoch else ():
            if other[0].at > last.at and other[1].call > sent.call:
                text = f"call {sent.call} was sent again behind call {other[1].call}, which was"
                yield f"{text} made after the former had been sent", (last, *other, sent)
                break
        others.append((issued[0], sent))


def _must_have_arrived(call: CallHistory) -> bool:
    """Whether only a fault of delivery could keep *call* from the ranks it was sent to."""
    if not call.issued or not call.settled or call.issued[0].shape == "gather":
        return False  # a gather has its errors in its value
    return call.settled[0].outcome not in _NOT_SENT


class _Changes:
    """When groups changed, or a rank of a process group raised."""

    def __init__(self, history: History) -> None:
        self._changed: dict[str, list[float]] = {}
        self._raised: dict[str, list[float]] = {}
        for group, events in history.by_group.items():
            kinds = ev.RankDied | ev.RankExited | ev.ChangePlanned
            self._changed[group] = [each.at for each in events if isinstance(each, kinds)]
            raised = (each for each in events if isinstance(each, ev.CallEnded) and each.joined)
            self._raised[group] = [each.at for each in raised]

    def between(self, sent: ev.CallSent, until: float) -> bool:
        """Whether calls may have been withdrawn since *sent*."""
        if _any(self._raised[sent.group], sent.at - _REPORT_LAG, until):
            return True
        return _any(self._changed[sent.group], sent.at, until)


def _stops_calls(event: ev.Event) -> bool:
    """Whether calls may fail after *event* that were to be sent again."""
    match event:
        case ev.RankDied(rank=int(), decision=decision):
            return not decision.startswith(_SENT_AGAIN)
        case ev.GroupEnded(cause=cause):
            return bool(cause)
        case _:
            return isinstance(event, ev.RanksNotStarted | ev.ChangePlanned)


def _any(times: list[float], since: float, until: float) -> bool:
    """Whether one of *times*, which are sorted, lies between these two."""
    index = bisect_left(times, since)
    return index < len(times) and times[index] <= until
