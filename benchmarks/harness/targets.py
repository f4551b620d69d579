"""`Verdict`: a figure held against a target.

Guarantees: a limit is met when all of the interval of the figure meets it; what was not measured is
neither met nor missed, and says why.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from .stats import Samples


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one target.

    Attributes:
        what: The target in words.
        limit: Its number.
        value: The median, None where there is none.
        low: The end of its interval that is nearer to zero.
        high: The other one.
        state: ``met``, ``missed`` or ``not measured``.
        why: Where it was not measured, why.
    """

    what: str
    limit: float
    value: float | None = None
    low: float | None = None
    high: float | None = None
    state: Literal["met", "missed", "not measured"] = "not measured"
    why: str = ""


def at_most(what: str, found: Samples | None, limit: float, why: str = "") -> Verdict:
    """Hold *found* against what it may be at most, with all of its interval."""
    if found is None:
        return Verdict(what, limit, why=why)
    state: Literal["met", "missed"] = "met" if found.high <= limit else "missed"
    return Verdict(what, limit, found.median, found.low, found.high, state)


def at_least(what: str, found: Samples | None, limit: float, why: str = "") -> Verdict:
    """Hold *found* against what it has to be at least, with all of its interval."""
    if found is None:
        return Verdict(what, limit, why=why)
    state: Literal["met", "missed"] = "met" if found.low >= limit else "missed"
    return Verdict(what, limit, found.median, found.low, found.high, state)
