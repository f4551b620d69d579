"""What may not become of calls.

Guarantees: each rule is a pure function of the history, and tells everything it finds; where a
driver was killed, what it had in flight is excused.
"""

from __future__ import annotations

import math
from collections import defaultdict
from itertools import combinations, pairwise
from typing import TYPE_CHECKING

from .call_records import Issued
from .group_records import GroupEnded, RankDied, RankExited, RankStarted
from .group_rules import tied
from .violation import found
from .worker_records import Began, Ended

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .call_records import Sent
    from .history import CallHistory, History
    from .violation import Violation

_OF_ALL = "restart ranks "  # how a decision begins that takes along also survivors that are kept
_EARLY = 0.05  # seconds by which a deadline may differ from the one that was written down
_LATE = 15.0  # seconds after its deadline; it takes milliseconds, the machine may not


def one_outcome(history: History) -> Iterator[Violation]:
    """Every call that was made has one outcome, and none has one that was not made."""
    for number, call in history.calls.items():
        if len(call.settled) > 1:
            yield found(
                "one_outcome",
                f"call {number} has {len(call.settled)} outcomes",
                (*call.issued, *call.settled),
            )
        if not call.issued:
            if call.settled or call.sent:
                yield found("one_outcome", f"call {number} was never made", call.records)
        elif not call.settled and not history.is_excused(call.issued[0]):
            yield found("one_outcome", f"call {number} has no outcome", call.records)


def at_most_once(history: History) -> Iterator[Violation]:
    """A call runs once on a rank, or as often as its caller allowed."""
    for number, call in history.calls.items():
        if not call.issued:
            continue
        issued = call.issued[0]
        runs: dict[tuple[int, int], list[Began]] = defaultdict(list)
        for began in call.began:
            runs[began.rank, began.wire].append(began)
        for (rank, wire), twice in runs.items():
            if len(twice) > 1:
                yield found(
                    "at_most_once",
                    f"rank {rank} ran call {number} {len(twice)} times for one sending ({wire})",
                    (issued, *_sendings(call, {wire}), *twice),
                )
        wires = {began.wire for began in call.began}
        allowed = 1 + (issued.retries if issued.on_death == "retry" else 0)
        if issued.shape == "gather":
            allowed = 1
        if len(wires) > allowed:
            first = {began.wire: began for began in reversed(call.began)}
            yield found(
                "at_most_once",
                f"call {number} (on_death={issued.on_death!r}, retries={issued.retries}) was begun "
                f"in {len(wires)} sendings, where {allowed} is the most",
                (issued, *_sendings(call, wires), *first.values()),
            )


def at_least_once(history: History) -> Iterator[Violation]:
    """A call whose outcome is a value ran to its end on every rank it was last sent to."""
    for number, call in history.calls.items():
        if not call.issued or not call.settled or call.settled[0].outcome != "value":
            continue
        if call.issued[0].shape == "gather":
            needed = {(taken.rank, taken.by_wire) for taken in call.taken}
        elif call.sent:
            needed = {(rank, call.sent[-1].wire) for rank, _ in call.sent[-1].ranks}
        else:
            needed = set[tuple[int, int]]()
        ended = {(each.rank, each.wire) for each in call.ended if not each.error}
        missing = sorted(rank for rank, wire in needed if (rank, wire) not in ended)
        if missing or not call.sent:
            where = f"rank {', '.join(map(str, missing))}" if missing else "any rank"
            yield found(
                "at_least_once",
                f"call {number} was answered with a value and never ran to its end on {where}",
                (call.issued[0], *call.sent[-1:], *call.began, *call.ended, *call.settled),
            )
            continue
        settled = call.settled[0]
        first = {(each.rank, each.wire): each for each in reversed(call.ended) if not each.error}
        for rank, wire in sorted(needed):
            if first[rank, wire].at > settled.at:
                yield found(
                    "at_least_once",
                    f"call {number} was answered with a value before it had run on rank {rank}",
                    (call.issued[0], *_sendings(call, {wire}), settled, first[rank, wire]),
                )
                break


