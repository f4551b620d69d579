"""`GroupActor`: the only thread that changes the membership of a rank group.

- It handles one message at a time, and waits for no process to start.
- A death is classified, reported and settled before anything is started in its place.
- When the group ends for good, every call is settled, everything is given back, the failure
  callbacks have run at most once, and `Group.gone` is set; an exception in this actor ends the
  group in the same way.
- A message about an earlier incarnation is dropped.

`decide_ranks` decides, `Workers` holds processes, `CallPlane` carries calls, which do not pass
through here: they run in their callers' threads.
"""

from __future__ import annotations

import os
import random
import signal
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pykka

from phalanx.actors.checkpoint.manager import CheckpointManager
from phalanx.actors.health.monitor import HealthMonitor
from phalanx.actors.remote.links import Links
from phalanx.actors.spec.factory import SourceFile
from phalanx.actors.spec.results import Status, rank_infos
from phalanx.actors.spec.validate import too_few_descriptors
from phalanx.runtime import (
    Frame,
    GroupEnded,
    GroupUp,
    Kind,
    Payload,
    RemoteFailure,
    RendezvousStore,
    ReportFolder,
    WorkerReady,
    WorkerStarted,
    descriptor_limit,
    occupied,
)
from phalanx.supervision import (
    SHUTDOWN,
    Begin,
    CallerError,
    CloseAsked,
    Decided,
    End,
    ExitKind,
    ExitReason,
    GroupState,
    Hold,
    NoDevice,
    Phase,
    ProtectedActor,
    RankExited,
    RankReady,
    RankReformed,
    ReformRanks,
    ResizeAsked,
    RestartAsked,
    RuntimeFault,
    Serve,
    StartRanks,
    StopRanks,
    WaitOver,
    WaitUntil,
    decide_ranks,
    new_group,
)

from .deaths import Deaths, EndErrors, deaths_behind, reason_of
from .devices import DeviceLeases
from .events import EventBus
from .launcher import EpochSpec, Launches, WorkerBuilder, threads_of_each
from .members import Members
from .messages import (
    CheckpointDue,
    Close,
    Emitted,
    Examined,
    HubLost,
    KillAll,
    Launched,
    LinkLost,
    Look,
    NotStarted,
    OutOfStep,
    Overdue,
    Planned,
    ProcessGone,
    RankSaid,
    RankSaidNothing,
    ReformOverdue,
    SnapshotFailed,
    SnapshotsChanged,
    Started,
    StreamEnded,
    Timeout,
)
from .shutdown import Shutdown
from .standby import Standby

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from phalanx.actors.spec.options import ExecutorSpec
    from phalanx.runtime import Rendezvous, Runtime
    from phalanx.supervision import RankAction, RankEvent

    from .handle import Group, Place
    from .launcher import Launch
    from .worker import Worker

_CALLBACKS = 5.0  # seconds for the last callbacks to be run


