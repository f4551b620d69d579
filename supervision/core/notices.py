"""Notices: the events of a tree that its subscribers receive, and that are logged.

Each has a dotted name in ``event``, a ``level`` and plain fields; *path* is the ids from the top
supervisor down, joined by slashes; *at* is in seconds of the tree's clock.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar, dataclass_transform

from .restart_rules import ExitReason


@dataclass_transform(frozen_default=True)
@dataclass(frozen=True)
class Notice:
    """The base of all notices; a subclass is a frozen dataclass, with its name and level."""

    event: ClassVar[str]
    usual_level: ClassVar[str]
    path: str
    at: float

    def __init_subclass__(cls, event: str, level: str = "debug") -> None:
        cls.event, cls.usual_level = f"phalanx.{event}", level
        dataclass(frozen=True)(cls)

    @property
    def level(self) -> str:
        """The level of the log event."""
        return self.usual_level


class ChildStarted(Notice, event="child_started"):
    """A child runs."""

    incarnation: int


class ChildStartFailed(Notice, event="child_start_failed", level="warning"):
    """A start function raised, or took too long."""

    incarnation: int
    error: str


class ChildExited(Notice, event="child_exited"):
    """A child has ended; *decision* is what the supervisor does about it, and why."""

    incarnation: int
    reason: ExitReason
    decision: str

    @property
    def level(self) -> str:
        """The level of the log event: a failure is a warning."""
        return "warning" if self.reason.is_failure else "debug"


class ChildLost(Notice, event="child_lost", level="error"):
    """A child did not end within its limits and is given up; it may still run."""

    incarnation: int
    waited: float


class CallbackFailed(Notice, event="callback_failed", level="warning"):
    """A *callback* of a user raised, and the exception was dropped.

    It is a ``decider``, a ``monitor``, or the ``handle`` of a child: the limits of its stop hold.
    """

    callback: str
    error: str


class SupervisorBegan(Notice, event="supervisor_began"):
    """A supervisor runs and begins to start its children."""


class SupervisorStartFailed(Notice, event="supervisor_start_failed"):
    """A child of the initial list did not start; the others are stopped, the supervisor ends."""

    child: str
    error: str


class SupervisorReady(Notice, event="supervisor_ready"):
    """All children of the initial list are started."""


class SupervisorGaveUp(Notice, event="supervisor_gave_up", level="critical"):
    """A supervisor stops its children and fails upwards; *why* names the limit that was passed."""

    child: str
    why: str


class SupervisorExited(Notice, event="supervisor_exited"):
    """A supervisor has ended, after all of its children unless it was killed, or failed."""

    reason: ExitReason


def notice_fields(notice: Notice) -> dict[str, Any]:
    """Return the fields of *notice* for a log line, without its time; reasons as text."""
    values = ((one.name, getattr(notice, one.name)) for one in fields(notice) if one.name != "at")
    return {name: str(v) if isinstance(v, ExitReason) else v for name, v in values}
