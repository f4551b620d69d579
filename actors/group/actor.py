"""Actor of a rank group: the only thread that changes its membership.

The actor that owns a rank group: it hears what happens, has it decided, and does it.

Guarantees: one thread, one thing at a time, and no waiting for a process to start; every death is
classified, reported and settled before anything is started in its place; when the group ends for
good, by whatever cause, every call is settled, everything is given back, the failure callback has
fired at most once, and whoever waits for the end is woken. An exception in this actor itself ends
the group the same way; nobody else's does.

Left to others: what to do (`decide_ranks`), processes (`Members`), calls (`Plane`). Calls do not
pass through here: they run in their callers' threads.

The planned change of a group: a restart or a resize that somebody asked for and waits for.

Guarantees: one at a time; whoever waits for one is woken, whether or not it was carried out.

What ranks say beside their answers, and what it means.

Guarantees: what an earlier incarnation said is dropped unread.

Left to others: reading it (`control`), what follows for the group (`decide_ranks`).

What the actor of a group works with: made together, given back together.

Guarantees: whatever of it fails to be given back, the rest is.
"""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pykka

from phalanx.actors.checkpoint.restore import Keeper
from phalanx.actors.health.monitor import Suspicion
from phalanx.actors.remote.links import Links
from phalanx.actors.spec.results import view_of
from phalanx.runtime import (
    Frame,
    GroupEnded,
    Kind,
    RemoteFailure,
    ReportFolder,
    WorkerReady,
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
    RankReady,
    RankReformed,
    ReformRanks,
    ResizeAsked,
    RestartAsked,
    RuntimeFault,
    Serve,
    StartRanks,
    SteadfastActor,
    StopRanks,
    WaitOver,
    WaitUntil,
    decide_ranks,
    new_group,
)

