"""Invariants of calls. A call of a driver that was killed needs no outcome."""

from __future__ import annotations

import math
from collections import defaultdict
from itertools import combinations, pairwise
from typing import TYPE_CHECKING

from phalanx.chaos.history import events as ev

from .groups import lost_with, takes_kept, tied

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from phalanx.chaos.history.history import CallHistory, History

    from .checker import Findings

_EARLY = 0.05  # seconds by which a deadline may differ from the one in the history
_LATE = 15.0  # seconds after a deadline; it takes milliseconds on an idle machine


def one_outcome(history: History) -> Findings:
    """Every call has exactly one outcome."""
    for number, call in history.calls.items():
        if len(call.settled) > 1:
            text = f"call {number} has {len(call.settled)} outcomes"
            yield text, (*call.issued, *call.settled)
        if not call.issued:
            if call.settled or call.sent:
                yield f"call {number} was never made", (*call.sent, *call.began, *call.settled)
        elif not call.settled and not history.is_excused(call.issued[0]):
            yield f"call {number} has no outcome", (*call.issued, *call.sent, *call.began)


def at_most_once(history: History) -> Findings:
    """A call runs once on each rank that it was sent to, or as often as its retries allow."""
    for number, call in history.calls.items():
        if not call.issued:
            continue
        issued = call.issued[0]
        sent = {(each.wire, *who) for each in call.sent for who in each.ranks}
        runs: dict[tuple[int, int], list[ev.CallBegan]] = defaultdict(list)
        for began in call.began:
            runs[began.rank, began.wire].append(began)
            if (began.wire, began.rank, began.incarnation) not in sent:
                text = f"rank {began.rank} (incarnation {began.incarnation}) ran call {number}"
                yield f"{text}, which was not sent to it", (issued, *call.sent, began)
        for (rank, wire), twice in runs.items():
            if len(twice) > 1:
                text = f"rank {rank} ran call {number} {len(twice)} times for one sending ({wire})"
                yield text, (issued, *_sent(call, {wire}), *twice)
        first = {began.wire: began for began in reversed(call.began)}
        limit = 1 + (issued.retries if issued.shape != "gather" else 0)
        if len(first) > limit:
            text = f"call {number} (retries={issued.retries}) was begun in {len(first)} sendings"
            yield f"{text}; the limit is {limit}", (issued, *_sent(call, first), *first.values())


def at_least_once(history: History) -> Findings:
    """A call that returned a value had run, before that, on every rank that replied."""
    for number, call, issued, settled in history.settled:
        if settled.outcome != "value":
            continue
        if issued.shape == "gather":
            needed = {(reply.rank, reply.by_wire) for reply in call.replies}
        else:
            needed = {(rank, sent.wire) for sent in call.sent[-1:] for rank, _ in sent.ranks}
        ended = {(each.rank, each.wire): each for each in reversed(call.ended) if not each.error}
        missing = sorted(rank for rank, _ in needed - ended.keys())
        late = sorted(each for each in needed & ended.keys() if ended[each].at > settled.at)
        if missing or not call.sent:
            where = f"rank {', '.join(map(str, missing))}" if missing else "any rank"
            text = f"call {number} returned a value and did not run to its end on {where}"
            yield text, (issued, *call.sent[-1:], *call.began, *call.ended, settled)
        elif late:
            text = f"call {number} returned a value before it had run on rank {late[0][0]}"
            yield text, (issued, *_sent(call, {late[0][1]}), settled, ended[late[0]])


def one_order(history: History) -> Findings:
    """All ranks run the collective calls of a group in one order."""
    runs: dict[tuple[str, int], dict[int, list[ev.CallBegan]]] = {}
    for began in history.every(ev.CallBegan):
        if began.call in history.of_all_ranks:
            ranks = runs.setdefault((began.group, began.epoch), defaultdict(list))
            ranks[began.rank].append(began)
    for (group, epoch), ranks in runs.items():
        for one, other in combinations(sorted(ranks), 2):
            swapped = _swapped(ranks[one], ranks[other])
            if swapped:
                calls = f"call {swapped[0].call} before call {swapped[1].call}"
                text = f"in epoch {epoch} of {group} rank {one} ran {calls}"
                yield f"{text}, and rank {other} in the reverse order", swapped
                break  # one cause would show thousands of times


def _swapped(one: Sequence[ev.CallBegan], other: Sequence[ev.CallBegan]) -> list[ev.CallBegan]:
    """Return two runs that *one* has in one order and *other* in the other, as each had them."""
    there = {(began.call, began.wire): (at, began) for at, began in enumerate(other)}
    both = [each for each in one if (each.call, each.wire) in there]
    for first, second in pairwise(both):
        places = there[first.call, first.wire], there[second.call, second.wire]
        if places[1][0] < places[0][0]:
            return [first, second, places[1][1], places[0][1]]
    return []


def one_epoch(history: History) -> Findings:
    """No call runs in two epochs, and its replies belong to one sending."""
    for number, call in history.calls.items():
        if not call.issued or call.issued[0].shape != "collective":
            continue
        by_wire: dict[int, dict[int, ev.CallBegan]] = defaultdict(dict)
        for began in call.began:
            by_wire[began.wire][began.epoch] = began
        for wire, epochs in by_wire.items():
            if len(epochs) > 1:
                text = f"call {number} ran in epochs {', '.join(map(str, sorted(epochs)))}"
                yield text, (*_sent(call, {wire}), *epochs.values())
        wires = {reply.by_wire for reply in call.replies}
        if len(wires) > 1:
            text = f"the replies to call {number} belong to {len(wires)} sendings of it"
            yield text, (*_sent(call, wires), *call.replies)


