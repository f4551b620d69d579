"""Exit reasons, strategies, restart intensity and back-off: the vocabulary of restarts.

- Every exit is exactly one `ExitKind`; whether it is a failure is OTP's rule and decided here only.
- The value of each word is OTP's (Elixir's for ``dynamic``): specs, logs and TOML trees use it.
- `RestartWindow.admit` is OTP's arithmetic: a restart counts before it is made, and both ends of
  the period count. Times are compared exactly, where OTP compares whole seconds.
- A back-off, which OTP does not have, is a pure function of the attempt and a random number.

Source: ``supervisor.erl`` (``add_restart``); Akka's ``BackoffSupervisor``, whose jitter only
lengthens a delay, while here it spreads both ways, so that the mean is what the spec says.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, TypeVar

from phalanx.supervision.errors import SpecError
from phalanx.supervision.validate import check_count, check_number, check_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

_Child = TypeVar("_Child")
_YEAR = 365 * 86400.0


class Strategy(StrEnum):
    """The children that are restarted together with one that failed."""

    ONE_FOR_ONE = "one_for_one"
    ONE_FOR_ALL = "one_for_all"
    REST_FOR_ONE = "rest_for_one"
    SIMPLE_ONE_FOR_ONE = "simple_one_for_one"
    DYNAMIC = "dynamic"

    @property
    def has_instances(self) -> bool:
        """Whether children are numbered instances that come and go, without an order."""
        return self in (Strategy.SIMPLE_ONE_FOR_ONE, Strategy.DYNAMIC)

    def tied(self, children: Sequence[_Child], failed: _Child) -> Sequence[_Child]:
        """Return those of *children*, in start order, that are restarted with *failed*."""
        match self:
            case Strategy.ONE_FOR_ALL:
                return children
            case Strategy.REST_FOR_ONE:
                return children[children.index(failed) :]
            case _:
                return (failed,)


class Restart(StrEnum):
    """The ends of a child that lead to its restart: all, the abnormal ones, none."""

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
        detail: Further information beside the *kind*, as text.
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


@dataclass(frozen=True, slots=True)
class Intensity:
    """At most *max_restarts* restarts in any *period* seconds; one more escalates.

    Attributes:
        max_restarts: Restarts allowed per period. 0 means that the first failure escalates.
        period: Length of the window in seconds, above 0.
    """

    max_restarts: int = 1
    period: float = 5.0

    def __post_init__(self) -> None:
        check_count("max_restarts", self.max_restarts, least=0)
        check_seconds("period", self.period, positive=True)

    def window(self) -> RestartWindow:
        """Return an empty window of this intensity."""
        return RestartWindow(self.max_restarts, self.period)


def in_period(period: float) -> str:
    """Return *period* of an `Intensity` in words; empty for one of years, which is no limit."""
    return "" if period >= _YEAR else f" in {period:g} s"


@dataclass(frozen=True, slots=True)
class RestartWindow(Intensity):
    """The restarts of one supervisor that still count.

    *spent* is when they happened, oldest first, on the monotonic clock of the caller of `admit`.
    """

    spent: tuple[float, ...] = ()

    def admit(self, now: float) -> RestartWindow | None:
        """Return the window after a restart at *now*, or None if that is one too many."""
        recent = self._recent(now)
        return None if len(recent) >= self.max_restarts else replace(self, spent=(*recent, now))

    def forgive(self, restarts: int) -> RestartWindow:
        """Return the window without its last *restarts*."""
        return replace(self, spent=self.spent[: max(0, len(self.spent) - restarts)])

    def count(self, now: float) -> int:
        """Return how many restarts are inside the window at *now*."""
        return len(self._recent(now))

    def _recent(self, now: float) -> tuple[float, ...]:
        return tuple(at for at in self.spent if now - at <= self.period)


_INITIAL = 0.1


@dataclass(frozen=True, slots=True)
class BackOff:
    """Exponential delays with jitter and a cap, which start over after a healthy time.

    Attributes:
        initial: Delay before the first restart in a row, in seconds.
        factor: Ratio of each delay to the one before, 1 or more.
        maximum: The longest delay, in seconds.
        jitter: Share of the delay that is random: 0.2 spreads it by 20 % either way. 0 to 1.
        reset_after: Seconds a child must have run for its next restart to count as the first.
    """

    initial: float = _INITIAL
    factor: float = 2.0
    maximum: float = 30.0
    jitter: float = 0.1
    reset_after: float = 60.0

    def __post_init__(self) -> None:
        for field in ("initial", "maximum", "reset_after"):
            check_seconds(field, getattr(self, field))
        check_number("factor", self.factor, least=1)
        check_number("jitter", self.jitter, most=1)
        if self.maximum < self.initial:
            if self.initial == _INITIAL:
                raise SpecError("maximum", self.maximum, f"give at least initial={_INITIAL:g}")
            remedy = f"give at most maximum={self.maximum:g}, or a greater maximum"
            raise SpecError("initial", self.initial, remedy)

    def delay(self, attempt: int, jitter: float = 0.5) -> float:
        """Return the seconds to wait before restart number *attempt* in a row, from 1.

        *jitter* is a random number in [0, 1); 0.5 gives the middle of the spread.
        """
        if self.initial == 0:
            return 0.0
        try:
            middle = min(self.maximum, self.initial * math.pow(self.factor, max(0, attempt - 1)))
        except OverflowError:  # 2.0 ** 5000 is an error, not a long delay
            middle = self.maximum
        return min(self.maximum, middle * (1 + self.jitter * (2 * jitter - 1)))

    def attempt_after(self, attempt: int, healthy_for: float) -> int:
        """Return the number of the next restart, after one that ran for *healthy_for* seconds."""
        return 1 if healthy_for >= self.reset_after else attempt + 1
