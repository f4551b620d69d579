"""What a run's notes say: pure functions of the notes and of when ranks were killed.

A step counts as done if the state at the end has it: where a rank goes on from an older state, the
steps after that state no longer count, and are done again.
"""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from .ranks.model import samples_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from .ranks.notes import Note


@dataclass(slots=True)
class Found:
    """What was found of one system; times in seconds.

    Attributes:
        step: The median step, of those in the time with kills that no kill fell into.
        steps: What was done in the time with kills.
        ettr: The share of that time that these took; one that a kill fell into counts as a *step*.
        redone: Steps that were begun again.
        last: The step whose hash is compared.
        overhead: What protection adds, as shares of the time without it, one for each round.
        equal: None where it was not found out.
        why: Why there is nothing more.
    """

    system: str
    ranks: int
    step: float | None = None
    steps: int = 0
    kills: int = 0
    ettr: float | None = None
    stalls: list[float] = field(default_factory=list[float])
    redone: int = 0
    lost: int = 0
    doubled: int = 0
    last: int = 0
    digest: str | None = None
    overhead: list[float] = field(default_factory=list[float])
    equal: bool | None = None
    why: str = ""


def lineage(notes: Iterable[Note]) -> dict[int, Note]:
    """Return the steps that the state at the end has, each as one of its ranks noted it."""
    found: dict[int, Note] = {}
    for note in notes:
        if note.what == "from":
            for step in [step for step in found if step > note.step]:
                del found[step]
        elif note.what == "done":
            found[note.step] = note
    return found


def begun_again(notes: Iterable[Note]) -> int:
    """Return how many steps were begun more than once."""
    begun = Counter((note.step, note.rank) for note in notes if note.what == "begin")
    most = dict[int, int]()
    for (step, _), times in begun.items():
        most[step] = max(times, most.get(step, 0))
    return sum(times - 1 for times in most.values())


def lost_and_doubled(notes: Iterable[Note], ranks: int) -> tuple[int, int]:
    """Return how many samples the state at the end lacks, and how many it has too often."""
    used, right = Counter[int](), Counter[int]()
    for step, note in lineage(notes).items():
        used.update(int(each) for each in note.more[1:] if each != "0")
        right.update(each for rank in range(ranks) for each in samples_of(step, rank, ranks))
    return (right - used).total(), (used - right).total()


def step_times(notes: Iterable[Note], killed: Sequence[float]) -> dict[int, float]:
    """Return how long each step took, from the end of rank 0's last; without those of a kill."""
    taken = dict[int, float]()
    ends = [note for note in notes if (note.what, note.rank) == ("done", 0)]
    for last, note in pairwise(ends):
        if any(last.at < at <= note.at for at in killed):
            taken.pop(note.step, None)  # it was done before
        else:
            taken[note.step] = note.at - last.at
    return taken


def stall(notes: Iterable[Note], killed: float, step: float) -> float | None:
    """Return how long nothing advanced; None if nothing did after that.

    From SIGKILL to the end of the first step that was begun after it and was done, less a *step*.
    """
    ends = [note.at for note in notes if note.what == "done" and float(note.more[0]) > killed]
    return min(ends) - killed - step if ends else None


def evaluate(
    found: Found, notes: Sequence[Note], killed: Sequence[float], began: float, ended: float
) -> None:
    """Enter what *notes* say of the time from *began* to *ended*, in which ranks were killed."""
    found.kills = len(killed)
    found.redone = begun_again(notes)
    found.lost, found.doubled = lost_and_doubled(notes, found.ranks)
    steps = lineage(notes)
    found.last = max(steps, default=0)
    counted = [step for step, note in steps.items() if began < note.at <= ended]
    found.steps = len(counted)
    taken = step_times(notes, killed)
    if times := [taken[step] for step in counted if step in taken]:
        found.step = statistics.median(times)
        found.ettr = sum(taken.get(step, found.step) for step in counted) / (ended - began)
        stalls = [stall(notes, at, found.step) for at in killed]
        found.stalls = [each for each in stalls if each is not None]


def digest_at(notes: Iterable[Note], step: int) -> str | None:
    """Return the digest of *step*; None if there is none, or if ranks differ."""
    found = {note.more[0] for note in notes if (note.what, note.step) == ("digest", step)}
    return found.pop() if len(found) == 1 else None
