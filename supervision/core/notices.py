"""What observers of a tree are told: frozen values, which are also the log events.

Guarantees: each notice has a dotted name in ``event``, a ``level`` and plain fields; *path* is the
ids from the top supervisor down, joined by slashes.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeAlias

from .policy import ExitReason


@dataclass(frozen=True, slots=True)
class ChildStarted:
    """A child runs."""

    event: ClassVar[str] = "phalanx.child_started"
    level: ClassVar[str] = "debug"
    path: str
    incarnation: int
    at: float


@dataclass(frozen=True, slots=True)
class ChildStartFailed:
    """A start function raised, or took too long."""

    event: ClassVar[str] = "phalanx.child_start_failed"
    level: ClassVar[str] = "warning"
    path: str
    incarnation: int
    error: str
    at: float


@dataclass(frozen=True, slots=True)
class ChildExited:
    """A child has ended; *decision* is what the supervisor makes of it, and why."""

    event: ClassVar[str] = "phalanx.child_exited"
    path: str
    incarnation: int
    reason: ExitReason
    decision: str
    at: float

    @property
    def level(self) -> str:
        """How much it matters to those who read the log: a failure does."""
        return "warning" if self.reason.is_failure else "debug"


@dataclass(frozen=True, slots=True)
class ChildLost:
    """A child did not end in its time and is no longer waited for; it may still run."""

    event: ClassVar[str] = "phalanx.child_lost"
    level: ClassVar[str] = "error"
    path: str
    incarnation: int
    waited: float
    at: float


@dataclass(frozen=True, slots=True)
class HandleFailed:
    """A child's handle raised when it was told to stop; the limits of the stop still hold."""

    event: ClassVar[str] = "phalanx.handle_failed"
    level: ClassVar[str] = "warning"
    path: str
    error: str
    at: float


@dataclass(frozen=True, slots=True)
class CallbackFailed:
    """A user's callback raised, and was passed over: *callback* is ``decider`` or ``monitor``."""

    event: ClassVar[str] = "phalanx.callback_failed"
    level: ClassVar[str] = "warning"
    path: str
    callback: str
    error: str
    at: float


@dataclass(frozen=True, slots=True)
class SupervisorBegan:
    """A supervisor runs and begins to start its children."""

    event: ClassVar[str] = "phalanx.supervisor_began"
    level: ClassVar[str] = "debug"
    path: str
    at: float


@dataclass(frozen=True, slots=True)
class SupervisorStartFailed:
    """A child of the initial list did not start; the others are stopped, the supervisor ends."""

    event: ClassVar[str] = "phalanx.supervisor_start_failed"
    level: ClassVar[str] = "debug"
    path: str
    child: str
    error: str
    at: float


@dataclass(frozen=True, slots=True)
class SupervisorReady:
    """All children of the initial list are started."""

    event: ClassVar[str] = "phalanx.supervisor_ready"
    level: ClassVar[str] = "debug"
    path: str
    at: float


@dataclass(frozen=True, slots=True)
class SupervisorGaveUp:
    """A supervisor stops its children and fails upwards; *why* names the limit that was passed."""

    event: ClassVar[str] = "phalanx.supervisor_gave_up"
    level: ClassVar[str] = "critical"
    path: str
    child: str
    why: str
    at: float


@dataclass(frozen=True, slots=True)
class SupervisorExited:
    """A supervisor has ended, after all of its children."""

    event: ClassVar[str] = "phalanx.supervisor_exited"
    level: ClassVar[str] = "debug"
    path: str
    reason: ExitReason
    at: float


Notice: TypeAlias = (
    ChildStarted
    | ChildStartFailed
    | ChildExited
    | ChildLost
    | HandleFailed
    | CallbackFailed
    | SupervisorBegan
    | SupervisorStartFailed
    | SupervisorReady
    | SupervisorGaveUp
    | SupervisorExited
)


def notice_fields(notice: Notice) -> dict[str, Any]:
    """Return the fields of *notice* for a log line, without its time; reasons as text."""
    names = [field.name for field in fields(notice) if field.name != "at"]
    values = {name: getattr(notice, name) for name in names}
    return {
        name: str(value) if isinstance(value, ExitReason) else value
        for name, value in values.items()
    }
