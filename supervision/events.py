"""What can happen to a supervisor: everything its machine ever hears of.

Guarantees: a closed union. Its time is that of its handling, and an argument of the machine.
A *serial* names one start of one child, unique in the life of its supervisor, as a pid does in
OTP: an exit with the serial of an earlier start is recognised and ignored.

Left to others: the order. Whoever delivers the events keeps one mailbox, first in first out, and
delivers the outcome of a start before the exit of what was started.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from .decider import Directive
    from .exits import ExitReason
    from .spec import ChildSpec


@dataclass(frozen=True, slots=True)
class Booted:
    """The supervisor begins: it is to start its children."""


# --- outcomes of starts -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Started:
    """The start function returned; the child runs."""

    child: str
    serial: int


@dataclass(frozen=True, slots=True)
class StartIgnored:
    """The start function says that there is nothing to run."""

    child: str
    serial: int


@dataclass(frozen=True, slots=True)
class NotStarted:
    """The start function raised *error*."""

    child: str
    serial: int
    error: BaseException


# --- what children do ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Exited:
    """A child has ended, by itself or because it was told to."""

    child: str
    serial: int
    reason: ExitReason
    directive: Directive | None = None


@dataclass(frozen=True, slots=True)
class Progressed:
    """A child has been of use: it served a call."""

    child: str
    serial: int


# --- what comes back later ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RetryDue:
    """A restart is to be tried again; *ticket* is that of the `RetryLater` it comes from."""

    child: str
    ticket: int


@dataclass(frozen=True, slots=True)
class AlarmRang:
    """The time set by a `SetAlarm` is over."""

    alarm: int


# --- requests: each carries a *caller*, which comes back with the answer -----------------


@dataclass(frozen=True, slots=True)
class StopRequested:
    """The parent, or a user, wants the supervisor to end with *reason*."""

    reason: ExitReason


@dataclass(frozen=True, slots=True)
class StartChildRequested:
    """Add *spec* as the last child; for simple_one_for_one, None and *args* for the template."""

    caller: Any
    spec: ChildSpec | None
    args: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class TerminateChildRequested:
    """Stop a child.

    Of an instance, *serial* may name the start that is meant: then a later one is left alone, as
    with a pid in OTP.
    """

    caller: Any
    child: str
    serial: int | None = None


@dataclass(frozen=True, slots=True)
class RestartChildRequested:
    """Start a child that does not run."""

    caller: Any
    child: str


@dataclass(frozen=True, slots=True)
class DeleteChildRequested:
    """Forget a child that does not run."""

    caller: Any
    child: str


@dataclass(frozen=True, slots=True)
class ChildSpecRequested:
    """Give the spec of a child."""

    caller: Any
    child: str


@dataclass(frozen=True, slots=True)
class ChildrenRequested:
    """List the children."""

    caller: Any


@dataclass(frozen=True, slots=True)
class CountRequested:
    """Count the children.

    Attributes:
        dead: Serials of children known to have ended, whose exits are not delivered yet.
            OTP looks whether the process lives; looking is not for a pure function.
    """

    caller: Any
    dead: frozenset[int] = field(default_factory=frozenset[int])


Request: TypeAlias = (
    StartChildRequested
    | TerminateChildRequested
    | RestartChildRequested
    | DeleteChildRequested
    | ChildSpecRequested
    | ChildrenRequested
    | CountRequested
)
Outcome: TypeAlias = Started | StartIgnored | NotStarted
Event: TypeAlias = (
    Booted | Outcome | Exited | Progressed | RetryDue | AlarmRang | StopRequested | Request
)
