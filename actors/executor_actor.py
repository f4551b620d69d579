"""The actor that owns a rank group: it hears what happens, has it decided, and does it.

Guarantees: one thread, one thing at a time, and no waiting for a process to start; every death is
classified, reported and settled before anything is started in its place; when the group ends for
good, by whatever cause, every call is settled, everything is given back, the failure callback has
fired at most once, and whoever waits for the end is woken. An exception in this actor itself ends
the group the same way; nobody else's does.

Left to others: what to do (`decide_ranks`), processes (`Members`), calls (`Plane`). Calls do not
pass through here: they run in their callers' threads.
"""

from __future__ import annotations

import os
import random
import time
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pykka

from phalanx.runtime import (
    GroupEnded,
    occupied,
)
from phalanx.supervision import (
    Begin,
    CallerError,
    CloseAsked,
    Decided,
    End,
    ExitKind,
    ExitReason,
    GroupState,
    Hold,
    Phase,
    RankAction,
    RankEvent,
    RankExited,
    ReformRanks,
    Serve,
    StartRanks,
    SteadfastActor,
    StopRanks,
    WaitOver,
    WaitUntil,
    decide_ranks,
    new_group,
)

from .farewell import Farewell, deaths_behind
from .notices import (
    BackOffOver,
    Close,
    CutDue,
    CutFailed,
    CutsChanged,
    DevicesDue,
    Examined,
    KillAll,
    Launched,
    LeaveDue,
    LinkLost,
    Look,
    LookAtDevices,
    NotStarted,
    OutOfStep,
    Overdue,
    Planned,
    ProcessGone,
    RankSaid,
    RankSaidNothing,
    Refill,
    ReformOverdue,
    Started,
    StopOverdue,
    StreamEnded,
)
from .outfit import threads_of_each
from .planning import Planning
from .postmortem import reason_of
from .staff import Staff
from .status import view_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx.runtime import Runtime

    from .member import Member
    from .place import Place
    from .shared import Shared
    from .spec import ExecutorSpec


