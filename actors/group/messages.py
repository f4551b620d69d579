"""Messages to a group's actor: from the event loop, the call plane and the group's users.

A message about a rank names its incarnation; one about an earlier incarnation is void.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from phalanx.actors.checkpoint.snapshot import Snapshot
    from phalanx.actors.spec.layout import Layout
    from phalanx.runtime import Frame, RemoteFailure
    from phalanx.supervision import ExitReason, StartRanks

    from .launcher import Launch


@dataclass(frozen=True, slots=True)
class ProcessGone:
    """A rank's process has ended; its `Process` holds the status."""

    rank: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class RankSaid:
    """A rank sent something beside its answers."""

    rank: int
    incarnation: int
    frame: Frame


@dataclass(frozen=True, slots=True)
class RankSaidNothing:
    """So many *packets* came from a rank, beside its answers, that are no messages."""

    rank: int
    incarnation: int
    packets: int


@dataclass(frozen=True, slots=True)
class LinkLost:
    """A rank elsewhere cannot be reached any more; *why* is what is known of it."""

    rank: int
    incarnation: int
    why: str


@dataclass(frozen=True, slots=True)
class HubLost:
    """The event loop has ended, for the *cause*: no death and no timer is noticed from now on."""

    cause: str


@dataclass(frozen=True, slots=True)
class StreamEnded:
    """A rank's call socket has ended: it is dying, or it closed its descriptors."""

    rank: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class Overdue:
    """A rank has had its time: to start, to say good-bye after its socket ended, to answer."""

    rank: int
    incarnation: int
    what: Literal["start", "stream", "call"]
    detail: str = ""


@dataclass(frozen=True, slots=True)
class OutOfStep:
    """Some ranks of a process group have left the call *wire* by an exception, others have not.

    Or the process group itself is broken. Told again until something is done about it.
    """

    wire: int


@dataclass(frozen=True, slots=True)
class Look:
    """It is time to look whether a rank hangs; *due* is when it was to be."""

    due: float


@dataclass(frozen=True, slots=True)
class Examined:
    """The ranks of an examination have given a sign of life, or have had their time for it."""

    number: int


@dataclass(frozen=True, slots=True)
class Timeout:
    """A time limit has passed.

    Attributes:
        owner: ``"group"`` for the back-off, ``"standby"``, ``"devices"``, or a worker's rank and
            incarnation.
        what: What follows: the start that waits for its devices, the next stage of stopping a
            worker (``"terminate"``, ``"kill"``, ``"abandon"``), or a word for readers.
    """

    owner: str | tuple[int, int]
    what: str | StartRanks


@dataclass(frozen=True, slots=True)
class Launched:
    """A launch has come to an end: its members have processes, or never will."""

    launch: Launch


@dataclass(frozen=True, slots=True)
class NotStarted:
    """These (rank, incarnation) never got a process."""

    ranks: tuple[tuple[int, int], ...]
    reason: ExitReason


@dataclass(frozen=True, slots=True)
class ReformOverdue:
    """A rank that is kept has had its time: to leave the old group, or to join the new one.

    *part* comes halfway: from then on the connections of the old group are ended under it.

    Or it failed to join, and no news of another death has come that would explain it.
    """

    rank: int
    incarnation: int
    epoch: int
    what: Literal["part", "leave", "join", "failed"]


@dataclass(frozen=True, slots=True)
class Started:
    """The executor is to start its group."""


@dataclass(slots=True)
class Planned:
    """A planned restart or resize; nothing is in flight, but for a restart by force.

    Attributes:
        force: Whether calls in flight are ended.
        done: Set once the group is whole again, has ended, or the request came too late.
        accepted: Whether it was carried out.
    """

    ranks: frozenset[int] = frozenset()
    size: int | None = None
    layout: Layout | None = None
    force: bool = False
    accepted: bool = False
    done: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True, slots=True)
class Close:
    """The executor is to end."""

    reason: ExitReason


@dataclass(frozen=True, slots=True)
class Emitted:
    """A worker's own event, as `Executor.subscribe` hands it on.

    Attributes:
        at: When the driver read it, in seconds on the monotonic clock.
    """

    group: str
    rank: int
    incarnation: int
    epoch: int
    value: Any
    at: float


@dataclass(frozen=True, slots=True)
class CheckpointDue:
    """It is time to take the state of the ranks."""


@dataclass(frozen=True, slots=True)
class SnapshotFailed:
    """A rank could not store its state."""

    rank: int
    number: int
    failure: RemoteFailure


@dataclass(frozen=True, slots=True)
class SnapshotsChanged:
    """A snapshot is kept, or some are void: there is something to remove.

    Attributes:
        kept: The one that is kept; None if there is none.
    """

    kept: Snapshot | None = None


@dataclass(frozen=True, slots=True)
class KillAll:
    """Every rank is to be killed now."""


Message = (
    ProcessGone
    | RankSaid
    | RankSaidNothing
    | LinkLost
    | HubLost
    | StreamEnded
    | Overdue
    | OutOfStep
    | Look
    | Examined
    | Timeout
    | Launched
    | NotStarted
    | ReformOverdue
    | Started
    | Planned
    | CheckpointDue
    | SnapshotFailed
    | SnapshotsChanged
    | Close
    | KillAll
)
