"""Values that an executor reports: status, rank information, outcomes of ranks.

A group, and an executor, at one moment, as values.

Guarantees: each is replaced as a whole whenever anything changes, so whoever holds one sees nothing
half-done; none of them holds on to what it is about.

What became of a call, on one rank.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from phalanx.supervision import Phase

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from phalanx.actors.group.worker import Member
    from phalanx.runtime import CrashReport, DeviceStatus
    from phalanx.supervision import GroupState, RestartWindow

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
        value: What the rank returned; None unless `ok`.
        error: What it raised, or `WorkerDied`, or `CallTimeout`; None where `ok`.
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
class RankInfo:
    """One rank, as `Executor.ranks` shows it.

    Attributes:
        pid: Its process, or None where it has none just now.
        state: ``"starting"``, ``"up"``, ``"reforming"``, ``"stopping"`` or ``"down"``.
        doing: What it is running, and for how long; says so of a call that was abandoned: one
            that timed out, or was cancelled or interrupted. Empty between calls.
    """

    rank: int
    pid: int | None
    incarnation: int
    epoch: int
    state: str
    device: str
    doing: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupView:
    """A group at one moment; replaced as a whole whenever it changes.

    Attributes:
        phase: What it is doing; ``serving`` when it takes calls.
        restarts: Deaths that led to a restart, in all.
        window: Those that count against the intensity; None where there is none.
        planned: Planned restarts and resizes; they count as no failure.
        standby: Spares that are warm.
        layout: How its ranks are laid out; after a resize has begun, those that there will be.
    """

    layout: Layout
    phase: Phase = Phase.STARTING
    epoch: int = 0
    ranks: tuple[RankInfo, ...] = ()
    restarts: int = 0
    window: RestartWindow | None = None
    planned: int = 0
    standby: int = 0
    reports: tuple[CrashReport, ...] = ()

    @property
    def restarts_in_window(self) -> int:
        """How many restarts count against the intensity just now."""
        return 0 if self.window is None else self.window.count(time.monotonic())


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """An executor at one moment.

    Attributes:
        state: ``starting``, ``serving``, ``mending``, ``waiting`` (for the back-off),
            ``closing`` or ``ended``.
        restarts: Deaths that led to a restart, in all.
        restarts_in_window: Of those, how many count against the intensity just now.
        planned: Planned restarts and resizes; they count as no failure.
        standby: Spares that are warm.
        checkpoint: The newest state of the ranks that is kept; None where there is none.
        reports: The crash reports of the latest deaths of ranks, 256 at most, oldest first.
            Those of spares come as events and files alone.
        devices: The devices it chooses from, as they were when anybody last looked.
        in_flight: Calls sent and not settled.
        waiting: Calls accepted that wait for their turn.
        dropped_replies: Answers that came too late, and packets that were none of ours.
    """

    name: str
    state: str
    epoch: int
    world_size: int
    restarts: int
    restarts_in_window: int
    planned: int
    standby: int
    checkpoint: Checkpoint | None
    reports: tuple[CrashReport, ...]
    devices: tuple[DeviceStatus, ...]
    in_flight: int
    waiting: int
    dropped_replies: int


def view_of(
    state: GroupState,
    members: Iterable[Member],
    *,
    layout: Layout,
    restarts: int,
    planned: int,
    standby: int,
    reports: tuple[CrashReport, ...],
) -> GroupView:
    """Return what a group looks like that is in *state* and has *members*."""
    by_rank = {member.rank: member for member in members}
    ranks: list[RankInfo] = []
    for rank in state.ranks:
        member = by_rank.get(rank.number)
        if member is not None and member.incarnation != rank.incarnation:
            member = None
        ranks.append(
            RankInfo(
                rank.number,
                None if member is None else member.labels.pid or None,
                rank.incarnation,
                state.epoch,
                str(rank.state),
                "" if member is None else member.labels.device,
            )
        )
    return GroupView(
        layout=layout,
        phase=state.phase,
        epoch=state.epoch,
        ranks=tuple(ranks),
        restarts=restarts,
        window=state.window,
        planned=planned,
        standby=standby,
        reports=reports,
    )


def status_of(
    name: str,
    view: GroupView,
    *,
    state: str,
    devices: tuple[DeviceStatus, ...],
    checkpoint: Checkpoint | None = None,
    counts: Mapping[str, int] | None = None,
) -> Status:
    """Return the status of the executor *name*, whose group looks like *view*."""
    return Status(
        name=name,
        state=state,
        epoch=view.epoch,
        world_size=view.layout.world_size,
        restarts=view.restarts,
        restarts_in_window=view.restarts_in_window,
        planned=view.planned,
        standby=view.standby,
        checkpoint=checkpoint,
        reports=view.reports,
        devices=devices,
        **(counts or {"in_flight": 0, "waiting": 0, "dropped_replies": 0}),
    )
