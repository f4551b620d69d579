"""Messages of a supervisor: the events that its machine handles, its actions, its answers.

- Closed unions of values. Performing an action never blocks; its results come back as events.
  A notice is an action too: it goes to the log and the subscribers.
- A *serial* names one start of one child, unique in the life of its supervisor, as a pid does in
  OTP: an exit with the serial of an earlier start is recognised and ignored.
- The outcome of a start is delivered before the exit of the started child.
- Every request is answered exactly once; `Supervisor` raises the answer that is an exception.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from .notices import Notice

if TYPE_CHECKING:
    from collections.abc import Callable

    from .decider import Directive
    from .machine import Status, SupervisorMachine
    from .restart_rules import ChildType, ExitReason
    from .spec import ChildSpec


@dataclass(frozen=True, slots=True)
class Done:
    """The request was carried out; *child* is empty for one that was ignored and not kept."""

    child: str
    running: bool = False


@dataclass(frozen=True, slots=True)
class ChildRow:
    """One line of `which_children`; *shown* is running, restarting or undefined."""

    key: str
    shown: Status
    type: ChildType


@dataclass(frozen=True, slots=True)
class Counts:
    """Numbers of children: known (1 for simple_one_for_one), running, and known by type."""

    specs: int
    active: int
    supervisors: int
    workers: int


@dataclass(frozen=True, slots=True)
class OfStart:
    """The base of messages about one start of a child."""

    child: str
    serial: int


@dataclass(frozen=True, slots=True)
class StartChild(OfStart):
    """Call the start function; its outcome comes back with *serial*."""

    incarnation: int
    spec: ChildSpec


class AbandonStart(OfStart):
    """The start took too long: kill what it still returns."""


class TerminateChild(OfStart):
    """Ask the child to end; its exit comes back."""


class KillChild(OfStart):
    """End the child by force; its exit comes back."""


@dataclass(frozen=True, slots=True)
class Retry:
    """A restart that is due; as an action, deliver it after what is in the mailbox now.

    If *attempt* is not 0, it is that number of a restart in a row, and the back-off delays it.
    """

    child: str
    ticket: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Alarm:
    """*delay* seconds have passed; as an action, deliver it then: an earlier alarm is void."""

    number: int
    delay: float


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer a request; an *answer* that is a `PhalanxError` refuses it."""

    caller: Any
    answer: Any


@dataclass(frozen=True, slots=True)
class BecomeReady:
    """All children of the initial list are started."""


@dataclass(frozen=True, slots=True)
class Exit:
    """All children are stopped: end with *reason*, because of *error* if a start has failed."""

    reason: ExitReason
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class Booted:
    """The supervisor begins: it starts its children."""


class Outcome(OfStart):
    """The outcome of a start."""


class Started(Outcome):
    """The start function returned; the child runs."""


@dataclass(frozen=True, slots=True)
class NotStarted(Outcome):
    """The start function raised *error*, or returned `IGNORE` if that is None."""

    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class Exited(OfStart):
    """A child has ended, by itself or on request; *was_useful*: it has served a call."""

    reason: ExitReason
    directive: Directive | None = None
    was_useful: bool = False


@dataclass(frozen=True, slots=True)
class StopRequested:
    """The supervisor is to stop its children and end with *reason*."""

    reason: ExitReason


@dataclass(frozen=True, slots=True)
class Request:
    """*ask* the machine for what one of its request methods does and returns.

    Attributes:
        caller: Comes back with the answer.
        dead: Serials of children that have ended and whose exits are not delivered yet: OTP asks
            the VM whether a process lives, which a pure function cannot.
    """

    caller: Any
    ask: Callable[[SupervisorMachine], object]
    dead: frozenset[int] = frozenset()


Action: TypeAlias = (
    StartChild
    | AbandonStart
    | TerminateChild
    | KillChild
    | Retry
    | Alarm
    | Reply
    | BecomeReady
    | Exit
    | Notice
)
Event: TypeAlias = Booted | Started | NotStarted | Exited | Retry | Alarm | StopRequested | Request
