"""A run as one page of HTML that loads nothing: verdict, timelines, tables, violations.

The template escapes inserted values. The size of a timeline is bounded by its width: marks
within a pixel of their neighbour are merged with it and counted.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.chaos.checker.checker import INVARIANTS
from phalanx.chaos.history import events as ev
from phalanx.supervision import require_package

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from phalanx.chaos.history.history import History

    from .result import ChaosResult

_TEMPLATE = "report.html.j2"
_PER_SECOND = 24.0  # pixels
_LEAST, _MOST = 1000.0, 16_000.0
_STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800)  # seconds between ticks
_SHOWN = 20  # violations


def render_page(result: ChaosResult) -> str:
    """Return *result* as a page of HTML.

    Raises:
        MissingPackage: Jinja2 is not installed.
    """
    require_package("jinja2", "chaos")
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # noqa: PLC0415  # if used

    events = result.history.events
    seconds = max(events[-1].at if events else 0.0, result.plan.duration, 1.0)
    width = min(max(seconds * _PER_SECOND, _LEAST), _MOST)
    scale = width / seconds
    step = next((each for each in _STEPS if each * scale >= 60), _STEPS[-1])

    def named(marks: Sequence[Span]) -> list[tuple[Span, bool]]:
        """Return the marks, and whether the next one leaves room for the name of each."""
        ends = (*(mark.begin for mark in marks[1:]), math.inf)
        needed = (mark.begin + (12 + 6.5 * len(mark.state)) / scale for mark in marks)
        return list(zip(marks, map(float.__le__, needed, ends), strict=True))

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(_TEMPLATE).render(
        result=result,
        invariants=INVARIANTS,
        violations=result.selected(_SHOWN),
        timelines=timelines(result.history, 1.0 / scale),
        named=named,
        scale=scale,
        width=width,
        ticks=range(0, int(seconds) + 1, step),
    )


@dataclass(frozen=True, slots=True)
class Span:
    """A period or a moment, in seconds since the run began.

    Attributes:
        state: ``starting``, ``up``, ``run``, ``failed`` (a run that raised), ``whole`` or
            ``broken`` (the group); of a moment: the fault, or the outcome of a call.
        label: Drawn if there is room.
        count: How many it stands for.
    """

    state: str
    begin: float
    end: float
    text: str
    label: str = ""
    count: int = 1


@dataclass(frozen=True, slots=True)
class Lane:
    """One row of a timeline."""

    name: str
    lives: tuple[Span, ...] = ()
    runs: tuple[Span, ...] = ()
    marks: tuple[Span, ...] = ()


def timelines(history: History, grain: float) -> dict[str, tuple[Lane, ...]]:
    """Return the lanes of each group, its own first; *grain*: the seconds of a pixel."""
    end = history.events[-1].at if history.events else 0.0
    drawn = {
        f"group {group}": _lanes(events, end, grain)
        for group, events in history.by_group.items()
        if group in history.groups
    }
    injected = [each for each in history.every(ev.FaultInjected) if each.rank is None]
    if injected:
        marks = tuple(map(_fault, injected))
        drawn["helper processes, standbys, the driver"] = (Lane("others", marks=marks),)
    return drawn


def _lanes(events: Sequence[ev.Event], end: float, grain: float) -> tuple[Lane, ...]:
    by_rank: dict[int, list[ev.Event]] = defaultdict(list)
    for event in events:
        if isinstance(event, ev.RankEvent | ev.FaultInjected) and event.rank is not None:
            by_rank[event.rank].append(event)
    last = next((each.at for each in reversed(events) if isinstance(each, ev.GroupEnded)), end)
    outcomes = (
        Span(each.outcome, each.at, each.at, f"call {each.call}: {each.outcome} {each.error}")
        for each in events
        if isinstance(each, ev.CallSettled) and each.outcome != "value"
    )
    group = Lane("group", _states(events, last), (), _thinned(outcomes, grain))
    return group, *(_rank(rank, by_rank[rank], last, grain) for rank in sorted(by_rank))


def _states(events: Iterable[ev.Event], end: float) -> tuple[Span, ...]:
    changes = [
        each for each in events if isinstance(each, ev.GroupUp | ev.GroupDown | ev.GroupEnded)
    ]
    found: list[Span] = []
    for one, until in zip(changes, [*(each.at for each in changes[1:]), end], strict=True):
        epoch = f"epoch {one.epoch}"
        if isinstance(one, ev.GroupUp):
            found.append(Span("whole", one.at, until, epoch, epoch))
        elif isinstance(one, ev.GroupDown):
            found.append(Span("broken", one.at, until, f"{epoch}: {one.cause}", epoch))
    return tuple(found)


def _rank(rank: int, events: Sequence[ev.Event], end: float, grain: float) -> Lane:
    started = {each.incarnation: each for each in events if isinstance(each, ev.RankStarted)}
    ready = {each.incarnation: each.at for each in events if isinstance(each, ev.RankReady)}
    exited = {each.incarnation: each for each in events if isinstance(each, ev.RankExited)}
    begun: dict[tuple[int, int], ev.CallBegan] = {}
    runs: list[Span] = []
    marks: list[Span] = []
    for event in events:
        match event:
            case ev.CallBegan():
                begun[event.incarnation, event.wire] = event
            case ev.CallEnded():
                began = begun.pop((event.incarnation, event.wire), None)
                if began is not None:
                    runs.append(_run(began, event.at, event.error))
            case ev.FaultInjected():
                marks.append(_fault(event))
            case _:
                pass
    ends = {incarnation: each.at for incarnation, each in exited.items()}
    # Cut off by a death, or by the end of the record.
    runs += [_run(each, ends.get(each.incarnation, end), "cut off") for each in begun.values()]
    lives: list[Span] = []
    for incarnation, start in started.items():
        until = ends.get(incarnation, end)
        how = f", ended: {exited[incarnation].reason}" if incarnation in exited else ""
        text = f"incarnation {incarnation}, epoch {start.epoch}, pid {start.pid}{how}"
        serving = min(ready.get(incarnation, until), until)
        lives.append(Span("starting", start.at, serving, text))
        if serving < until:
            lives.append(Span("up", serving, until, text, f"#{incarnation}"))
    return Lane(f"rank {rank}", tuple(lives), _thinned(runs, grain), _thinned(marks, grain / 2))


def _run(began: ev.CallBegan, end: float, error: str) -> Span:
    text = f"call {began.call}, epoch {began.epoch}" + (f": {error}" if error else "")
    return Span("failed" if error else "run", began.at, max(end, began.at), text)


def _fault(injected: ev.FaultInjected) -> Span:
    point = f" at {injected.point}" if injected.point else ""
    note = f" ({injected.note})" if injected.note else ""
    text = f"fault {injected.number}: {injected.fault} to {injected.target}{point}{note}"
    return Span(injected.fault, injected.at, injected.at, text)


def _thinned(spans: Iterable[Span], grain: float) -> tuple[Span, ...]:
    """Merge spans of one state that follow each other within *grain*."""
    found: list[Span] = []
    latest: dict[str, int] = {}
    for span in sorted(spans, key=lambda each: each.begin):
        place = latest.get(span.state, len(found))
        if place == len(found) or span.begin - found[place].end > grain:
            latest[span.state] = len(found)
            found.append(span)
            continue
        last, end = found[place], max(found[place].end, span.end)
        text = f"{last.count + 1} times, the last: {span.text}"
        found[place] = replace(last, end=end, text=text, count=last.count + 1)
    return tuple(found)
