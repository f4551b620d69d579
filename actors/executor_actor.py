"""The actor that owns a rank group: it hears what happens, has it decided, and does it.

Guarantees: one thread, one thing at a time; every death is classified, reported and settled
before anything is started in its place; when the group ends for good, by whatever cause, every
call is settled, everything is given back, the failure callback has fired at most once, and
whoever waits for the end is woken. An exception in this actor itself ends the group the same way.

Left to others: what to do (`decide_ranks`), processes (`Members`), calls (`Plane`). Calls do not
pass through here: they run in their callers' threads.
"""

from __future__ import annotations

import os
import random
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pykka

from phalanx.runtime import (
    Frame,
    GroupDown,
    GroupEnded,
    GroupUp,
    Kind,
    Payload,
    RemoteFailure,
    RendezvousStore,
    ReportFolder,
    WorkerCrashed,
    WorkerExited,
    WorkerReady,
    WorkerStarted,
    exit_of_process,
)
from phalanx.supervision import (
    SHUTDOWN,
    Begin,
    CallerError,
    CloseAsked,
    Decided,
    Directive,
    End,
    ExecutorClosed,
    ExitKind,
    ExitReason,
    GroupState,
    Hold,
    NoDevice,
    Phase,
    RankAction,
    RankEvent,
    RankExited,
    RankReady,
    RankReformed,
    RankState,
    ReformRanks,
    ResizeAsked,
    RestartAsked,
    Serve,
    StartFailed,
    StartRanks,
    StopRanks,
    WaitOver,
    WaitUntil,
    WorkerDied,
    decide_ranks,
    new_group,
)