from .deaths import Deaths, Farewell, deaths_behind, reason_of
from .devices import Leases
from .epoch import Forming
from .events import Herald
from .launcher import Launches, Outfit, threads_of_each
from .members import Members
from .messages import (
    BackOffOver,
    Close,
    CutDue,
    CutFailed,
    CutsChanged,
    DevicesDue,
    Emitted,
    Examined,
    HubLost,
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
from .shutdown import Deadlines, Stopping
from .standby import Standby

if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx.actors.spec.options import ExecutorSpec
    from phalanx.runtime import Runtime

    from .handle import Place, Shared
    from .launcher import Launch
    from .messages import Notice
    from .worker import Member


class Hearing:
    """Hears the ranks of the group called *name*. Used by its actor's thread alone.

    Args:
        find: Returns the member, or spare, of that rank and incarnation.
        show: Has the group's view made anew.
    """

    def __init__(
        self,
        name: str,
        shared: Shared,
        *,
        find: Callable[[int, int], Member | None],
        show: Callable[[], None],
        standby: Standby,
        deadlines: Deadlines,
        stopping: Stopping,
        keeper: Keeper,
        herald: Herald,
    ) -> None:
        self._name = name
        self._shared = shared
        self._seating = shared.plane.seating
        self._find = find
        self._show = show
        self._standby = standby
        self._deadlines = deadlines
        self._stopping = stopping
        self._keeper = keeper
        self._herald = herald

    def hear(self, notice: RankSaid) -> RankEvent | None:
        """Take what a rank has said; return what is to be decided on, if anything is."""
        member, frame = self._find(notice.rank, notice.incarnation), notice.frame
        if member is None or frame.incarnation != member.incarnation:
            frame.drop()
            return None
        match frame.kind:
            case Kind.STANDBY:
                self._standby.warm(member)
                self._show()
            case Kind.READY if member.seated:
                now = time.monotonic()
                return RankReformed(member.rank, member.incarnation, frame.epoch, now)
            case Kind.READY:
                return self._seat(member)
            case Kind.LEFT:
                member.left = frame.epoch
            case Kind.ENDING:
                self._seating.expect_end(member.rank, member.incarnation)
            case Kind.NOT_REFORMED:
                failure = RemoteFailure.read(frame)
                if frame.epoch == member.epoch:
                    member.failure = failure
                    self._deadlines.doubt_reform(member)
            case Kind.RESTORING:
                member.restoring = True
            case Kind.EVENT:
                self._hand_on(member, frame)
            case Kind.START_FAILED | Kind.LAST_WORDS:
                member.failure = RemoteFailure.read(frame)
                # A thread of the user's may keep the process from ending by itself.
                self._deadlines.exit(member)
            case _:
                frame.drop()
        return None

    def _seat(self, member: Member) -> RankEvent | None:
        """Have *member*, which is ready for the first time, take part in calls."""
        greeting = member.channel.receive()
        if not isinstance(greeting, Frame) or greeting.kind != Kind.HELLO:
            member.hung = f"its call socket is broken: {greeting!r}"
            self._stopping.kill(member)
            return None
        member.ready = True
        member.seated = True
        self._seating.join(member.rank, member.incarnation, member.channel)
        now = time.monotonic()
        self._herald.publish(WorkerReady(**member.who(), took=now - member.started_at, at=now))
        self._keeper.welcome(member)
        return RankReady(member.rank, member.incarnation, now)

    def _hand_on(self, member: Member, frame: Frame) -> None:
        """Hand an event of the user's to who listens."""
        try:
            value = frame.value()
        except Exception as error:  # noqa: BLE001  # a type this process does not know
            value = error
        now = time.monotonic()
        self._shared.deliver(
            Emitted(self._name, member.rank, member.incarnation, member.epoch, value, now)
        )


_CALLBACKS = 5.0  # seconds for the last callbacks to be run


class Staff:
    """Those who work for one group's actor, on its thread.

    Args:
        tell: Puts a notice into the actor's mailbox.
        state: Returns what the group is just now.
        show: Has the group's view made anew.
    """

    def __init__(
        self,
        spec: ExecutorSpec,
        runtime: Runtime,
        shared: Shared,
        *,
        tell: Callable[[Notice], None],
        state: Callable[[], GroupState],
        show: Callable[[], None],
    ) -> None:
        hub = runtime.hub
        self._forget = hub.when_lost(lambda cause: tell(HubLost(cause)))
        self._shared = shared
        self.herald = herald = Herald(spec.name, runtime.scribe, shared)
        publish = herald.publish
        self.leases = Leases(spec, runtime, tell, publish, shared.deliver)
        links = None
        if spec.transport is not None:
            links = Links(spec.transport, runtime, spec.name, tell, publish)
        self.deadlines = Deadlines(hub, shared.watch, tell)
        self.stopping = Stopping(spec.stop, self.deadlines)
        self.outfit = Outfit(spec, runtime, shared.plane.arena, probe=shared.probe)
        self.launches = Launches(spec.name, tell)
        self.members = Members(
            spec,
            runtime,
            leases=self.leases,
            outfit=self.outfit,
            launches=self.launches,
            deadlines=self.deadlines,
            links=links,
            pulses=shared.pulses,
            tell=tell,
        )
        self.keeper = Keeper(
            spec, shared.cuts, shared.plane, publish, shared.deliver, ends=shared.owns_cuts
        )
        self.standby = Standby(
            spec.standby, self.members, self.stopping, hub, tell=tell, publish=publish
        )
        self.deaths = Deaths(
            spec,
            shared,
            self.members,
            self.keeper,
            herald,
            folder=spec.report_dir or runtime.reports or ReportFolder.from_environment(),
            show=show,
        )
        self.forming = Forming(
            spec,
            runtime,
            shared,
            leases=self.leases,
            members=self.members,
            stopping=self.stopping,
            keeper=self.keeper,
            herald=herald,
            tell=tell,
            take_spare=self.standby.take,
        )
        self.suspicion = Suspicion(
            spec,
            shared,
            self.members,
            self.stopping,
            hub,
            tell=tell,
            find=self.find,
            state=state,
        )
        self.hearing = Hearing(
            spec.name,
            shared,
            find=self.find,
            show=show,
            standby=self.standby,
            deadlines=self.deadlines,
            stopping=self.stopping,
            keeper=self.keeper,
            herald=herald,
        )

    def find(self, rank: int, incarnation: int) -> Member | None:
        """Return that spare, while it is one, or that incarnation, while it is the current one."""
        return self.standby.find(rank) or self.members.find(rank, incarnation)

    def land(self, launch: Launch, *, first: bool) -> None:
        """Take over what *launch* has brought, once; *first* where none has served yet."""
        if not self.launches.take(launch):
            return
        if launch.members[0].spare:
            self.standby.land(launch)
        else:
            self.forming.land(launch, first=first)

    def close(self, release_runtime: Callable[[], None]) -> None:
        """Give everything back; the ranks are buried. The shared parts go last."""
        shared = self._shared
        for give_back in (
            self._forget,
            shared.watch.close,
            self.suspicion.close,
            self.standby.close,
            self.members.close,
            self.forming.close,
            self.leases.close,
            shared.plane.close,
            self.deaths.close,
            partial(shared.callbacks.close, _CALLBACKS),
            release_runtime,
        ):
            try:
                give_back()
            except Exception as error:  # noqa: BLE001  # the rest must still be given back
                self.herald.complain(error)


class Planning:
    """The planned changes of one group. Used by its actor's thread alone.

    Attributes:
        count: How many have been begun, in all.
        at: When the latest was begun, on the monotonic clock; at first when this was made.
    """

    def __init__(self) -> None:
        self._plan: Planned | None = None
        self.count = 0
        self.at = time.monotonic()

    def begin(self, plan: Planned, state: GroupState) -> RankEvent | None:
        """Return what is to be decided on; None where *plan* has come too late, or too early."""
        has_ranks = plan.ranks <= {rank.number for rank in state.ranks}
        if state.phase is not Phase.SERVING or self._plan is not None or not has_ranks:
            plan.done.set()
            return None
        plan.accepted = True
        self._plan = plan
        self.count += 1
        self.at = now = time.monotonic()
        if plan.size is not None:
            return ResizeAsked(plan.size, now)
        return RestartAsked(plan.ranks, now, force=plan.force)

    def finish(self, *, accepted: bool) -> None:
        """Wake whoever waits: the change is done, or was not *accepted* after all."""
        plan, self._plan = self._plan, None
        if plan is not None:
            plan.accepted = accepted
            plan.done.set()


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
            case HubLost(cause):
                fault = RuntimeFault(cause)
                self._seating.end(lambda call: RuntimeFault(f"{call.name}: {cause}"), lambda: fault)
                raise fault
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
            if member.process is not None:  # no deadline behind it: the hub may have ended
                member.process.send_signal(signal.SIGKILL)
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
