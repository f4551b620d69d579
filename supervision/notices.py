"""What observers of a tree are told: frozen values, which are also the log events.

Guarantees: each notice has a dotted ``name`` and plain fields; *path* is the ids from the top
supervisor down, joined by slashes.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeAlias

from .exits import ExitReason


@dataclass(frozen=True, slots=True)
class ChildStarted:
    """A child runs."""

    name: ClassVar[str] = "phalanx.child_started"
    path: str
    incarnation: int
    at: float


@dataclass(frozen=True, slots=True)
class ChildStartFailed:
    """A start function raised, or took too long."""

    name: ClassVar[str] = "phalanx.child_start_failed"
    path: str
    incarnation: int
    error: str
    at: float


@dataclass(frozen=True, slots=True)
class ChildExited:
    """A child has ended; *decision* is what the supervisor makes of it, and why."""

    name: ClassVar[str] = "phalanx.child_exited"
    path: str
    incarnation: int
    reason: ExitReason
    decision: str
    at: float


@dataclass(frozen=True, slots=True)
class ChildLost:
    """A child did not end in its time and is no longer waited for; it may still run."""

    name: ClassVar[str] = "phalanx.child_lost"
    path: str
    incarnation: int
    waited: float
    at: float


@dataclass(frozen=True, slots=True)
class HandleFailed:
    """A child's handle raised when it was told to stop; the limits of the stop still hold."""

    name: ClassVar[str] = "phalanx.handle_failed"
    path: str
    error: str
    at: float


@dataclass(frozen=True, slots=True)
class CallbackFailed:
    """A user's callback raised, and was passed over: *callback* is ``decider`` or ``monitor``."""

    name: ClassVar[str] = "phalanx.callback_failed"
    path: str
    callback: str
    error: str
    at: float


@dataclass(frozen=True, slots=True)
class SupervisorBegan:
    """A supervisor runs and begins to start its children."""

    name: ClassVar[str] = "phalanx.supervisor_began"
    path: str
    at: float


@dataclass(frozen=True, slots=True)
class SupervisorStartFailed:
    """A child of the initial list did not start; the others are stopped, the supervisor ends."""

    name: ClassVar[str] = "phalanx.supervisor_start_failed"
    path: str
    child: str
    error: str
    at: float


@dataclass(frozen=True, slots=True)
class SupervisorReady:
    """All children of the initial list are started."""

    name: ClassVar[str] = "phalanx.supervisor_ready"
    path: str
    at: float


@dataclass(frozen=True, slots=True)
class SupervisorGaveUp:
    """A supervisor stops its children and fails upwards; *why* names the limit that was passed."""

    name: ClassVar[str] = "phalanx.supervisor_gave_up"
    path: str
    child: str
    why: str
    at: float


@dataclass(frozen=True, slots=True)
class SupervisorExited:
    """A supervisor has ended, after all of its children."""

    name: ClassVar[str] = "phalanx.supervisor_exited"
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
    """Return the fields of *notice*, for a log line; reasons as text."""
    values = {field.name: getattr(notice, field.name) for field in fields(notice)}
    return {
        name: str(value) if isinstance(value, ExitReason) else value
        for name, value in values.items()
    }
