"""How long to wait before the next restart.

Guarantees: a pure function of the attempt and a random number that the caller passes in; the
result lies between 0 and *maximum* seconds. OTP has no back-off; a supervisor has none unless
its spec names one.

Prior art: ``BackoffSupervisor`` in Akka, whose jitter only lengthens a delay. Here it spreads
both ways, so that the mean stays what the spec says.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .errors import SpecError


@dataclass(frozen=True, slots=True)
class BackOff:
    """Exponential delays with jitter and a cap, which start over after a healthy time.

    Attributes:
        initial: Delay before the first restart in a row, in seconds.
        factor: What each further delay is multiplied by, 1 or more.
        maximum: No delay is longer, in seconds.
        jitter: Share of the delay that is random: 0.2 spreads it by 20 % either way. 0 to 1.
        reset_after: Seconds a child must have run for its next restart to count as the first.
    """

    initial: float = 0.1
    factor: float = 2.0
    maximum: float = 30.0
    jitter: float = 0.1
    reset_after: float = 60.0

    def __post_init__(self) -> None:
        for field in ("initial", "factor", "maximum", "jitter", "reset_after"):
            value: object = getattr(self, field)
            if not isinstance(value, int | float) or isinstance(value, bool):
                raise SpecError(field, value, "must be a number")
            if not 0 <= value < math.inf:
                raise SpecError(field, value, "must be 0 or more, and finite")
        if self.factor < 1:
            raise SpecError("factor", self.factor, "must be 1 or more, so that delays do not fall")
        if self.jitter > 1:
            raise SpecError("jitter", self.jitter, "must be a share from 0 to 1")
        if self.maximum < self.initial:
            raise SpecError("maximum", self.maximum, f"must be at least initial={self.initial}")

    def delay(self, attempt: int, jitter: float = 0.5) -> float:
        """Return the seconds to wait before restart number *attempt* in a row, from 1.

        *jitter* is a random number in [0, 1); 0.5 gives the middle of the spread.
        """
        if self.initial == 0:
            return 0.0
        # The exponent is bounded first: 2.0 ** 5000 is an error, not a long delay.
        steps = max(0, attempt - 1)
        if self.factor > 1:
            steps = min(steps, math.ceil(math.log(self.maximum / self.initial, self.factor)))
        else:
            steps = 0
        middle = min(self.maximum, self.initial * self.factor**steps)
        return min(self.maximum, middle * (1 + self.jitter * (2 * jitter - 1)))

    def attempt_after(self, attempt: int, healthy_for: float) -> int:
        """Return the number of the next restart, after one that ran for *healthy_for* seconds."""
        return 1 if healthy_for >= self.reset_after else attempt + 1
