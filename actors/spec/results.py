"""Values that an executor reports: its status, events of its workers, outcomes of calls.

Each is replaced as a whole at every change; none of them refers to the objects it describes.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from phalanx.supervision import Phase

if TYPE_CHECKING:
    from phalanx.runtime import CrashReport, DeviceStatus, NodeInfo, RankInfo
    from phalanx.supervision import RestartWindow

    from .checkpoint_policy import Checkpoint
    from .layout import Layout


class OutcomeKind(StrEnum):
    """The class of an outcome."""

    OK = "ok"
    ERROR = "error"
    DEAD = "dead"
    TIMEOUT = "timeout"


@dataclass(frozen=True, slots=True)
class Outcome:
    """One rank's part of a `gather`.

    Attributes:
        value: The rank's return value; None unless `ok`.
        error: Its exception, or `WorkerDied`, or `CallTimeout`; None if `ok`.
    """

    rank: int
    kind: OutcomeKind
    value: Any = None
    error: BaseException | None = None

    @property
    def ok(self) -> bool:
        """Whether the rank answered with a value."""
        return self.kind is OutcomeKind.OK

    def get(self) -> Any:
        """Return the value, or raise the error."""
        if self.error is not None:
            raise self.error
        return self.value


@dataclass(frozen=True, slots=True)
class Emitted:
    """A worker's own event, which `Executor.subscribe` delivers.

    Attributes:
        at: When the driver read it, in seconds on the monotonic clock.
    """

    group: str
    rank: int
    incarnation: int
    epoch: int
    value: Any
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """An executor and its group at one moment; replaced as a whole at every change.

    Attributes:
        layout: The layout of its ranks; after a resize has begun, the new one.
        phase: ``starting``, ``serving``, ``mending``, ``waiting`` (for the
            back-off), ``closing`` or ``ended``.
        restarts: Deaths that led to a restart, in all.
        window: Those that count against the intensity, and that; None before the group begins.
        planned: Planned restarts and resizes; they do not count as failures.
        standby: Spares that are warm.
        reports: The crash reports of the latest deaths of ranks, 256 at most, oldest first.
            Those of spares come as events and files alone.
        checkpoint: The newest state of the ranks that is kept; None if there is none.
        devices: The devices it chooses from, as they were when last examined.
        nodes: The machines of its cluster; empty if its ranks are on this one.
        in_flight: Calls sent and not settled.
        waiting: Calls accepted that are queued.
        dropped_replies: Late replies, and malformed packets.
    """

    name: str
    layout: Layout
    phase: Phase = Phase.STARTING
    epoch: int = 0
    ranks: tuple[RankInfo, ...] = ()
    restarts: int = 0
    window: RestartWindow | None = None
    planned: int = 0
    standby: int = 0
    reports: tuple[CrashReport, ...] = ()
    checkpoint: Checkpoint | None = None
    devices: tuple[DeviceStatus, ...] = ()
    nodes: tuple[NodeInfo, ...] = ()
    in_flight: int = 0
    waiting: int = 0
    dropped_replies: int = 0

    @property
    def state(self) -> str:
        """*phase* as text."""
        return str(self.phase)

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.layout.world_size

    @property
    def restarts_in_window(self) -> int:
        """The number of restarts that now count against the intensity."""
        return 0 if self.window is None else self.window.count(time.monotonic())
