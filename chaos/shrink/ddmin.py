"""`ddmin`: the smallest part of a schedule that still fails, by delta debugging.

The same answers lead to the same candidates, and none is tried twice. No single fault of the
result can be left out.

Source: Zeller and Hildebrandt, Simplifying and Isolating Failure-Inducing Input, 2002.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

from phalanx.chaos.nemesis.schedule import Schedule

if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx.chaos.nemesis.schedule import ScheduledFault

_FIRST = 0.3  # seconds before the first fault, if its time turns out not to matter
_GAPS = (0.5, 1.0, 2.0)  # seconds between faults that are tried, narrow first
_SHORT = 0.5  # seconds for a fault that lasts
_SIMPLER: tuple[Callable[[ScheduledFault], ScheduledFault], ...] = (
    lambda fault: replace(fault, point=""),
    lambda fault: replace(fault, target="random") if fault.target == "group" else fault,
    lambda fault: replace(fault, seconds=min(fault.seconds, _SHORT)),
)


def ddmin(schedule: Schedule, fails: Callable[[Schedule], bool]) -> Schedule:
    """Return the smallest and simplest schedule found that *fails*, as *schedule* does."""
    known: dict[Schedule, bool] = {schedule: True}

    def ask(candidate: Schedule) -> bool:
        if candidate not in known:
            known[candidate] = fails(candidate)
        return known[candidate]

    schedule = _simplified(_reduced(schedule, ask), ask)
    return _reduced(schedule, ask)  # with simpler faults, fewer may do


def _reduced(schedule: Schedule, ask: Callable[[Schedule], bool]) -> Schedule:
    """Leave out faults: first many at once, in the end one at a time."""
    if ask(schedule.only(())):
        return schedule.only(())
    parts = 2
    while len(schedule) > 1:
        numbers = [fault.number for fault in schedule]
        parts = min(parts, len(numbers))
        ends = [len(numbers) * part // parts for part in range(parts + 1)]
        for begin, end in pairwise(ends):
            rest = schedule.only(numbers[:begin] + numbers[end:])
            if ask(rest):
                schedule = rest
                parts = max(parts - 1, 2)
                break
        else:
            if parts == len(numbers):
                break
            parts *= 2
    return schedule


def _simplified(schedule: Schedule, ask: Callable[[Schedule], bool]) -> Schedule:
    """Have faults come soon, close together, at any time, into one rank, for a short time."""
    for gap in _GAPS:
        closer = Schedule(
            tuple(
                replace(fault, at=min(fault.at, round(_FIRST + gap * index, 3)))
                for index, fault in enumerate(schedule)
            )
        )
        if ask(closer):
            schedule = closer
            break
    for number in [fault.number for fault in schedule]:
        for simpler in _SIMPLER:
            tried = Schedule(tuple(simpler(f) if f.number == number else f for f in schedule))
            if ask(tried):
                schedule = tried
    return schedule