from .examination import Examinations, Suspect
from .filing import Filing
from .keeper import Keeper
from .leases import Leases
from .links import Links
from .members import Formation, Members
from .notices import (
    BackOffOver,
    Close,
    CutDue,
    CutFailed,
    CutsChanged,
    DevicesDue,
    Emitted,
    Examined,
    KillAll,
    LinkLost,
    Look,
    LookAtDevices,
    NotStarted,
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
from .postmortem import deaths_behind, report_on, with_deaths
from .seat import Progress
from .standby import Standby
from .status import GroupView, RankInfo

if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx.runtime import CallFate, CrashReport, Runtime

    from .calls import Call
    from .members import Member
    from .seat import Running
    from .shared import Shared
    from .spec import ExecutorSpec

_LOOK_AGAIN = 0.5  # seconds for ranks that waited for one that hung to come free by its death
_LAST_BREATH = 1.0  # seconds a process may live on after its call socket has ended
_KEPT_REPORTS = 256


class ExecutorActor(pykka.ThreadingActor):
    """See the module's docstring. Started by `Executor`, told `Notice` values."""

    use_daemon_thread = True  # a program that ends without close() must end

    def __init__(
        self,
        spec: ExecutorSpec,
        runtime: Runtime,
        shared: Shared,
        release_runtime: Callable[[], None],
        on_end: Callable[[ExitReason], None] | None,
    ) -> None:
        super().__init__()
        self._spec = spec
        self._runtime = runtime
        self._release_runtime = release_runtime
        self._on_end = on_end
        self._layout = spec.layout
        self._state: GroupState = new_group(
            spec.strategy,
            spec.intensity.window(),
            spec.world_size,
            restart=spec.restart,
            backoff=spec.backoff,
            keep=spec.survivors == "keep",
        )
        self._leases = Leases(spec, runtime, self._tell, self._publish, shared.deliver)
        shared.devices = self._leases.status
        links = None
        if spec.transport is not None:
            links = Links(spec.transport, runtime, spec.name, self._tell, self._publish)
        self._members = Members(
            spec,
            runtime,
            self._leases,
            self._tell,
            shared.plane.arena,
            links=links,
            probe=shared.probe,
            pulses=shared.pulses,
        )
        self._keeper = Keeper(
            spec,
            shared.cuts,
            shared.plane,
            self._publish,
            shared.deliver,
            ends=shared.owns_cuts,
        )
        self._store = RendezvousStore(
            runtime.hub,
            partial(runtime.launcher, spec.preload),
            group=spec.name,
            on_event=self._publish,
        )
        self._rendezvous: Any = None
        self._standby = Standby(spec.standby, self._members, runtime.hub, self._tell, self._publish)
        folder = spec.report_dir or runtime.reports or ReportFolder.from_environment()
        self._filing = Filing(folder, self._publish, self._complain)
        self._examinations = Examinations(shared.pulses, runtime.hub, self._tell, self._find)
        self._planned: Planned | None = None
        self._down_at = time.monotonic()
        self._restarts = 0
        self._planned_count = 0
        self._reports: list[CrashReport] = []
        self._last_report: CrashReport | None = None
        self._no_device: NoDevice | None = None
        self._ending = False
        self.shared = shared
        self._plane = shared.plane

    # --- hearing ------------------------------------------------------------------------

    def _tell(self, notice: object) -> None:
        # The actor may have ended meanwhile: then nobody is left who would care.
        with suppress(pykka.ActorDeadError):
            self.actor_ref.tell(notice)

    def on_receive(self, message: Any) -> None:
        """Act on one notice; whatever goes wrong here ends the group, never silently."""
        try:
            self._hear(message)
        except BaseException as error:  # noqa: BLE001  # SystemExit too: Pykka would stop all actors
            self._fail(error)

    def _hear(self, notice: Any) -> None:
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
                spare = self._standby.find(rank)
                member = self._members.find(rank, incarnation)
                if spare is not None:
                    self._spare_gone(spare)
                elif member is not None:
                    self._gone(member)
            case StreamEnded(rank, incarnation):
                member = self._members.find(rank, incarnation)
                if member is not None:
                    self._members.expect_exit(member, _LAST_BREATH)
            case Overdue():
                self._overdue(notice)
            case StopOverdue():
                self._stop_overdue(notice)
            case NotStarted(ranks, reason):
                if self.shared.probe is not None:
                    self.shared.probe.not_started(ranks, str(reason))
                now = time.monotonic()
                jitter = random.random()  # noqa: S311  # as above
                for rank, incarnation in ranks:
                    self._act(RankExited(rank, incarnation, reason, now, jitter))
            case BackOffOver():
                self._act(WaitOver(time.monotonic()))
            case Planned():
                self._plan(notice)
            case Close(reason):
                self._finish_plan(accepted=False)
                self._act(CloseAsked(reason, time.monotonic()))
                if self.shared.probe is not None:
                    self.shared.probe.closing()
            case CutDue() | CutFailed() | CutsChanged():
                self._keeper.hear(notice)
            case KillAll():
                self._kill_all()
            case _:
                self._on_time(notice)

    def _on_time(self, notice: Any) -> None:
        match notice:
            case Refill():
                if self._state.phase is Phase.SERVING:
                    self._standby.fill()
            case ReformOverdue():
                self._not_reformed(notice)
            case DevicesDue(start):
                if self._leases.is_waiting(start):
                    self._start(start)
                    self._show()
            case LookAtDevices():
                self._look_at_devices()
            case Look():
                self._look(notice)
            case LinkLost(rank, incarnation, why):
                member = self._standby.find(rank) or self._members.find(rank, incarnation)
                if member is not None:
                    self._members.examine(member, why)
            case Examined():
                self._examined(notice)
            case _:
                pass  # an actor may be told anything; only notices mean something here

    def _look_at_devices(self) -> None:
        """End the ranks whose devices have failed."""
        broken = self._leases.look()
        for member in self._members.current():
            if member.lease in broken and not member.asked and not member.broken:
                member.broken = broken[member.lease]
                self._members.kill(member)

    def _stop_overdue(self, notice: StopOverdue) -> None:
        spare = self._standby.find(notice.rank)
        member = spare or self._members.find(notice.rank, notice.incarnation)
        if member is None:
            return
        if notice.stage != "abandon":
            self._members.escalate(member, notice)
        elif left := self._members.abandon(member):
            self._log_abandoned(member, left)
            if spare is not None:
                self._standby.gone(spare)
                self._show()
            else:
                detail = f"{member.hung}; {left}" if member.hung else left
                self._bury(member, ExitReason(ExitKind.UNRESPONSIVE, detail))

    def _log_abandoned(self, member: Member, left: str) -> None:
        self._runtime.scribe.log.error("phalanx.worker_abandoned", **_who(member), left=left)

    def _said(self, notice: RankSaid) -> None:
        spare = self._standby.find(notice.rank)
        member = self._members.find(notice.rank, notice.incarnation) if spare is None else spare
        frame = notice.frame
        if member is None or frame.incarnation != member.incarnation:
            frame.drop()
            return
        if frame.kind == Kind.READY and member.seated:
            now = time.monotonic()
            self._act(RankReformed(member.rank, member.incarnation, frame.epoch, now))
        elif frame.kind == Kind.READY:
            self._ready(member)
        elif frame.kind == Kind.LEFT:
            member.left = frame.epoch
        elif frame.kind == Kind.ENDING:
            self._plane.expect_end(member.rank, member.incarnation)
        elif frame.kind == Kind.NOT_REFORMED:
            failure = RemoteFailure.read(frame)
            if frame.epoch == member.epoch:
                member.failure = failure
                self._members.doubt_reform(member)
        elif frame.kind == Kind.STANDBY:
            self._standby.warm(member)
            self._show()
        elif frame.kind == Kind.RESTORING:
            member.restoring = True
        elif frame.kind == Kind.EVENT:
            self._emitted(member, frame)
        elif frame.kind in (Kind.START_FAILED, Kind.LAST_WORDS):
            member.failure = RemoteFailure.read(frame)
            # A thread of the user's may keep the process from ending by itself.
            self._members.expect_exit(member, _LAST_BREATH)
        else:
            frame.drop()

    def _ready(self, member: Member) -> None:
        greeting = member.channel.receive()
        if not isinstance(greeting, Frame) or greeting.kind != Kind.HELLO:
            member.hung = f"its call socket is broken: {greeting!r}"
            self._members.kill(member)
            return
        member.ready = True
        member.seated = True
        self._plane.join(member.rank, member.incarnation, member.channel)
        now = time.monotonic()
        self._publish(WorkerReady(**_who(member), took=now - member.started_at, at=now))
        self._keeper.welcome(member)
        self._act(RankReady(member.rank, member.incarnation, now))

    def _emitted(self, member: Member, frame: Frame) -> None:
        try:
            value = frame.value()
        except Exception as error:  # noqa: BLE001  # a type this process does not know
            value = error
        self.shared.deliver(
            Emitted(
                self._spec.name,
                member.rank,
                member.incarnation,
                member.epoch,
                value,
                time.monotonic(),
            )
        )

    def _overdue(self, notice: Overdue) -> None:
        spare = self._standby.find(notice.rank)
        member = spare or self._members.find(notice.rank, notice.incarnation)
        starting = notice.what == "start"
        if member is None or (starting and member.ready):
            return
        match notice.what:
            case "start":
                limit = self._spec.start_timeout
                why = f"its start took longer than start_timeout={limit:g} s"
            case "stream":
                why = "it closed its call socket and lived on"
            case "call":
                why = notice.detail
        suspect = Suspect(
            notice.rank, notice.incarnation, why, lambda: not (starting and member.ready)
        )
        self._examinations.begin([suspect])

    def _not_reformed(self, notice: ReformOverdue) -> None:
        """End a rank that could not be kept; what follows is decided by its exit."""
        member = self._members.find(notice.rank, notice.incarnation)
        if member is None:
            return

        def reforms() -> bool:
            mine = member.epoch == notice.epoch and not member.asked
            return mine and self._state.ranks[member.rank].state is RankState.REFORMING

        def lingers() -> bool:
            return reforms() and member.left < notice.epoch

        if not reforms():
            return
        match notice.what:
            case "leave":
                if lingers():
                    limit = self._spec.leave_within
                    why = f"it had not left the old process group within leave_within={limit:g} s"
                    suspect = Suspect(member.rank, member.incarnation, why, lingers)
                    self._examinations.begin([suspect])
            case "join":
                limit = self._spec.start_timeout
                why = f"on_reform took longer than start_timeout={limit:g} s"
                suspect = Suspect(member.rank, member.incarnation, why, reforms)
                self._examinations.begin([suspect])
            case "failed":
                if not self._state.mending:  # else a further epoch is on its way, for all
                    failure = member.failure
                    if failure is not None and not member.hung:
                        member.broken = f"it could not be re-formed: {failure.headline}"
                    self._members.kill(member)

    def _look(self, look: Look) -> None:
        """See whether a rank hangs, and end those that do."""

        def is_stopped(running: Running) -> bool:
            member = self._members.find(running.rank, running.incarnation)
            return member is not None and member.process is not None and member.process.is_stopped()

        running = self._plane.running()
        judged = self.shared.watch.judge(look, running, is_stopped, time.monotonic())

        def runs_on(rank: Running) -> bool:
            member = self._members.find(rank.rank, rank.incarnation)
            if member is None or member.asked:
                return False
            if self._state.ranks[rank.rank].state is RankState.REFORMING:
                return False  # it is to leave its process group, and has a limit for that
            now = (each for each in self._plane.running() if each.rank == rank.rank)
            return next((each.began for each in now), 0.0) == rank.began

        suspects = [
            Suspect(rank.rank, rank.incarnation, why, partial(runs_on, rank), in_call=True)
            for rank, why in judged
            if runs_on(rank)
        ]
        self._examinations.begin(suspects, running)

    def _examined(self, notice: Examined) -> None:
        findings, look_again = self._examinations.end(notice)
        if look_again:
            self.shared.watch.wake(_LOOK_AGAIN)
        for finding in findings:
            self._members.examine(finding.member, finding.why, finding.seen)

    def _find(self, rank: int, incarnation: int) -> Member | None:
        return self._standby.find(rank) or self._members.find(rank, incarnation)

    # --- deaths -------------------------------------------------------------------------

    def _gone(self, member: Member) -> None:
        self._bury(member, _reason_of(member))

    def _bury(self, member: Member, reason: ExitReason) -> None:
        """Have it decided what follows from the end of *member*, and do it."""
        now = time.monotonic()
        self._keeper.blame(member, reason)
        event = WorkerExited(**_who(member), reason=reason, ran_for=now - member.started_at, at=now)
        progress = self._plane.progress(member.rank, member.incarnation)
        jitter = random.random()  # noqa: S311  # spreads restarts, hides nothing
        directive = self._directive(member, reason)
        self._state, actions = decide_ranks(
            self._state, RankExited(member.rank, member.incarnation, reason, now, jitter, directive)
        )
        self._publish(event)
        decided = next((a for a in actions if isinstance(a, Decided)), None)
        if decided is None:
            self._plane.lose({member.rank: member.incarnation}, None, self._stopped)
        else:
            self._settle_death(member, reason, progress, decided, actions)
        self._plane.leave(member.rank, member.incarnation)
        self._members.bury(member)
        self._perform(actions)

    def _spare_gone(self, spare: Member) -> None:
        decided = Decided("replace the spare", "its death is no failure of the group")
        report = report_on(spare, _reason_of(spare), Progress(), decided, self._members)
        self._standby.gone(spare)
        self._show()
        self._file(report)

    def _directive(self, member: Member, reason: ExitReason) -> Directive | None:
        """Return what the user's decider says of an unasked exit, or said in the worker."""
        failure, decider = member.failure, self._spec.decider
        if failure is not None and failure.directive:
            return Directive(failure.directive)
        if decider is None or member.asked:
            return None
        return decider.directive(reason, str(member.rank), failed=self._complain)

    def _settle_death(
        self,
        member: Member,
        reason: ExitReason,
        progress: Progress,
        decided: Decided,
        actions: tuple[RankAction, ...],
    ) -> None:
        """Report an unasked death, and settle or re-send what it cut short."""
        now = time.monotonic()
        ends = self._state.phase in (Phase.CLOSING, Phase.ENDED)
        if not ends:
            self._restarts += 1
            self._down_at = now
        known = report_on(member, reason, progress, decided, self._members)
        message = f"rank {member.rank} (pid {known.pid}) died: {reason}; {decided}"
        lost = {member.rank: member.incarnation}
        for action in actions:
            # Without hurry the others may finish what they have.
            if isinstance(action, StopRanks) and action.hurry:
                others = (m for m in self._members.current() if m.rank in action.ranks)
                lost |= {other.rank: other.incarnation for other in others}

        def story(fates: tuple[CallFate, ...], waiting: int) -> CrashReport:
            settled = known.settled(fates, waiting)
            prospect = "" if ends else self._keeper.prospect(member.rank)
            self._last_report = report = replace(settled, checkpoint=prospect)
            self._reports = [*self._reports[-_KEPT_REPORTS:], report]
            self._show()  # whoever hears of the death from a call finds its report in the status
            return report

        def died(call: Call) -> BaseException:
            return WorkerDied(f"{call.name}: {message}", call.reports or (self._last_report,))

        self._plane.lose(lost, story, died, ends=ends)
        report = self._last_report
        assert report is not None
        if self._state.served_at is None and self.shared.start_error is None:
            self.shared.start_error = _start_error(member, reason, report)
        self._file(report)
        self._publish(
            GroupDown(group=self._spec.name, epoch=self._state.epoch, cause=message, at=now)
        )

    def _stopped(self, call: Call) -> BaseException:
        """Return the error of a call that a rank had begun and, told to stop, did not end."""
        message = f"{call.name}: a rank was stopped before it had answered"
        if self.shared.closing or self._last_report is None:
            return ExecutorClosed(message)
        return WorkerDied(message, call.reports or (self._last_report,))

    def _file(self, report: CrashReport) -> None:
        """Tell of a death, and keep its report where there is a folder for that."""
        self._publish(WorkerCrashed(report=report, at=report.at_monotonic))
        self._filing.file(report)

    # --- planned changes ----------------------------------------------------------------

    def _plan(self, plan: Planned) -> None:
        if self._state.phase is not Phase.SERVING or self._planned is not None:
            plan.done.set()
            return
        plan.accepted = True
        self._planned = plan
        self._planned_count += 1
        if self.shared.probe is not None:
            self.shared.probe.planned(plan.ranks, plan.size)
        self._down_at = now = time.monotonic()
        if plan.size is not None:
            assert plan.layout is not None
            self._layout = plan.layout
            self._act(ResizeAsked(plan.size, now))
        else:
            self._act(RestartAsked(plan.ranks, now))

    def _finish_plan(self, *, accepted: bool) -> None:
        plan, self._planned = self._planned, None
        if plan is not None:
            plan.accepted = accepted
            plan.done.set()

    # --- doing --------------------------------------------------------------------------

    def _kill_all(self) -> None:
        for member in self._members.current():
            self._members.kill(member)

    def _begin(self) -> None:
        """Start the group for the first time, unless what its ranks go on from cannot be used."""
        self._say_threads()
        try:
            base = self._keeper.open(self._runtime.hub, self._tell)
        except (CallerError, OSError) as error:
            self.shared.start_error = error
            reason = ExitReason(ExitKind.CRASH, str(error))
            self._state = replace(self._state, phase=Phase.ENDED, ending=reason)
            self._end(reason)
            return
        if base is not None:
            self._members.save_from(base)
        self._act(Begin(time.monotonic()))

    def _act(self, event: RankEvent) -> None:
        self._state, actions = decide_ranks(self._state, event)
        self._perform(actions)

    def _perform(self, actions: tuple[RankAction, ...]) -> None:
        for action in actions:
            match action:
                case StartRanks():
                    self._start(action)
                case ReformRanks(epoch, ranks):
                    self._reform(epoch, ranks)
                case StopRanks(ranks, hurry):
                    self._stop_ranks(ranks, hurry=hurry)
                case Hold():
                    self._plane.hold()
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

    def _say_threads(self) -> None:
        """Say that workers get one thread each, where nobody has set how many."""
        if "OMP_NUM_THREADS" not in os.environ and "OMP_NUM_THREADS" not in self._spec.env:
            self._runtime.scribe.log.info(
                "phalanx.threads_limited", group=self._spec.name, OMP_NUM_THREADS=1
            )

    def _start(self, action: StartRanks) -> None:
        self._plane.resize(action.size)
        first = self._state.served_at is None
        try:
            leases = self._leases.ask(action, first=first)
            if leases is None:
                return  # it is told when to ask again
            ranks, take_spare = action.ranks, self._standby.take
            try:
                formation = self._formation(action.epoch)
                gifts = self._keeper.gifts(action)
            except BaseException:
                self._leases.give_all_back(leases)
                raise
            members = self._members.start(formation, ranks, leases, take_spare, gifts)
        except NoDevice as none:
            self._give_up(action, none, first=first)
            return
        except Exception as error:  # a start that fails is an exit of those ranks
            if self.shared.start_error is None and self._state.served_at is None:
                self.shared.start_error = error
            detail = f"it could not be started: {type(error).__name__}: {error}"
            if not isinstance(error, CallerError):  # that one is told to the caller alone
                self._runtime.scribe.log.exception("phalanx.start_failed", group=self._spec.name)
            # Through the mailbox, as any exit: a retry that fails again must not nest.
            self._tell(NotStarted(action.ranks, ExitReason(ExitKind.CRASH, detail)))
            return
        for member in members:
            device, at = member.labels.device, member.started_at
            self._publish(WorkerStarted(**_who(member), device=device, at=at))
        if self.shared.probe is not None:
            self.shared.probe.restarting(action.ranks)

    def _give_up(self, action: StartRanks, none: NoDevice, *, first: bool) -> None:
        """End the group: there is no device for it, and it has waited."""
        self._no_device = none
        if first and self.shared.start_error is None:
            self.shared.start_error = none
        reason = replace(SHUTDOWN, detail=f"gave up: {none}")
        # Through the mailbox, as above. To try again would only wait again.
        self._tell(Close(reason))
        self._tell(NotStarted(action.ranks, reason))

    def _formation(self, epoch: int) -> Formation:
        if self._rendezvous is None or self._rendezvous.epoch != epoch:
            self._rendezvous = self._store.open(epoch)
        trace = self.shared.trace.starting()
        return Formation(epoch, self._layout, not self._spec.is_plain, self._rendezvous, trace)

    def _reform(self, epoch: int, ranks: tuple[tuple[int, int], ...]) -> None:
        try:
            formation = self._formation(epoch)
        except Exception:  # noqa: BLE001  # the start that follows meets the same, and tells it
            return
        for rank, incarnation in ranks:
            member = self._members.find(rank, incarnation)
            if member is not None:
                order = self._members.reform(member, formation)
                self._plane.post(rank, incarnation, order)

    def _stop_ranks(self, ranks: tuple[int, ...], *, hurry: bool) -> None:
        for start in self._leases.withdraw(frozenset(ranks)):
            self._tell(NotStarted(start.ranks, SHUTDOWN))
        for member in self._members.current():
            if member.rank not in ranks:
                continue
            if not hurry and member.seated:
                stop = Payload.of(None).packet(Kind.STOP, epoch=member.epoch, call_id=0)
                self._plane.post(member.rank, member.incarnation, stop)
                self._members.ask_to_stop(member, hurry=False)
            else:
                # It is still in its start, where it hears no message, or its group is broken.
                self._members.ask_to_stop(member, hurry=True)

    def _serve(self, epoch: int) -> None:
        now = time.monotonic()
        self._plane.open(epoch)
        self._keeper.prune()
        self._publish(
            GroupUp(
                group=self._spec.name,
                epoch=epoch,
                world_size=self._layout.world_size,
                took=now - self._down_at,
                at=now,
            )
        )
        self._show()
        if self._planned is not None:
            self._finish_plan(accepted=True)
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
        story = deaths_behind(self._state, self._reports)
        if shared.closing:
            message = f"executor {name} was closed"
        else:
            message = f"executor {name} has ended: {reason}"

        def settle(call: Call) -> BaseException:
            if shared.closing or not story:
                return ExecutorClosed(f"{call.name}: {message} before it was answered")
            died = WorkerDied(f"{call.name}: {message}", with_deaths(call.reports, story))
            died.__cause__ = self._no_device
            return died

        def refuse() -> BaseException:
            error = ExecutorClosed(f"{message}; build a new one")
            if not shared.closing and story:
                error.__cause__ = self._no_device or WorkerDied(message, story)
            return error

        self._plane.end(settle, refuse)
        self._finish_plan(accepted=False)
        for member in self._members.current():
            member.asked = True
            self._members.kill(member)
            self._plane.leave(member.rank, member.incarnation)
            self._members.bury(member)
        self._show()
        self._publish(
            GroupEnded(
                group=name,
                epoch=self._state.epoch,
                cause="" if shared.closing else str(reason),
                at=time.monotonic(),
            )
        )
        if not shared.closing and self._state.served_at is not None:
            shared.tell_failed(reason)
        shared.ready.set()
        self._keeper.close()
        on_end, self._on_end = self._on_end, None  # it may hold on to what holds on to us
        if on_end is not None:
            # Before the shared parts are let go: whoever starts the next one finds them warm.
            on_end(reason)
        for give_back in (
            shared.watch.close,
            self._standby.close,
            self._members.close,
            self._store.close,
            self._leases.close,
            self._plane.close,
            self._filing.close,
            partial(shared.callbacks.close, 5.0),
            self._release_runtime,
        ):
            try:
                give_back()
            except Exception as error:  # noqa: BLE001  # the rest must still be given back
                self._complain(error)
        self.stop()
        shared.gone.set()

    def _fail(self, error: BaseException) -> None:
        """End the group after an exception of our own."""
        self._complain(error)
        if self._ending:
            self.shared.ready.set()
            self.shared.gone.set()
            self.stop()
            return
        reason = ExitReason(ExitKind.CRASH, f"the executor itself: {type(error).__name__}: {error}")
        if not self.shared.ready.is_set():
            self.shared.start_error = error
        try:
            self._state = replace(self._state, phase=Phase.ENDED, ending=reason)
            self._end(reason)
        except BaseException as second:  # noqa: BLE001  # nothing is left to try
            self._complain(second)
            self.shared.ready.set()
            self.shared.gone.set()
            self.stop()

    def _complain(self, error: BaseException) -> None:
        import traceback  # noqa: PLC0415  # only on the worst of days

        text = "".join(traceback.format_exception(error))
        with suppress(Exception):
            self._runtime.scribe.log.error(
                "phalanx.executor_failed", group=self._spec.name, trace=text
            )

    # --- telling ------------------------------------------------------------------------

    def _show(self) -> None:
        """Publish what the group looks like now."""
        members = {member.rank: member for member in self._members.current()}
        ranks: list[RankInfo] = []
        for rank in self._state.ranks:
            member = members.get(rank.number)
            current = member is not None and member.incarnation == rank.incarnation
            ranks.append(
                RankInfo(
                    rank.number,
                    (member.labels.pid or None) if member is not None and current else None,
                    rank.incarnation,
                    self._state.epoch,
                    str(rank.state),
                    member.labels.device if member is not None and current else "",
                )
            )
        self.shared.show(
            GroupView(
                phase=self._state.phase,
                epoch=self._state.epoch,
                ranks=tuple(ranks),
                restarts=self._restarts,
                restarts_in_window=len(self._state.window.spent),
                planned=self._planned_count,
                standby=self._standby.count,
                reports=tuple(self._reports),
            )
        )

    def _publish(self, event: Any) -> None:
        self._runtime.scribe.emit(event)
        if self.shared.probe is not None:
            self.shared.probe.happened(event)
        self.shared.trace.hear(event)
        self.shared.deliver(event)


def _who(member: Member) -> dict[str, Any]:
    return {
        "child": member.labels.child,
        "group": member.labels.group,
        "rank": member.rank,
        "incarnation": member.incarnation,
        "epoch": member.epoch,
        "pid": member.labels.pid or None,
    }


def _reason_of(member: Member) -> ExitReason:
    """Return why *member*, whose process has ended, did."""
    assert member.process is not None
    status = member.process.status
    assert status is not None
    detail = ""
    if member.failure is not None:
        detail = member.failure.headline
    if status.out_of_memory:
        detail = "out of memory"
    reason = exit_of_process(
        status.code,
        status.signal,
        asked=member.asked and not member.hung,
        unresponsive=bool(member.hung),
        detail=member.hung or detail,
    )
    if member.broken:
        return replace(reason, kind=ExitKind.CRASH, detail=member.broken)
    if not member.ready and not member.asked and not reason.is_failure:
        # Exit code 0 before READY is no normal end: the start was left by sys.exit or os._exit.
        return replace(reason, kind=ExitKind.CRASH, detail="it exited during its start")
    return reason


def _start_error(member: Member, reason: ExitReason, report: CrashReport) -> BaseException:
    """Return what the constructor raises: the worker's own exception where there is one."""
    where = f"raised in the start of rank {member.rank} (pid {report.pid})"
    failure: RemoteFailure | None = member.failure
    if failure is not None and failure.type_name != "SystemExit":
        error = failure.revive()
        if isinstance(error, Exception):
            with suppress(Exception):  # an exception type may refuse further attributes
                error.add_note(f"{where}; remote traceback:\n{failure.trace.rstrip()}")
            return error
    detail = f"rank {member.rank} (pid {report.pid}) did not become ready: {reason}"
    tail = (report.last_words or report.stderr).strip()
    return StartFailed(f"{detail}\n{tail}" if tail else detail, (report,))