class ExecutorActor(SteadfastActor):
    """See the module's docstring. Started by `Executor`, told `Notice` values."""

    def __init__(
        self,
        spec: ExecutorSpec,
        runtime: Runtime,
        shared: Shared,
        release_runtime: Callable[[], None],
        place: Place | None,
    ) -> None:
        super().__init__()
        self._spec = spec
        self._runtime = runtime
        self._release_runtime = release_runtime
        self._place = place
        self._state: GroupState = new_group(
            spec.strategy,
            spec.intensity.window(),
            spec.world_size,
            restart=spec.restart,
            backoff=spec.backoff,
            keep=spec.survivors == "keep",
        )
        self._planning = Planning()
        self._ending = False
        self.shared = shared
        self._seating = shared.plane.seating
        self._staff = staff = Staff(
            spec, runtime, shared, tell=self._tell, state=lambda: self._state, show=self._show
        )
        shared.devices = staff.leases.status
        self._herald = staff.herald
        self._leases = staff.leases
        self._members = staff.members
        self._stopping = staff.stopping
        self._keeper = staff.keeper
        self._standby = staff.standby
        self._deaths = staff.deaths
        self._forming = staff.forming
        self._suspicion = staff.suspicion

    def _start_actor_loop(self) -> None:
        try:
            super()._start_actor_loop()
        except BaseException:  # no thread is to be had: nothing else would give all that back
            pykka.ActorRegistry.unregister(self.actor_ref)
            self._staff.close(lambda: None)
            self.shared.gone.set()
            raise

    # --- hearing ------------------------------------------------------------------------

    def _tell(self, notice: object) -> None:
        # The actor may have ended meanwhile: then nobody is left who would care.
        with suppress(pykka.ActorDeadError):
            self.actor_ref.tell(notice)

    def _actor_loop_running(self) -> None:
        with occupied:
            super()._actor_loop_running()

    def hear(self, notice: Any, /) -> None:
        """Act on one notice."""
        if self._ending:
            if isinstance(notice, Planned):
                notice.done.set()
            elif isinstance(notice, RankSaid):
                notice.frame.drop()
            return
        match notice:
            case Started():
                self._begin()
            case RankSaid():
                self._said(notice)
            case RankSaidNothing(rank, incarnation, packets):
                self._seating.count_foreign(rank, incarnation, packets)
            case ProcessGone():
                self._gone(notice)
            case StreamEnded(rank, incarnation):
                member = self._members.find(rank, incarnation)
                if member is not None:
                    self._staff.deadlines.exit(member)
            case Overdue() | ReformOverdue() | LeaveDue() | Look() | Examined() | OutOfStep():
                self._suspicion.hear(notice)
            case StopOverdue():
                self._stop_overdue(notice)
            case Launched(launch):
                self._staff.land(launch, first=self._state.served_at is None)
                self._show()
            case NotStarted(ranks, reason):
                if self.shared.probe is not None:
                    self.shared.probe.not_started(ranks, str(reason))
                now = time.monotonic()
                jitter = random.random()  # noqa: S311  # spreads restarts, hides nothing
                for rank, incarnation in ranks:
                    self._act(RankExited(rank, incarnation, reason, now, jitter))
            case BackOffOver():
                self._act(WaitOver(time.monotonic()))
            case Planned():
                self._change(notice)
            case Close(reason):
                self.shared.pulses.tell_draining()
                self._planning.finish(accepted=False)
                self._act(CloseAsked(reason, time.monotonic()))
                if self.shared.probe is not None:
                    self.shared.probe.closing()
            case CutDue() | CutFailed() | CutsChanged():
                self._keeper.hear(notice)
            case KillAll():
                for member in self._members.current():
                    self._stopping.kill(member)
            case _:
                self._on_time(notice)

    def _on_time(self, notice: Any) -> None:
        match notice:
            case Refill():
                if self._state.phase is Phase.SERVING:
                    self._standby.fill()
            case DevicesDue(start):
                if self._leases.is_waiting(start):
                    self._forming.start(start, first=self._state.served_at is None)
                    self._show()
            case LookAtDevices():
                self._stopping.kill_broken(self._members.current(), self._leases.look())
            case LinkLost(rank, incarnation, why):
                member = self._staff.find(rank, incarnation)
                if member is not None:
                    self._stopping.examine(member, why)
            case _:
                pass  # an actor may be told anything; only notices mean something here

    def _stop_overdue(self, notice: StopOverdue) -> None:
        member = self._staff.find(notice.rank, notice.incarnation)
        if member is None:
            return
        if notice.stage != "abandon":
            self._stopping.escalate(member, notice)
        elif left := self._stopping.abandon(member):
            self._herald.abandoned(member.who(), left)
            if self._standby.find(notice.rank) is not None:
                self._standby.gone(member)
                self._show()
            else:
                detail = f"{member.hung}; {left}" if member.hung else left
                self._bury(member, ExitReason(ExitKind.UNRESPONSIVE, detail))

    def _said(self, notice: RankSaid) -> None:
        event = self._staff.hearing.hear(notice)
        if event is not None:
            self._act(event)

    # --- deaths -------------------------------------------------------------------------

    def _gone(self, notice: ProcessGone) -> None:
        member = self._staff.find(notice.rank, notice.incarnation)
        if member is None:
            return
        if self._standby.find(notice.rank) is None:
            self._bury(member, reason_of(member))
            return
        report = self._deaths.report_spare(member)
        self._standby.gone(member)
        self._show()
        self._deaths.file(report)

    def _bury(self, member: Member, reason: ExitReason) -> None:
        """Have it decided what follows from the end of *member*, and do it."""
        now = time.monotonic()
        self._keeper.blame(member, reason)
        progress = self._seating.progress(member.rank, member.incarnation)
        if progress.served and self._place is not None:
            self._place.on_use()
        jitter = random.random()  # noqa: S311  # spreads restarts, hides nothing
        directive = self._deaths.directive(member, reason)
        event = RankExited(
            member.rank,
            member.incarnation,
            reason,
            now,
            jitter,
            directive,
            out_of_step=member.out_of_step,
        )
        epoch = self._state.epoch
        self._state, actions = decide_ranks(self._state, event)
        self._deaths.settle(member, reason, progress, self._state, actions, epoch=epoch, at=now)
        self._members.bury(member)
        self._perform(actions)

    # --- doing --------------------------------------------------------------------------

    def _begin(self) -> None:
        """Start the group for the first time, unless what its ranks go on from cannot be used."""
        if "OMP_NUM_THREADS" not in os.environ and "OMP_NUM_THREADS" not in self._spec.env:
            self._herald.threads_limited(threads_of_each(self._spec.world_size))
        try:
            base = self._keeper.open(self._runtime.hub, self._tell)
        except (CallerError, OSError) as error:
            self.shared.start_error = error
            reason = ExitReason(ExitKind.CRASH, str(error))
            self._state = replace(self._state, phase=Phase.ENDED, ending=reason)
            self._end(reason)
            return
        if base is not None:
            self._staff.outfit.save_from(base)
        self._act(Begin(time.monotonic()))

    def _act(self, event: RankEvent) -> None:
        self._state, actions = decide_ranks(self._state, event)
        self._perform(actions)

    def _change(self, plan: Planned) -> None:
        event = self._planning.begin(plan, self._state)
        if event is None:
            return
        if self.shared.probe is not None:
            self.shared.probe.planned(plan.ranks, plan.size)
        if plan.layout is not None:
            self._forming.layout = plan.layout
            self._seating.expect(plan.layout.world_size, self._show)
        self._state, actions = decide_ranks(self._state, event)
        stopped = next(each.ranks for each in actions if isinstance(each, StopRanks))
        for member in self._members.current():
            member.forced = plan.force and member.rank in stopped
        self._perform(actions)

    def _perform(self, actions: tuple[RankAction, ...]) -> None:
        for action in actions:
            match action:
                case StartRanks():
                    self._forming.start(action, first=self._state.served_at is None)
                case ReformRanks():
                    self._forming.reform(action)
                    self._suspicion.watch_leaving(action.epoch)
                case StopRanks():
                    self._forming.stop(action)
                case Hold():
                    self._seating.hold()
                case Serve(epoch):
                    self._serve(epoch)
                case WaitUntil(at):
                    self._runtime.hub.call_at(at, lambda: self._tell(BackOffOver()))
                case Decided():
                    pass  # it is in the report
                case End(reason):
                    self._end(reason)
        if not self._ending:
            self._show()

    def _serve(self, epoch: int) -> None:
        since = max(self._planning.at, self._deaths.at)
        self._forming.open(epoch, since=since, recovered=self._deaths.is_down)
        self._deaths.is_down = False
        self._show()
        self._planning.finish(accepted=True)
        self.shared.ready.set()
        self._tell(Refill())  # after what is waiting to be heard already

    # --- the end ------------------------------------------------------------------------

    def _end(self, reason: ExitReason) -> None:
        """Give everything back; runs once, last."""
        self._ending = True
        shared = self.shared
        name = self._spec.name
        if not shared.closing:
            shared.cause = reason
        cause = None if shared.closing else reason
        deaths = deaths_behind(self._state, self._deaths.reports)
        farewell = Farewell(name, cause, deaths, self._forming.no_device)
        self._seating.end(farewell.settle, farewell.refuse)
        self._planning.finish(accepted=False)
        for launch in self._staff.launches.close():
            self._staff.land(launch, first=False)
        for member in self._members.current():
            member.asked = True
            self._stopping.kill(member)
            self._seating.leave(member.rank, member.incarnation)
            self._members.bury(member)
        self._show()
        was_lost = not shared.closing and reason.kind is not ExitKind.NORMAL
        level = "error" if self._place is not None else "critical"
        self._herald.publish(
            GroupEnded(
                group=name,
                epoch=self._state.epoch,
                cause="" if shared.closing else str(reason),
                at=time.monotonic(),
                level=level if was_lost and self._state.served_at is not None else "info",
            )
        )
        if not shared.closing and self._state.served_at is not None:
            shared.tell_failed(reason)
        shared.ready.set()
        self._keeper.close()
        place, self._place = self._place, None  # it may hold on to what holds on to us
        if place is not None:
            # Before the shared parts are let go: whoever starts the next one finds them warm.
            place.on_end(reason)
        self._staff.close(self._release_runtime)
        self.stop()
        shared.gone.set()

    def failed(self, error: BaseException, /) -> None:
        """End the group after an exception of our own."""
        self._herald.complain(error)
        if not self._ending:
            if not self.shared.ready.is_set():
                self.shared.start_error = error
            what = f"the executor itself: {type(error).__name__}: {error}"
            reason = ExitReason(ExitKind.CRASH, what)
            self._state = replace(self._state, phase=Phase.ENDED, ending=reason)
            try:
                self._end(reason)
            except BaseException as second:  # noqa: BLE001  # nothing is left to try
                self._herald.complain(second)
            else:
                return
        self.shared.ready.set()
        self.shared.gone.set()
        self.stop()

    def _show(self) -> None:
        """Publish what the group looks like now."""
        self.shared.show(
            view_of(
                self._state,
                self._members.current(),
                layout=self._forming.layout,
                restarts=self._deaths.restarts,
                planned=self._planning.count,
                standby=self._standby.count,
                reports=self._deaths.reports,
            )
        )
