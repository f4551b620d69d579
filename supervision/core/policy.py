"""Exit reasons, strategies, restart intensity and back-off: the vocabulary of restarts.

Why a child ended, in one vocabulary for processes, actors and supervisors.

Guarantees: every exit is exactly one `ExitKind`; whether it counts as a failure is OTP's rule
(``normal`` and ``shutdown`` do not, everything else does) and is decided here and nowhere else.

Left to others: what evidence there is (the runtime reads wait statuses and counters).

Source: the exit reasons of Erlang's ``supervisor``; ``normal``, ``shutdown`` and
``{shutdown, Term}`` are its normal exits.

The closed vocabularies of a supervision tree, word for word OTP's.

Guarantees: every member's value is the word OTP (or Elixir, for ``dynamic``) uses, so that specs,
logs and TOML trees say the same thing.

Left to others: what the words lead to (`decide`).

How many restarts are allowed, and whether the next one still is.

Guarantees: `RestartWindow.admit` is OTP's arithmetic: the restart asked for counts before it is
made, both ends of the period count, and *max_restarts* + 1 inside one period is one too many.

By default times are compared exactly: two restarts count together when they are at most *period*
apart. OTP compares whole seconds, so that two restarts 2.4 s apart may or may not count together
under a period of 2, depending on where the seconds begin. Exact is what the words of the spec
say, so it is the default; ``whole_seconds=True`` gives OTP's traces.

Source: ``add_restart`` in OTP's ``supervisor``.

How long to wait before the next restart.

Guarantees: a pure function of the attempt and a random number that the caller passes in; the
result lies between 0 and *maximum* seconds. OTP has no back-off; a supervisor has none unless
its spec names one.

Prior art: ``BackoffSupervisor`` in Akka, whose jitter only lengthens a delay. Here it spreads
both ways, so that the mean stays what the spec says.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum

from phalanx.supervision.errors import SpecError


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


class Strategy(StrEnum):
    """Who is restarted together with a child that failed."""

    ONE_FOR_ONE = "one_for_one"
    ONE_FOR_ALL = "one_for_all"
    REST_FOR_ONE = "rest_for_one"
    SIMPLE_ONE_FOR_ONE = "simple_one_for_one"
    DYNAMIC = "dynamic"

    @property
    def has_instances(self) -> bool:
        """Whether children are numbered instances that come and go, without an order."""
        return self in (Strategy.SIMPLE_ONE_FOR_ONE, Strategy.DYNAMIC)


class Restart(StrEnum):
    """Which ends of a child lead to its restart: all, the abnormal ones, none."""

    PERMANENT = "permanent"
    TRANSIENT = "transient"
    TEMPORARY = "temporary"


class AutoShutdown(StrEnum):
    """Whether the end of significant children ends their supervisor."""

    NEVER = "never"
    ANY_SIGNIFICANT = "any_significant"
    ALL_SIGNIFICANT = "all_significant"


class ChildType(StrEnum):
    """Whether a child is a leaf of the tree or a supervisor itself."""

    WORKER = "worker"
    SUPERVISOR = "supervisor"


class ExitKind(StrEnum):
    """The class of an exit."""

    NORMAL = "normal"
    SHUTDOWN = "shutdown"
    CRASH = "crash"
    KILLED = "killed"
    UNRESPONSIVE = "unresponsive"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class ExitReason:
    """Why a child ended.

    Attributes:
        kind: The class of the exit.
        detail: What is known beyond the class, for people. Empty where nothing is.
        code: The exit code of a process that exited, else None.
        signal: The number of the signal that ended a process, else None.
    """

    kind: ExitKind
    detail: str = ""
    code: int | None = None
    signal: int | None = None

    @property
    def is_failure(self) -> bool:
        """Whether a transient child is restarted after it: OTP's abnormal exit."""
        return self.kind not in (ExitKind.NORMAL, ExitKind.SHUTDOWN)

    def __str__(self) -> str:
        return f"{self.kind} ({self.detail})" if self.detail else str(self.kind)


NORMAL = ExitReason(ExitKind.NORMAL)
SHUTDOWN = ExitReason(ExitKind.SHUTDOWN)
KILLED = ExitReason(ExitKind.KILLED)
