"""What a supervisor wants done: everything `decide` ever asks for.

Guarantees: a closed union of values; performing one never blocks the supervisor, and what follows
from it comes back as an event.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from .answers import Answer
    from .exits import ExitReason
    from .notices import Notice
    from .spec import ChildSpec


@dataclass(frozen=True, slots=True)
class StartChild:
    """Call the start function; its outcome comes back with *serial*."""

    child: str
    serial: int
    incarnation: int
    spec: ChildSpec


@dataclass(frozen=True, slots=True)
class AbandonStart:
    """The start took too long: whatever it still brings is to be killed."""

    child: str
    serial: int


@dataclass(frozen=True, slots=True)
class TerminateChild:
    """Ask the child to end; its exit comes back."""

    child: str
    serial: int
    reason: ExitReason


@dataclass(frozen=True, slots=True)
class KillChild:
    """End the child by force; its exit comes back."""

    child: str
    serial: int


@dataclass(frozen=True, slots=True)
class RetryLater:
    """Deliver `RetryDue`, after everything that is in the mailbox now.

    Attributes:
        attempt: Restart number in a row, for the back-off; 0 means at once.
    """

    child: str
    ticket: int
    attempt: int


@dataclass(frozen=True, slots=True)
class SetAlarm:
    """Deliver `AlarmRang` after *delay* seconds; an earlier alarm is void."""

    alarm: int
    delay: float


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer a request."""

    caller: Any
    answer: Answer


@dataclass(frozen=True, slots=True)
class BecomeReady:
    """All children of the initial list are started: tell whoever started the supervisor."""


@dataclass(frozen=True, slots=True)
class FailStart:
    """The child could not be started, the others are stopped: end, and tell who started us."""

    child: str
    error: BaseException


@dataclass(frozen=True, slots=True)
class Exit:
    """All children are stopped: end with *reason*."""

    reason: ExitReason


@dataclass(frozen=True, slots=True)
class Announce:
    """Tell whoever observes the tree."""

    notice: Notice


Action: TypeAlias = (
    StartChild
    | AbandonStart
    | TerminateChild
    | KillChild
    | RetryLater
    | SetAlarm
    | Reply
    | BecomeReady
    | FailStart
    | Exit
    | Announce
)
