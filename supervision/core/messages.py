"""Messages of a supervisor: the events that its machine handles, its actions, its answers.

- Closed unions of values. Performing an action never blocks; what follows comes back as an event.
- A *serial* names one start of one child, unique in the life of its supervisor, as a pid does in
  OTP: an exit with the serial of an earlier start is recognised and ignored.
- The outcome of a start is delivered before the exit of what was started.
- Every request is answered exactly once; `Supervisor` turns a refusal into an exception.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from .decider import Directive
    from .notices import Notice
    from .policy import ChildType, ExitReason
    from .spec import ChildSpec


# --- answers ------------------------------------------------------------------------------


class Refusal(StrEnum):
    """Why a request was refused, in OTP's words where OTP has one."""

    ALREADY_STARTED = "already_started"
    ALREADY_PRESENT = "already_present"
    NOT_FOUND = "not_found"
    RUNNING = "running"
    RESTARTING = "restarting"
    START_FAILED = "start_failed"
    BAD_COMBINATION = "bad_combination"
    MAX_CHILDREN = "max_children"
    SIMPLE_ONE_FOR_ONE = "simple_one_for_one"
    INVALID_SPEC = "invalid_child_spec"
    NOPROC = "noproc"


class Shown(StrEnum):
    """The state of a child as requests show it."""

    RUNNING = "running"
    RESTARTING = "restarting"
    UNDEFINED = "undefined"


@dataclass(frozen=True, slots=True)
class Done:
    """The request was carried out.

    Attributes:
        child: The key of the child; empty if it was ignored and not kept.
        running: Whether the child runs now.
    """

    child: str
    running: bool = False


@dataclass(frozen=True, slots=True)
class Refused:
    """The request was not carried out; *error* is what the start function raised, if it did."""

    why: Refusal
    child: str = ""
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class ChildRow:
    """One line of `which_children`."""

    key: str
    shown: Shown
    type: ChildType


@dataclass(frozen=True, slots=True)
class Counts:
    """The number of children.

    Attributes:
        specs: Known children, running or not; 1 for simple_one_for_one.
        active: Running ones.
        supervisors: Known ones that are supervisors.
        workers: Known ones that are workers.
    """

    specs: int
    active: int
    supervisors: int
    workers: int


# --- actions ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StartChild:
    """Call the start function; its outcome comes back with *serial*."""

    child: str
    serial: int
    incarnation: int
    spec: ChildSpec


@dataclass(frozen=True, slots=True)
class AbandonStart:
    """The start took too long: kill what it still returns."""

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
    """Deliver `RetryDue` after everything that is in the mailbox now.

    Attributes:
        attempt: Number of the restart in a row, for the back-off; 0 means at once.
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
    """All children of the initial list are started."""


@dataclass(frozen=True, slots=True)
class FailStart:
    """The child could not be started and the others are stopped: end."""

    child: str
    error: BaseException


@dataclass(frozen=True, slots=True)
class Exit:
    """All children are stopped: end with *reason*."""

    reason: ExitReason


@dataclass(frozen=True, slots=True)
class Announce:
    """Pass *notice* to the log and the subscribers."""

    notice: Notice


# --- events -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Booted:
    """The supervisor begins: it starts its children."""


@dataclass(frozen=True, slots=True)
class Started:
    """The start function returned; the child runs."""

    child: str
    serial: int


@dataclass(frozen=True, slots=True)
class StartIgnored:
    """The start function returned `IGNORE`."""

    child: str
    serial: int


@dataclass(frozen=True, slots=True)
class NotStarted:
    """The start function raised *error*."""

    child: str
    serial: int
    error: BaseException


@dataclass(frozen=True, slots=True)
class Exited:
    """A child has ended, by itself or on request."""

    child: str
    serial: int
    reason: ExitReason
    directive: Directive | None = None


@dataclass(frozen=True, slots=True)
class Progressed:
    """A child has been of use: it served a call."""

    child: str
    serial: int


@dataclass(frozen=True, slots=True)
class RetryDue:
    """A restart is due; *ticket* is that of its `RetryLater`."""

    child: str
    ticket: int


@dataclass(frozen=True, slots=True)
class AlarmRang:
    """The delay of a `SetAlarm` is over."""

    alarm: int


@dataclass(frozen=True, slots=True)
class StopRequested:
    """The supervisor is to stop its children and end with *reason*."""

    reason: ExitReason


# Requests: the *caller* of each comes back with the answer.


@dataclass(frozen=True, slots=True)
class StartChildRequested:
    """Add *spec* as the last child; for simple_one_for_one, None and *args* for the template."""

    caller: Any
    spec: ChildSpec | None
    args: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class TerminateChildRequested:
    """Stop a child; *serial* limits it to that start of an instance, as a pid does in OTP."""

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
    """Remove a child that does not run."""

    caller: Any
    child: str


@dataclass(frozen=True, slots=True)
class ChildSpecRequested:
    """Return the spec of a child."""

    caller: Any
    child: str


@dataclass(frozen=True, slots=True)
class ChildrenRequested:
    """List the children, the newest first."""

    caller: Any


@dataclass(frozen=True, slots=True)
class CountRequested:
    """Count the children.

    Attributes:
        dead: Serials of children that have ended and whose exits are not delivered yet: OTP asks
            the VM whether a process lives, which a pure function cannot.
    """

    caller: Any
    dead: frozenset[int] = field(default_factory=frozenset[int])


Answer: TypeAlias = "Done | Refused | Counts | ChildSpec | tuple[ChildRow, ...]"
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
Outcome: TypeAlias = Started | StartIgnored | NotStarted
Request: TypeAlias = (
    StartChildRequested
    | TerminateChildRequested
    | RestartChildRequested
    | DeleteChildRequested
    | ChildSpecRequested
    | ChildrenRequested
    | CountRequested
)
Event: TypeAlias = (
    Booted | Outcome | Exited | Progressed | RetryDue | AlarmRang | StopRequested | Request
)
