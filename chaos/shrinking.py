"""Which smaller schedules to try, and what is smallest of those that fail. Decides; runs nothing.

Guarantees: the same answers lead to the same candidates; each candidate is smaller or simpler than
the schedule that is known to fail, and none is asked about twice. When all questions have been
answered, no single strike of the result can be left out.

Left to others: whether a candidate fails (`shrinker`).

Source: ddmin (Zeller and Hildebrandt, Simplifying and Isolating Failure-Inducing Input, 2002).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

from .schedule import Schedule

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from .schedule import Strike

Questions: TypeAlias = "Generator[Schedule, bool, Schedule]"

_FIRST = 0.3  # seconds before the first strike, where its time turns out not to matter
_GAPS = (0.5, 1.0, 2.0)  # seconds between strikes that are tried, narrow first
_SHORT = 0.5  # seconds for what lasts


def smaller(schedule: Schedule) -> Questions:
    """Yield candidates, be sent whether each fails, and return the smallest that does.

    Args:
        schedule: It is known to fail.
    """
    known: dict[Schedule, bool] = {schedule: True}
    questions = _reduced_and_simplified(schedule)
    try:
        candidate = next(questions)
        while True:
            if candidate not in known:
                known[candidate] = yield candidate
            candidate = questions.send(known[candidate])
    except StopIteration as end:
        found: Schedule = end.value
        return found


def _reduced_and_simplified(schedule: Schedule) -> Questions:
    schedule = yield from _reduced(schedule)
    schedule = yield from _simplified(schedule)
    # With simpler strikes, fewer may do.
    return (yield from _reduced(schedule))


def _reduced(schedule: Schedule) -> Questions:
    """Leave out strikes: first many at once, in the end one at a time."""
    if not len(schedule):
        return schedule
    nothing = schedule.only(())
    if (yield nothing):
        return nothing
    parts = 2
    while len(schedule) > 1:
        numbers = [strike.number for strike in schedule]
        parts = min(parts, len(numbers))
        for left_out in _split(numbers, parts):
            rest = schedule.only([n for n in numbers if n not in left_out])
            if (yield rest):
                schedule = rest
                parts = max(parts - 1, 2)
                break
        else:
            if parts == len(numbers):
                break
            parts *= 2
    return schedule


def _split(numbers: list[int], parts: int) -> Iterator[set[int]]:
    size, more = divmod(len(numbers), parts)
    start = 0
    for index in range(parts):
        end = start + size + (index < more)
        yield set(numbers[start:end])
        start = end


def _simplified(schedule: Schedule) -> Questions:
    """Have strikes come soon and close together, at any moment, and last a short time."""
    for gap in _GAPS:
        closer = Schedule(
            tuple(
                replace(strike, at=min(strike.at, round(_FIRST + gap * index, 3)))
                for index, strike in enumerate(schedule)
            )
        )
        if closer != schedule and (yield closer):
            schedule = closer
            break
    for number in [strike.number for strike in schedule]:
        for simpler in _SIMPLER:
            tried = Schedule(
                tuple(simpler(each) if each.number == number else each for each in schedule)
            )
            if tried != schedule and (yield tried):
                schedule = tried
    return schedule


def _at_any_moment(strike: Strike) -> Strike:
    return replace(strike, point="")


def _of_one_rank(strike: Strike) -> Strike:
    return replace(strike, target="random") if strike.target == "group" else strike


def _short(strike: Strike) -> Strike:
    return replace(strike, seconds=min(strike.seconds, _SHORT))


_SIMPLER = (_at_any_moment, _of_one_rank, _short)
