"""How many restarts are allowed, and whether the next one still is.

Guarantees: `RestartWindow.admit` is OTP's arithmetic: the restart asked for counts before it is
made, both ends of the period count, and *max_restarts* + 1 inside one period is one too many.

By default times are compared exactly: two restarts count together when they are at most *period*
apart. OTP compares whole seconds, so that two restarts 2.4 s apart may or may not count together
under a period of 2, depending on where the seconds begin. Exact is what the words of the spec
say, so it is the default; ``whole_seconds=True`` gives OTP's traces.

Source: ``add_restart`` in OTP's ``supervisor``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from .errors import SpecError


@dataclass(frozen=True, slots=True)
class Intensity:
    """At most *max_restarts* restarts in any *period* seconds; one more escalates.

    Attributes:
        max_restarts: Restarts allowed per period. 0 means that the first failure escalates.
        period: Length of the window in seconds, above 0.
        whole_seconds: Count in whole seconds of the clock, as OTP does.
    """

    max_restarts: int = 1
    period: float = 5.0
    whole_seconds: bool = False

    def __post_init__(self) -> None:
        _check_count(self.max_restarts)
        _check_period(self.period)
        _check_flag(self.whole_seconds)
        if self.whole_seconds and self.period != int(self.period):
            raise SpecError("period", self.period, "must be whole where whole seconds are counted")

    def window(self) -> RestartWindow:
        """Return an empty window of this intensity."""
        return RestartWindow(self.max_restarts, self.period, whole_seconds=self.whole_seconds)


@dataclass(frozen=True, slots=True)
class RestartWindow:
    """The restarts of one supervisor that still count.

    Attributes:
        intensity: Restarts allowed per period.
        period: Length of the window in seconds.
        spent: When the restarts still inside the window happened, oldest first, in seconds on
            the monotonic clock of whoever calls `admit`.
        whole_seconds: Count in whole seconds of that clock, as OTP does.
    """

    intensity: int
    period: float
    spent: tuple[float, ...] = ()
    whole_seconds: bool = False

    def admit(self, now: float) -> RestartWindow | None:
        """Return the window after a restart at *now*, or None where that is one too many."""
        moment = self._moment(now)
        recent = self._recent(moment)
        if len(recent) >= self.intensity:
            return None
        return replace(self, spent=(*recent, moment))

    def count(self, now: float) -> int:
        """Return how many restarts are inside the window at *now*."""
        return len(self._recent(self._moment(now)))

    def _moment(self, now: float) -> float:
        return float(math.floor(now)) if self.whole_seconds else now

    def _recent(self, moment: float) -> tuple[float, ...]:
        # Times never fall, so the first one inside ends the search.
        for index, at in enumerate(self.spent):
            if moment - at <= self.period:
                return self.spent[index:]
        return ()


def _check_flag(value: object) -> None:
    if not isinstance(value, bool):
        raise SpecError("whole_seconds", value, "must be True or False")


def _check_count(value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise SpecError("max_restarts", value, "must be a whole number, 0 or more")


def _check_period(value: object) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise SpecError("period", value, "must be a number of seconds")
    if not 0 < value < math.inf:
        raise SpecError("period", value, "must be above 0 seconds, and finite")
