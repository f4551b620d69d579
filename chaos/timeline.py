"""Where everything of a group's history lies on a page: one lane for the group, one for each rank.

Guarantees: a drawing of bounded size, whatever the length of the run: what would lie within a pixel
of its neighbour is drawn once and counted.

Left to others: what a mark looks like (`page`).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from .call_records import Settled
from .group_records import GroupDown, GroupEnded, GroupUp, RankExited, RankReady, RankStarted
from .referee_records import Struck
from .worker_records import Began, Ended

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from .history import History
    from .record import Record


@dataclass(frozen=True, slots=True)
class Span:
    """Something that lasted.

    Attributes:
        state: ``starting``, ``up``, ``run``, ``failed`` (a run that raised), ``whole`` or
            ``broken`` (the group).
        begin: Seconds since the run began; likewise *end*.
        count: How many it stands for.
    """

    state: str
    begin: float
    end: float
    text: str
    count: int = 1


@dataclass(frozen=True, slots=True)
class Mark:
    """Something that happened at one moment.

    Attributes:
        what: A fault's name, or a call's outcome.
    """

    what: str
    at: float
    text: str
    count: int = 1


@dataclass(frozen=True, slots=True)
class Lane:
    """One row: what lasted, and what happened, by time."""

    name: str
    lives: tuple[Span, ...] = ()
    runs: tuple[Span, ...] = ()
    marks: tuple[Mark, ...] = ()


@dataclass(frozen=True, slots=True)
class Timeline:
    """One group: its own lane, with what became of calls, and one for each rank."""

    group: str
    lane: Lane
    ranks: tuple[Lane, ...]


def timelines(history: History, grain: float) -> tuple[Timeline, ...]:
    """Return the groups of *history*, where *grain* seconds are the least that can be seen."""
    end = history.records[-1].at if history.records else 0.0
    return tuple(
        _timeline(group, records, end, grain)
        for group, records in history.by_group.items()
        if group in history.groups
    )


def others(history: History) -> tuple[Mark, ...]:
    """Return the faults that were done to no rank: helpers, the driver, spares."""
    struck = (each for each in history.every(Struck) if each.rank is None)
    return tuple(Mark(each.fault, each.at, _told(each)) for each in struck)


def _timeline(group: str, records: Sequence[Record], end: float, grain: float) -> Timeline:
    by_rank: dict[int, list[Record]] = defaultdict(list)
    for record in records:
        rank = getattr(record, "rank", None)
        if isinstance(rank, int) and isinstance(
            record, RankStarted | RankReady | RankExited | Began | Ended | Struck
        ):
            by_rank[rank].append(record)
    ended = [each.at for each in records if isinstance(each, GroupEnded)]
    last = ended[-1] if ended else end
    outcomes = (
        Mark(each.outcome, each.at, f"call {each.call}: {each.outcome} {each.error}".rstrip())
        for each in records
        if isinstance(each, Settled) and each.outcome != "value"
    )
    return Timeline(
        group,
        Lane("group", _states(records, last), (), _thinned_marks(outcomes, grain)),
        tuple(_rank(rank, by_rank[rank], last, grain) for rank in sorted(by_rank)),
    )


def _states(records: Iterable[Record], end: float) -> tuple[Span, ...]:
    changes = [each for each in records if isinstance(each, GroupUp | GroupDown | GroupEnded)]
    found: list[Span] = []
    for one, following in pairwise([*changes, None]):
        assert one is not None
        until = end if following is None else following.at
        if isinstance(one, GroupUp):
            found.append(Span("whole", one.at, until, f"epoch {one.epoch}"))
        elif isinstance(one, GroupDown):
            found.append(Span("broken", one.at, until, f"epoch {one.epoch}: {one.cause}"))
    return tuple(found)


def _rank(rank: int, records: Iterable[Record], end: float, grain: float) -> Lane:
    started: dict[int, RankStarted] = {}
    ready: dict[int, float] = {}
    exited: dict[int, RankExited] = {}
    begun: dict[tuple[int, int], Began] = {}
    runs: list[Span] = []
    marks: list[Mark] = []
    for record in records:
        match record:
            case RankStarted():
                started[record.incarnation] = record
            case RankReady():
                ready.setdefault(record.incarnation, record.at)
            case RankExited():
                exited[record.incarnation] = record
            case Began():
                begun[record.incarnation, record.wire] = record
            case Ended():
                began = begun.pop((record.incarnation, record.wire), None)
                if began is not None:
                    runs.append(_run(began, record.at, record.error))
            case Struck():
                marks.append(Mark(record.fault, record.at, _told(record)))
            case _:
                pass
    for began in begun.values():  # cut off by a death, or by the end of the record
        gone = exited.get(began.incarnation)
        runs.append(_run(began, end if gone is None else gone.at, "cut off"))
    lives: list[Span] = []
    for incarnation, start in started.items():
        gone = exited.get(incarnation)
        until = end if gone is None else gone.at
        how = "" if gone is None else f", ended: {gone.reason}"
        text = f"incarnation {incarnation}, epoch {start.epoch}, pid {start.pid}{how}"
        serving = min(ready.get(incarnation, until), until)
        lives.append(Span("starting", start.at, serving, text))
        if serving < until:
            lives.append(Span("up", serving, until, text))
    runs.sort(key=lambda run: run.begin)
    return Lane(
        f"rank {rank}", tuple(lives), _thinned_runs(runs, grain), _thinned_marks(marks, grain / 2)
    )


def _run(began: Began, end: float, error: str) -> Span:
    text = f"call {began.call}, epoch {began.epoch}" + (f": {error}" if error else "")
    return Span("failed" if error else "run", began.at, max(end, began.at), text)


def _told(struck: Struck) -> str:
    moment = f" at {struck.point}" if struck.point else ""
    note = f" ({struck.note})" if struck.note else ""
    return f"fault {struck.strike}: {struck.fault} to {struck.target}{moment}{note}"


def _thinned_runs(runs: Iterable[Span], grain: float) -> tuple[Span, ...]:
    """Draw runs that follow each other within *grain*, and ended alike, as one."""
    found: list[Span] = []
    for run in runs:
        last = found[-1] if found else None
        if last is None or last.state != run.state or run.begin - last.end > grain:
            found.append(run)
            continue
        count = last.count + run.count
        end = max(last.end, run.end)
        text = f"{count} calls, the last: {run.text}"
        found[-1] = Span(last.state, last.begin, end, text, count)
    return tuple(found)


def _thinned_marks(marks: Iterable[Mark], grain: float) -> tuple[Mark, ...]:
    found: dict[tuple[str, int], Mark] = {}
    for mark in marks:
        place = (mark.what, int(mark.at / grain))
        seen = found.get(place)
        if seen is None:
            found[place] = mark
        else:
            count = seen.count + 1
            found[place] = Mark(seen.what, seen.at, f"{count} times, the last: {mark.text}", count)
    return tuple(sorted(found.values(), key=lambda mark: mark.at))