def in_step(history: History) -> Findings:
    """A rank that raised in a process group begins no call while another rank is in that call.

    The other rank may wait in a collective operation that the first one never began, and would
    meet it there in its next call, with values of two different calls. After a death the group is
    re-formed.
    """
    whole = history.of_all_ranks
    for group, events in history.by_group.items():
        runs: dict[tuple[int, int], list[ev.CallBegan | ev.CallEnded]] = defaultdict(list)
        for event in events:
            if isinstance(event, ev.CallBegan | ev.CallEnded):
                runs[event.rank, event.incarnation].append(event)
        deaths = [event for event in events if isinstance(event, ev.RankDied | ev.RankExited)]
        for who, mine in runs.items():
            last: ev.CallEnded | None = None
            for then in mine:
                if isinstance(then, ev.CallEnded):
                    last = then if then.joined and then.call in whole else last
                    continue
                raised, last = last, None
                if raised is None or raised.epoch != then.epoch:
                    continue
                if any(raised.epoch == death.epoch and death.at <= then.at for death in deaths):
                    continue
                call = history.calls[raised.call]
                left = {(e.rank, e.incarnation): e.at for e in call.ended if e.wire == raised.wire}
                sent = _sent(call, {raised.wire})
                others = [each for sending in sent for each in sending.ranks if each != who]
                inside = [each for each in others if left.get(each, math.inf) > then.at]
                if inside:
                    text = (
                        f"rank {who[0]} of {group} raised {raised.error} in call {raised.call} and "
                        f"began call {then.call} while rank {inside[0][0]} was in the former"
                    )
                    began = (each for each in call.began if each.wire == raised.wire)
                    yield text, (*sent, *began, raised, then)


def own_reply(history: History) -> Findings:
    """Every reply belongs to its call, and the items of a stream come once and in order."""
    for number, call in history.calls.items():
        sent = {each.wire: dict(each.ranks) for each in call.sent}
        items: dict[int, int] = defaultdict(int)
        for reply in call.replies:
            if (reply.by_call, reply.by_rank) != (number, reply.rank):
                what = f"the reply of rank {reply.by_rank} to call {reply.by_call}"
            elif sent.get(reply.by_wire, {}).get(reply.rank) != reply.by_incarnation:
                what = f"that of incarnation {reply.by_incarnation}, to which it was not sent"
            elif reply.by_wire != call.sent[-1].wire:
                what = f"that to an earlier sending ({reply.by_wire})"
            elif reply.by_item is not None and reply.by_item != items[reply.rank]:
                what = f"item {reply.by_item} of its stream, where {items[reply.rank]} was due"
            else:
                items[reply.rank] += reply.by_item is not None
                continue
            text = f"as the reply of rank {reply.rank} to call {number} was taken {what}"
            yield text, (*call.issued, *call.sent, reply)


def in_time(history: History) -> Findings:
    """A call times out at its deadline, not before, and no call ends long after its deadline."""
    for number, _, issued, settled in history.settled:
        took, limit = settled.at - issued.at, issued.seconds
        early = settled.outcome == "timeout" and (limit is None or took < limit - _EARLY)
        late = limit is not None and took > max(limit, 0.0) + _LATE
        if (early or late) and not history.is_excused(issued):
            text = f"call {number} ended with {settled.outcome} after {took:.2f} s"
            yield f"{text}; its limit: {limit} s", (issued, settled)


def with_cause(history: History) -> Findings:
    """A call fails with a death only if that death affected it, and with a close only at one."""
    ended = {event.group: event.cause for event in history.every(ev.GroupEnded)}
    # The last call that each group accepted: it accepts none once a call ends with its close.
    last = {
        issued.group: issued
        for issued in history.every(ev.CallIssued)
        if history.calls[issued.call].sent
    }
    deaths = {
        (each.group, each.rank, each.incarnation): each for each in history.every(ev.RankDied)
    }
    starts = {each.worker: each.at for each in history.every(ev.RankStarted)}
    exits = {each.worker: each.at for each in history.every(ev.RankExited)}
    sizes = {group: built.world_size for group, built in history.groups.items()}
    for change in history.every(ev.ChangePlanned):
        sizes[change.group] = max(sizes[change.group], change.world_size or 0)
    for number, call, issued, settled in history.settled:
        if history.is_excused(issued):
            continue
        group = issued.group
        sent = {(group, *who) for each in call.sent for who in each.ranks}
        what, later = "", last.get(group, issued)
        shown: list[ev.Event] = [issued, *call.sent, settled]
        if settled.outcome == "closed" and group not in ended:
            what = f"the end of {group}, which had not ended"
        elif settled.outcome == "closed" and later.at > settled.at:
            what = f"the end of {group}, which accepted call {later.call} after that"
            shown.append(later)
        elif settled.outcome == "died" and not settled.deaths:
            what = "a death, without a report of one"
        for rank, incarnation in settled.deaths:
            who = (group, rank, incarnation)
            death = f"the death of rank {rank} (incarnation {incarnation})"
            if who not in deaths:
                what = f"{death}, which had not died"
            # A group that gives up also fails the calls that no death has affected.
            elif who not in sent and not ended.get(group):
                died, at = deaths[who], exits.get(who, 0.0)
                there = {
                    each[1]
                    for each in sent
                    if starts.get(each, math.inf) <= died.at and at <= exits.get(each, math.inf)
                }
                built, lost, size = history.groups[group], lost_with(history, died), sizes[group]
                taken = set[int]().union(*(tied(built, each, size, died.reason) for each in lost))
                if there.isdisjoint(taken) and not takes_kept(built, died):
                    what = f"{death}, which affected no rank that it was sent to"
        if what:
            yield f"call {number} failed with {what}", shown


def _sent(call: CallHistory, wires: Collection[int]) -> list[ev.CallSent]:
    return [sent for sent in call.sent if sent.wire in wires]
