"""Notices: what subscribers of a tree receive, which are also its log events.

Each has a dotted name in ``event``, a ``level`` and plain fields; *path* is the ids from the top
supervisor down, joined by slashes; *at* is in seconds of the tree's clock.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar

from .restart_rules import ExitReason


@dataclass(frozen=True, slots=True)
class Notice:
    """What all notices have."""

    event: ClassVar[str]
    usual_level: ClassVar[str] = "debug"
    path: str
    at: float

    @property
    def level(self) -> str:
        """The level of the log event."""
        return self.usual_level


@dataclass(frozen=True, slots=True)
class ChildStarted(Notice):
    """A child runs."""

    event = "phalanx.child_started"
    incarnation: int


@dataclass(frozen=True, slots=True)
class ChildStartFailed(Notice):
    """A start function raised, or took too long."""

    event = "phalanx.child_start_failed"
    usual_level = "warning"
    incarnation: int
    error: str


@dataclass(frozen=True, slots=True)
class ChildExited(Notice):
    """A child has ended; *decision* is what the supervisor does about it, and why."""

    event = "phalanx.child_exited"
    incarnation: int
    reason: ExitReason
    decision: str

    @property
    def level(self) -> str:
        """The level of the log event: a failure is a warning."""
        return "warning" if self.reason.is_failure else "debug"


@dataclass(frozen=True, slots=True)
class ChildLost(Notice):
    """A child did not end within its limits and is given up; it may still run."""

    event = "phalanx.child_lost"
    usual_level = "error"
    incarnation: int
    waited: float


@dataclass(frozen=True, slots=True)
class CallbackFailed(Notice):
    """A *callback* of a user raised, and the exception was dropped.

    It is a ``decider``, a ``monitor``, or the ``handle`` of a child: the limits of its stop hold.
    """

    event = "phalanx.callback_failed"
    usual_level = "warning"
    callback: str
    error: str


@dataclass(frozen=True, slots=True)
class SupervisorBegan(Notice):
    """A supervisor runs and begins to start its children."""

    event = "phalanx.supervisor_began"


@dataclass(frozen=True, slots=True)
class SupervisorStartFailed(Notice):
    """A child of the initial list did not start; the others are stopped, the supervisor ends."""

    event = "phalanx.supervisor_start_failed"
    child: str
    error: str


@dataclass(frozen=True, slots=True)
class SupervisorReady(Notice):
    """All children of the initial list are started."""

    event = "phalanx.supervisor_ready"


@dataclass(frozen=True, slots=True)
class SupervisorGaveUp(Notice):
    """A supervisor stops its children and fails upwards; *why* names the limit that was passed."""

    event: ClassVar[str] = "phalanx.supervisor_gave_up"
    usual_level = "critical"
    child: str
    why: str


@dataclass(frozen=True, slots=True)
class SupervisorExited(Notice):
    """A supervisor has ended, after all of its children."""

    event = "phalanx.supervisor_exited"
    reason: ExitReason


def notice_fields(notice: Notice) -> dict[str, Any]:
    """Return the fields of *notice* for a log line, without its time; reasons as text."""
    values = ((one.name, getattr(notice, one.name)) for one in fields(notice) if one.name != "at")
    return {name: str(v) if isinstance(v, ExitReason) else v for name, v in values}
