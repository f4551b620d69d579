"""Messages of a supervisor: events that it handles, actions that it asks for, answers.

What can happen to a supervisor: everything its machine ever hears of.

Guarantees: a closed union. Its time is that of its handling, and an argument of the machine.
A *serial* names one start of one child, unique in the life of its supervisor, as a pid does in
OTP: an exit with the serial of an earlier start is recognised and ignored.

Left to others: the order. Whoever delivers the events keeps one mailbox, first in first out, and
delivers the outcome of a start before the exit of what was started.

What a supervisor wants done: everything `decide` ever asks for.

Guarantees: a closed union of values; performing one never blocks the supervisor, and what follows
from it comes back as an event.

What a supervisor answers: OTP's results, as values.

Guarantees: every request is answered with exactly one `Answer`; a refusal is a value here, and
becomes an exception only at the surface that users call (`Supervisor`).
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
        child: The key of the child; empty where an ignored child was not kept.
        running: Whether the child runs now.
    """

    child: str
    running: bool = False


@dataclass(frozen=True, slots=True)
class Refused:
    """The request was not carried out; *error* is what a start function raised, if it was that."""

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
class Children:
    """All children, newest first."""

    rows: tuple[ChildRow, ...]


@dataclass(frozen=True, slots=True)
class Counts:
    """How many children there are.

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


@dataclass(frozen=True, slots=True)
class Found:
    """The spec asked for."""

    spec: ChildSpec


Answer: TypeAlias = Done | Refused | Children | Counts | Found


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