def one_order(history: History) -> Iterator[Violation]:
    """All ranks ran the calls to the whole group in one order."""
    whole = {
        issued.call for issued in history.every(Issued) if issued.shape in ("collective", "gather")
    }
    runs: dict[tuple[str, int], dict[int, list[Began]]] = defaultdict(lambda: defaultdict(list))
    for began in history.every(Began):
        if began.call in whole:
            runs[began.group, began.epoch][began.rank].append(began)
    for (group, epoch), ranks in runs.items():
        for one, other in combinations(sorted(ranks), 2):
            swapped = _swapped(ranks[one], ranks[other])
            if swapped is not None:
                first, second = swapped[0], swapped[1]
                yield found(
                    "one_order",
                    f"in epoch {epoch} of {group} rank {one} ran call {first.call} before call "
                    f"{second.call}, and rank {other} the other way round",
                    swapped,
                )
                break  # of one cause there would be thousands


def _swapped(one: Sequence[Began], other: Sequence[Began]) -> tuple[Began, ...] | None:
    """Return two runs that *one* has in one order and *other* in the other, as each had them."""
    place = {(began.call, began.wire): index for index, began in enumerate(other)}
    last: Began | None = None
    for began in one:
        at = place.get((began.call, began.wire))
        if at is None:
            continue
        if last is not None and at < place[last.call, last.wire]:
            return last, began, other[at], other[place[last.call, last.wire]]
        last = began
    return None


def one_epoch(history: History) -> Iterator[Violation]:
    """A sending runs in one epoch, and the answers to a call come from one sending."""
    for number, call in history.calls.items():
        if not call.issued or call.issued[0].shape != "collective":
            continue
        by_wire: dict[int, list[Began]] = defaultdict(list)
        for began in call.began:
            by_wire[began.wire].append(began)
        for wire, runs in by_wire.items():
            epochs = {began.epoch for began in runs}
            if len(epochs) > 1:
                shown = {began.epoch: began for began in runs}
                yield found(
                    "one_epoch",
                    f"call {number} ran in epochs {', '.join(map(str, sorted(epochs)))}",
                    (*_sendings(call, {wire}), *shown.values()),
                )
        wires = {taken.by_wire for taken in call.taken}
        if len(wires) > 1:
            yield found(
                "one_epoch",
                f"the answers to call {number} come from {len(wires)} sendings of it",
                (*_sendings(call, wires), *call.taken),
            )


def in_step(history: History) -> Iterator[Violation]:
    """A rank that raised in a process group begins nothing while others are in that call.

    They may wait for it in an operation that it never began, and would meet it there in its next
    call, with values of two different calls. After a death the group is formed anew.
    """
    whole = {
        issued.call for issued in history.every(Issued) if issued.shape in ("collective", "gather")
    }
    for group, records in history.by_group.items():
        runs: dict[tuple[int, int], list[Began | Ended]] = defaultdict(list)
        for record in records:
            if isinstance(record, Began | Ended) and record.call in whole:
                runs[record.rank, record.incarnation].append(record)
        deaths = [record for record in records if isinstance(record, RankDied | RankExited)]
        for who, mine in runs.items():
            for raised, then in pairwise(mine):
                if not (isinstance(raised, Ended) and raised.joined and isinstance(then, Began)):
                    continue
                if raised.epoch != then.epoch or any(
                    raised.epoch == death.epoch and death.at <= then.at for death in deaths
                ):
                    continue
                call = history.calls[raised.call]
                left = {(e.rank, e.incarnation): e.at for e in call.ended if e.wire == raised.wire}
                sent = [each for each in call.sent if each.wire == raised.wire]
                late = [
                    other
                    for each in sent
                    for other in each.ranks
                    if other != who and left.get(other, math.inf) > then.at
                ]
                if late:
                    yield found(
                        "in_step",
                        f"rank {who[0]} of {group} raised {raised.error} in call {raised.call} and "
                        f"began call {then.call} while rank {late[0][0]} was in the former",
                        (*sent, *(e for e in call.began if e.wire == raised.wire), raised, then),
                    )