class GroupActor(ProtectedActor):
    """See the module's docstring. Started by `Group`, which is posted to as `Message` values.

    Args:
        release_runtime: Gives back the runtime; called last.
        place: Where the executor is in a supervision tree; None if it stands alone.
    """

    def __init__(
        self,
        spec: ExecutorSpec,
        runtime: Runtime,
        group: Group,
        release_runtime: Callable[[], None],
        place: Place | None,
    ) -> None:
        super().__init__()
        self._spec = spec
        self._runtime = runtime
        self._release_runtime = release_runtime
        self._place = place
        self._state: GroupState = new_group(
            spec.policy.strategy,
            spec.policy.intensity.window(),
            spec.world_size,
            restart=spec.policy.restart,
            backoff=spec.policy.backoff,
            keep=spec.policy.survivors == "keep",
        )
        self.group = group
        self._plane = plane = group.plane
        self._clock = group.clock
        self._ending = False
        self._layout = spec.layout  # of the ranks that are started from now on
        self._no_device: NoDevice | None = None  # why the group has given up
        self._plan: Planned | None = None  # the planned change under way
        self._planned = 0
        self._planned_at = self._clock()
        tell, loop = self._tell, runtime.loop
        self._forget = loop.when_lost(lambda cause: tell(HubLost(cause)))
        self._events = events = EventBus(runtime.collector, group)
        publish = events.publish
        self._leases = DeviceLeases(spec, runtime, tell, publish, group.deliver, clock=group.clock)
        group.devices = self._leases.status
        self._stopping = Shutdown(spec.limits.stop, loop, group.watchdog, tell, group.clock)
        self._builder = WorkerBuilder(
            spec,
            runtime,
            plane.arena,
            probe=group.probe,
            clock=group.clock,
            channel=group.channel,
        )
        self._launches = Launches(spec.name, tell, group.spawn)
        self._members = Members(
            spec,
            runtime,
            leases=self._leases,
            builder=self._builder,
            launches=self._launches,
            stopping=self._stopping,
            links=Links(spec.transport, runtime, spec.name, tell, publish)
            if spec.transport is not None
            else None,
            heartbeats=group.heartbeats,
            tell=tell,
            clock=group.clock,
        )
        self._checkpoints = CheckpointManager(
            spec, group.checkpoints, plane, publish, group.deliver, ends=group.owns_checkpoints
        )
        self._standby = Standby(
            spec.policy.standby,
            self._members,
            self._stopping,
            loop,
            tell=tell,
            publish=publish,
            clock=group.clock,
        )
        self._deaths = Deaths(
            spec,
            group,
            self._members,
            self._checkpoints,
            events,
            folder=spec.report_dir or runtime.reports or ReportFolder.from_environment(),
            show=self._show,
        )
        self._store = RendezvousStore(
            loop,
            runtime.launcher,
            preload=spec.launch.preload,
            group=spec.name,
            on_event=publish,
        )
        self._rendezvous: Rendezvous | None = None
        self._source = SourceFile(spec.worker)
        self._health = HealthMonitor(
            spec,
            group,
            self._members,
            self._stopping,
            loop,
            tell=tell,
            find=self._find,
            state=lambda: self._state,
        )

    def _start_actor_loop(self) -> None:
        try:
            super()._start_actor_loop()
        except BaseException:  # no thread is to be had: nothing else would give all that back
            pykka.ActorRegistry.unregister(self.actor_ref)
            self._release_runtime = lambda: None
            self._give_back()
            self.group.gone.set()
            raise

    # --- messages -----------------------------------------------------------------------

    def _tell(self, message: object) -> None:
        with suppress(pykka.ActorDeadError):  # it has ended meanwhile
            self.actor_ref.tell(message)

    def _actor_loop_running(self) -> None:
        with occupied:
            super()._actor_loop_running()

    def hear(self, notice: Any, /) -> None:
        """Act on one message; a value that is no `Message` has no effect."""
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
                self._plane.count_foreign(rank, incarnation, packets)
            case ProcessGone(rank, incarnation):
                self._gone(rank, incarnation)
            case StreamEnded(rank, incarnation):
                member = self._members.find(rank, incarnation)
                if member is not None:
                    self._stopping.expect_exit(member)
            case LinkLost(rank, incarnation, why):
                member = self._find(rank, incarnation)
                if member is not None:
                    self._stopping.examine(member, why)
            case Overdue() | ReformOverdue() | Look() | Examined() | OutOfStep():
                self._health.handle(notice)
            case Timeout():
                self._timeout(notice)
            case Launched(launch):
                self._land(launch)
                self._show()
            case NotStarted(ranks, reason):
                self._not_started(ranks, reason)
            case Planned():
                self._change(notice)
            case Close(reason):
                self.group.heartbeats.tell_draining()
                self._finish_plan(accepted=False)
                self._act(CloseAsked(reason, self._clock()))
                if self.group.probe is not None:
                    self.group.probe.on_point("closing")
            case CheckpointDue() | SnapshotFailed() | SnapshotsChanged():
                self._checkpoints.hear(notice)
            case KillAll():
                for member in self._members.current():
                    self._stopping.kill(member)
            case HubLost(cause):
                fault = RuntimeFault(cause)
                self._plane.end(lambda call: RuntimeFault(f"{call.name}: {cause}"), lambda: fault)
                raise fault
            case _:
                pass

    def _timeout(self, timeout: Timeout) -> None:
        match timeout:
            case Timeout("group"):
                self._act(WaitOver(self._clock()))
            case Timeout("standby"):
                if self._state.phase is Phase.SERVING:
                    self._standby.fill()
            case Timeout("devices", StartRanks() as start):
                if self._leases.is_waiting(start):
                    self._start_ranks(start)
                    self._show()
            case Timeout("devices"):
                self._stopping.kill_broken(self._members.current(), self._leases.look())
            case Timeout((rank, incarnation), stage):
                member = self._find(rank, incarnation)
                if member is None:
                    return
                if stage != "abandon":
                    self._stopping.escalate(member, stage)
                elif left := self._stopping.abandon(member):
                    self._abandon(member, left)
            case _:
                pass

    def _find(self, rank: int, incarnation: int) -> Worker | None:
        """Return that spare, while it is one, or that incarnation, while it is the current one."""
        return self._standby.find(rank) or self._members.find(rank, incarnation)

    def _said(self, said: RankSaid) -> None:
        """Act on a message of a worker's control socket."""
        member, frame = self._find(said.rank, said.incarnation), said.frame
        if member is None or frame.incarnation != member.incarnation:
            frame.drop()
            return
        match frame.kind:
            case Kind.STANDBY:
                self._standby.warm(member)
                self._show()
            case Kind.READY if member.seated:
                now = self._clock()
                self._act(RankReformed(member.rank, member.incarnation, frame.epoch, now))
            case Kind.READY:
                self._attach(member)
            case Kind.LEFT:
                member.left = frame.epoch
            case Kind.ENDING:
                self._plane.expect_end(member.rank, member.incarnation)
            case Kind.NOT_REFORMED:
                failure = RemoteFailure.read(frame)
                if frame.epoch == member.epoch:
                    member.failure = failure
                    self._stopping.doubt_reform(member)
            case Kind.RESTORING:
                member.restoring = True
            case Kind.EVENT:
                self._emit(member, frame)
            case Kind.START_FAILED | Kind.LAST_WORDS:
                member.failure = RemoteFailure.read(frame)
                # A thread of the user's may keep the process from ending by itself.
                self._stopping.expect_exit(member)
            case _:
                frame.drop()

    def _attach(self, member: Worker) -> None:
        """Have *member*, which is ready for the first time, take part in calls."""
        greeting = member.channel.receive()
        if not isinstance(greeting, Frame) or greeting.kind != Kind.HELLO:
            member.hung = f"its call socket is broken: {greeting!r}"
            self._stopping.kill(member)
            return
        member.ready = member.seated = True
        self._plane.attach(member.rank, member.incarnation, member.channel)
        now = self._clock()
        self._events.publish(WorkerReady(**member.who(), took=now - member.started_at, at=now))
        self._checkpoints.welcome(member)
        self._act(RankReady(member.rank, member.incarnation, now))

    def _emit(self, member: Worker, frame: Frame) -> None:
        """Hand an event of the user's to the subscribers."""
        try:
            value = frame.value()
        except Exception as error:  # noqa: BLE001  # a type this process does not know
            value = error
        name, now = self._spec.name, self._clock()
        self.group.deliver(Emitted(name, member.rank, member.incarnation, member.epoch, value, now))

    # --- deaths -------------------------------------------------------------------------

    def _gone(self, rank: int, incarnation: int) -> None:
        member = self._find(rank, incarnation)
        if member is None:
            return
        if self._standby.find(rank) is None:
            self._settle(member, reason_of(member))
            return
        report = self._deaths.report_spare(member)
        self._standby.gone(member)
        self._show()
        self._deaths.file(report)

    def _abandon(self, member: Worker, left: str) -> None:
        self._events.abandoned(member.who(), left)
        if self._standby.find(member.rank) is not None:
            self._standby.gone(member)
            self._show()
        else:
            detail = f"{member.hung}; {left}" if member.hung else left
            self._settle(member, ExitReason(ExitKind.UNRESPONSIVE, detail))

    def _settle(self, member: Worker, reason: ExitReason) -> None:
        """Have it decided what follows from the end of *member*, and do it."""
        now = self._clock()
        self._checkpoints.blame(member, reason)
        progress = self._plane.progress(member.rank, member.incarnation)
        if progress.served and self._place is not None:
            self._place.on_use()
        event = RankExited(
            member.rank,
            member.incarnation,
            reason,
            now,
            _jitter(),
            self._deaths.directive(member, reason),
            out_of_step=member.out_of_step,
        )
        epoch = self._state.epoch
        self._state, actions = decide_ranks(self._state, event)
        self._deaths.settle(member, reason, progress, self._state, actions, epoch=epoch, at=now)
        self._members.release(member)
        self._perform(actions)

    def _not_started(self, ranks: tuple[tuple[int, int], ...], reason: ExitReason) -> None:
        if self.group.probe is not None:
            self.group.probe.on_point("not_started", ranks=ranks, reason=str(reason))
        now, jitter = self._clock(), _jitter()
        for rank, incarnation in ranks:
            self._act(RankExited(rank, incarnation, reason, now, jitter))

    # --- planned changes ----------------------------------------------------------------

    def _change(self, plan: Planned) -> None:
        """Begin a planned change, unless it comes too late, or too early."""
        has_ranks = plan.ranks <= {rank.number for rank in self._state.ranks}
        if self._state.phase is not Phase.SERVING or self._plan is not None or not has_ranks:
            plan.done.set()
            return
        plan.accepted = True
        self._plan = plan
        self._planned += 1
        self._planned_at = now = self._clock()
        event: RankEvent = RestartAsked(plan.ranks, now, force=plan.force)
        if plan.size is not None:
            event = ResizeAsked(plan.size, now)
        if self.group.probe is not None:
            self.group.probe.on_point("planned", ranks=plan.ranks, size=plan.size)
        if plan.layout is not None:
            self._layout = plan.layout
            self._plane.expect(plan.layout.world_size, self._show)
        self._state, actions = decide_ranks(self._state, event)
        stopped = next(each.ranks for each in actions if isinstance(each, StopRanks))
        for member in self._members.current():
            member.forced = plan.force and member.rank in stopped
        self._perform(actions)

    def _finish_plan(self, *, accepted: bool) -> None:
        """Release the caller of the planned change: it is done, or was not *accepted* after all."""
        plan, self._plan = self._plan, None
        if plan is not None:
            plan.accepted = accepted
            plan.done.set()

    # --- actions ------------------------------------------------------------------------

    def _begin(self) -> None:
        """Start the group for the first time, unless what its ranks go on from cannot be used."""
        if "OMP_NUM_THREADS" not in os.environ and "OMP_NUM_THREADS" not in self._spec.launch.env:
            self._events.threads_limited(threads_of_each(self._spec.world_size))
        try:
            base = self._checkpoints.open(self._runtime.loop, self._tell)
        except (CallerError, OSError) as error:
            self.group.start_error = error
            reason = ExitReason(ExitKind.CRASH, str(error))
            self._state = replace(self._state, phase=Phase.ENDED, ending=reason)
            self._end(reason)
            return
        if base is not None:
            self._builder.save_from(base)
        self._act(Begin(self._clock()))

    def _act(self, event: RankEvent) -> None:
        self._state, actions = decide_ranks(self._state, event)
        self._perform(actions)

    def _perform(self, actions: tuple[RankAction, ...]) -> None:
        for action in actions:
            match action:
                case StartRanks():
                    self._start_ranks(action)
                case ReformRanks():
                    self._reform_ranks(action)
                case StopRanks():
                    self._stop_ranks(action)
                case Hold():
                    self._plane.close_epoch()
                case Serve(epoch):
                    self._serve(epoch)
                case WaitUntil(at):
                    over = Timeout("group", "back-off")
                    self._runtime.loop.call_at(at, partial(self._tell, over))
                case Decided():
                    pass  # it is in the report
                case End(reason):
                    self._end(reason)
        if not self._ending:
            self._show()

    @property
    def _is_first(self) -> bool:
        """Whether the group has not served yet."""
        return self._state.served_at is None

    def _start_ranks(self, action: StartRanks) -> None:
        """Begin to start ranks, or have them wait for their devices."""
        self._plane.resize(action.size)
        if not self._is_first and self._source.has_changed():
            self._events.code_changed(
                self._spec.worker, self._source.path, self._spec.launch.preload
            )
        try:
            leases = self._leases.ask(action, first=self._is_first)
            if leases is None:
                return  # a `Timeout` of the devices follows
            try:
                epoch = self._epoch(action.epoch)
                restore_points = self._checkpoints.restore_points(action)
            except BaseException:
                self._leases.give_all_back(leases)
                raise
            taken = self._members.start(
                epoch, action.ranks, leases, self._standby.take, restore_points
            )
        except NoDevice as none:
            self._no_device = none
            reason = replace(SHUTDOWN, detail=f"gave up: {none}")
            # To try again would only wait again.
            self._tell(Close(reason))
            self._start_failed(action.ranks, none, reason)
        except Exception as error:  # noqa: BLE001  # a start that fails is an exit of those ranks
            self._start_failed(action.ranks, error)
        else:
            self._started(taken)

    def _land(self, launch: Launch) -> None:
        """Take over what *launch* has brought, once."""
        if not self._launches.take(launch):
            return
        members = launch.members
        if members[0].spare:
            self._standby.land(launch)
            return
        error = self._members.land(launch)
        if error is None:
            self._started(members)
            for member in members:
                self._stopping.kill_unwanted(member)
            return
        asked = tuple((each.rank, each.incarnation) for each in members if each.asked)
        if asked:
            self._tell(NotStarted(asked, SHUTDOWN))
        missed = tuple((each.rank, each.incarnation) for each in members if not each.asked)
        if missed:
            self._start_failed(missed, error)

    def _started(self, members: Sequence[Worker]) -> None:
        """Publish that *members* have a process."""
        for member in members:
            device, at = member.labels.device, member.started_at
            self._events.publish(WorkerStarted(**member.who(), device=device, at=at))
        if members and self.group.probe is not None:
            pairs = tuple((each.rank, each.incarnation) for each in members)
            self.group.probe.on_point("restarting", ranks=pairs)

    def _start_failed(
        self,
        ranks: tuple[tuple[int, int], ...],
        error: BaseException,
        reason: ExitReason | None = None,
    ) -> None:
        """Post that *ranks* could not be started, for *reason* or because of *error*."""
        if descriptor_limit.is_shortage(error):
            error = too_few_descriptors(error)
        if self._is_first and self.group.start_error is None:
            self.group.start_error = error
        if reason is None:
            detail = f"it could not be started: {type(error).__name__}: {error}"
            reason = ExitReason(ExitKind.CRASH, detail)
            if not isinstance(error, CallerError):  # the caller alone gets that one
                self._events.start_failed(error)
        # Through the mailbox, as any exit: a retry that fails again must not nest.
        self._tell(NotStarted(ranks, reason))

    def _reform_ranks(self, action: ReformRanks) -> None:
        """Have ranks that are kept leave their process group and join another."""
        why, epoch = "", None
        try:
            epoch = self._epoch(action.epoch)
        except Exception as error:  # noqa: BLE001  # ranks that get no order are replaced
            self._events.start_failed(error)
            why = f"it could not be re-formed: {type(error).__name__}: {error}"
        for rank, incarnation in action.ranks:
            member = self._members.find(rank, incarnation)
            if member is None:
                continue
            if epoch is None:
                member.broken = why
                self._stopping.kill(member)
            else:
                order = self._members.reform(member, epoch)
                self._plane.post(rank, incarnation, order, leaves_epoch=True)

    def _stop_ranks(self, action: StopRanks) -> None:
        """Begin to stop ranks; those that wait for a device, or a process, never start."""
        for start in self._leases.withdraw(frozenset(action.ranks)):
            self._tell(NotStarted(start.ranks, SHUTDOWN))
        for member in self._members.current():
            if member.rank not in action.ranks:
                continue
            # In its start it reads no message; with its group broken it may never.
            hurry = action.hurry or not member.seated
            if not hurry:
                stop = Payload.of(None).packet(Kind.STOP, epoch=member.epoch, call_id=0)
                self._plane.post(member.rank, member.incarnation, stop)
            self._stopping.ask_to_stop(member, hurry=hurry)

    def _serve(self, number: int) -> None:
        """Let collective calls go under epoch *number*: every rank is up."""
        now = self._clock()
        recovered, self._deaths.is_down = self._deaths.is_down, False
        self._plane.open(number)
        self._checkpoints.prune()
        self._events.publish(
            GroupUp(
                group=self._spec.name,
                epoch=number,
                world_size=self._layout.world_size,
                took=now - max(self._planned_at, self._deaths.at),
                at=now,
                level="warning" if recovered else "info",  # the log has seen it go down
            )
        )
        self._show()
        self._finish_plan(accepted=True)
        self.group.ready.set()
        self._tell(Timeout("standby", "refill"))  # after the messages that are queued already

    def _epoch(self, number: int) -> EpochSpec:
        if self._rendezvous is None or self._rendezvous.epoch != number:
            self._rendezvous = self._store.open(number)
        trace = self.group.trace.starting()
        return EpochSpec(number, self._layout, not self._spec.is_plain, self._rendezvous, trace)

    # --- the end ------------------------------------------------------------------------

    def _end(self, reason: ExitReason) -> None:
        """Give everything back; runs once, last."""
        self._ending = True
        group = self.group
        if not group.closing:
            group.cause = reason
        cause = None if group.closing else reason
        deaths = deaths_behind(self._state, self._deaths.reports)
        farewell = EndErrors(self._spec.name, cause, deaths, self._no_device)
        self._plane.end(farewell.settle, farewell.refuse)
        self._finish_plan(accepted=False)
        for launch in self._launches.close():
            self._land(launch)
        for member in self._members.current():
            member.asked = True
            if member.process is not None:  # no deadline behind it: the event loop may have ended
                member.process.send_signal(signal.SIGKILL)
            self._plane.detach(member.rank, member.incarnation)
            self._members.release(member)
        self._show()
        was_lost = cause is not None and reason.kind is not ExitKind.NORMAL
        level = "error" if self._place is not None else "critical"
        self._events.publish(
            GroupEnded(
                group=self._spec.name,
                epoch=self._state.epoch,
                cause="" if cause is None else str(reason),
                at=self._clock(),
                level=level if was_lost and not self._is_first else "info",
            )
        )
        if cause is not None and not self._is_first:
            group.tell_failed(reason)
        group.ready.set()
        self._checkpoints.close()
        place, self._place = self._place, None  # it may hold on to what holds on to us
        if place is not None:
            # Before the shared parts are let go: the next executor finds them warm.
            place.on_end(reason)
        self._give_back()
        self.stop()
        group.gone.set()

    def _give_back(self) -> None:
        """Give everything back; the ranks are buried. The shared parts go last."""
        group = self.group
        for give_back in (
            self._forget,
            group.watchdog.close,
            self._standby.close,
            self._members.close,
            self._store.close,
            self._leases.close,
            self._plane.close,
            self._deaths.close,
            partial(group.callbacks.close, _CALLBACKS),
            self._release_runtime,
        ):
            try:
                give_back()
            except Exception as error:  # noqa: BLE001  # the rest must still be given back
                self._events.complain(error)

    def failed(self, error: BaseException, /) -> None:
        """End the group after an exception of our own."""
        self._events.complain(error)
        if not self._ending:
            if not self.group.ready.is_set():
                self.group.start_error = error
            what = f"the executor itself: {type(error).__name__}: {error}"
            reason = ExitReason(ExitKind.CRASH, what)
            self._state = replace(self._state, phase=Phase.ENDED, ending=reason)
            try:
                self._end(reason)
            except BaseException as second:  # noqa: BLE001  # nothing is left to try
                self._events.complain(second)
            else:
                return
        self.group.ready.set()
        self.group.gone.set()
        self.stop()

    def _show(self) -> None:
        """Publish what the group looks like now."""
        state = self._state
        self.group.show(
            Status(
                name=self._spec.name,
                layout=self._layout,
                phase=state.phase,
                epoch=state.epoch,
                ranks=rank_infos(state, self._members.current()),
                restarts=self._deaths.restarts,
                window=state.window,
                planned=self._planned,
                standby=self._standby.count,
                reports=self._deaths.reports,
            )
        )


def _jitter() -> float:
    return random.random()  # noqa: S311  # spreads restarts, hides nothing
