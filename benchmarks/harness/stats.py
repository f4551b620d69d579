"""`Samples`: one figure per round, and what may be said about its median.

Guarantees: the interval holds the true median with at least 95 % confidence whatever the
distribution, as long as rounds are independent; with fewer than six rounds there is no such
interval, and `confidence` says what the one from least to most is worth.

Source: order statistics of the median (Conover, Practical Nonparametric Statistics, section 3.2).
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

_ENOUGH = 0.95


@dataclass(frozen=True, slots=True)
class Samples:
    """One figure for each round, in the order of the rounds; never empty."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """The median of the rounds."""
        return statistics.median(self.values)

    @property
    def low(self) -> float:
        """The lower end of the median's interval."""
        return sorted(self.values)[_rank(len(self.values)) - 1]

    @property
    def high(self) -> float:
        """The upper end of it."""
        return sorted(self.values)[-_rank(len(self.values))]

    @property
    def confidence(self) -> float:
        """How sure it is that the interval holds the median."""
        return _confidence(len(self.values), _rank(len(self.values)))

    def with_each(self, other: Samples, combine: Callable[[float, float], float]) -> Samples | None:
        """Return the figures combined round by round; None where there is no common round.

        Rounds are alternated, so that what slows the machine for a while is in both.
        """
        pairs = list(zip(self.values, other.values, strict=False))
        return of(combine(ours, theirs) for ours, theirs in pairs)

    def over(self, other: Samples) -> Samples | None:
        """Return the ratio to *other*, round by round."""
        return self.with_each(other, lambda ours, theirs: ours / theirs)


def of(values: Iterable[float]) -> Samples | None:
    """Return *values* as samples; None where there are none."""
    kept = tuple(values)
    return Samples(kept) if kept else None


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the least of *values* that *percent* of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def _rank(count: int) -> int:
    """Return the innermost pair of order statistics, counted from outside, that is wide enough."""
    rank = 1
    while rank < count / 2 and _confidence(count, rank + 1) >= _ENOUGH:
        rank += 1
    return rank


def _confidence(count: int, rank: int) -> float:
    """Return how probable it is that the median lies between the *rank*-th from either end."""
    outside = sum(math.comb(count, below) for below in range(rank))
    return max(0.0, 1 - outside / math.ldexp(1, count - 1))