def own_reply(history: History) -> Iterator[Violation]:
    """What was taken for a rank's answer to a call was that rank's answer to that call."""
    for number, call in history.calls.items():
        sent = {each.wire: dict(each.ranks) for each in call.sent}
        items: dict[int, int] = defaultdict(int)
        for taken in call.taken:
            said = (taken.by_call, taken.by_rank)
            if said != (number, taken.rank):
                what = f"the answer of rank {taken.by_rank} to call {taken.by_call}"
            elif sent.get(taken.by_wire, {}).get(taken.rank) != taken.by_incarnation:
                what = f"that of incarnation {taken.by_incarnation}, which was not sent it"
            elif taken.by_wire != call.sent[-1].wire:
                what = f"that to an earlier sending ({taken.by_wire})"
            elif taken.by_item is not None and taken.by_item != items[taken.rank]:
                what = f"item {taken.by_item} of its stream, where {items[taken.rank]} was next"
            else:
                items[taken.rank] += taken.by_item is not None
                continue
            yield found(
                "own_reply",
                f"for the answer of rank {taken.rank} to call {number} was taken {what}",
                (*call.issued, *call.sent, taken),
            )


def in_time(history: History) -> Iterator[Violation]:
    """A call ends with `CallTimeout` at its deadline, not before, and none ends long after it."""
    for number, call in history.calls.items():
        if not call.issued or not call.settled or history.is_excused(call.issued[0]):
            continue
        issued, settled = call.issued[0], call.settled[0]
        took = settled.at - issued.at
        limit = issued.seconds
        if settled.outcome == "timeout" and (limit is None or took < limit - _EARLY):
            had = "no deadline" if limit is None else f"{limit:.2f} s"
            what = f"call {number} ended for want of time after {took:.2f} s, and had {had}"
        elif limit is not None and took > max(limit, 0.0) + _LATE:
            what = f"call {number} had {limit:.2f} s, and ended after {took:.2f} s"
        else:
            continue
        yield found("in_time", what, (issued, settled))


def with_cause(history: History) -> Iterator[Violation]:
    """A call ends with `WorkerDied` for deaths that took it, `ExecutorClosed` for a group's end."""
    ended = {record.group: record.cause for record in history.every(GroupEnded)}
    deaths = {_whose(each): each for each in history.every(RankDied)}
    starts = {_whose(each): each.at for each in history.every(RankStarted)}
    exits = {_whose(each): each.at for each in history.every(RankExited)}
    for number, call in history.calls.items():
        if not call.issued or not call.settled or history.is_excused(call.issued[0]):
            continue
        issued, settled = call.issued[0], call.settled[0]
        group = issued.group
        sent = {(group, *who) for each in call.sent for who in each.ranks}
        what = ""
        if settled.outcome == "closed" and group not in ended:
            what = f"the end of {group}, which had not ended"
        elif settled.outcome == "died" and not settled.deaths:
            what = "a death, without a report of one"
        for rank, incarnation in settled.deaths:
            who = (group, rank, incarnation)
            told = f"the death of rank {rank} (incarnation {incarnation})"
            if who not in deaths:
                what = f"{told}, which had not died"
            # A group that gives up also fails the calls that no death has touched.
            elif who not in sent and not ended.get(group):
                died, at = deaths[who], exits.get(who, 0.0)
                there = {
                    each[1]
                    for each in sent
                    if starts.get(each, math.inf) <= died.at and at <= exits.get(each, math.inf)
                }
                taken = tied(history.groups[group], rank, history.groups[group].world_size)
                if there.isdisjoint(taken) and not died.decision.startswith(_OF_ALL):
                    what = f"{told}, which took no rank that it was sent to"
        if what:
            told = f"call {number} failed with {what}"
            yield found("with_cause", told, (issued, *call.sent, settled))


def _whose(record: RankDied | RankStarted | RankExited) -> tuple[str, int | None, int]:
    return record.group, record.rank, record.incarnation


def _sendings(call: CallHistory, wires: set[int]) -> list[Sent]:
    return [sent for sent in call.sent if sent.wire in wires]
