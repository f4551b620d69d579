"""`GroupActor`: the only thread that changes the membership of a rank group.

- It handles one message at a time, and waits for no process to start. Most messages are calls that
  it makes; one about a worker that has been released is void.
- A death is classified, reported and settled before anything is started in its place.
- When the group ends for good, every call is settled, every resource is released, the failure
  callbacks have run at most once, and `Group.gone` is set; an exception in this actor ends the
  group in the same way.

`decide` decides, `Membership` holds processes, `CallPlane` carries calls, which do not pass
through here: they run in their callers' threads.
"""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import pykka

from phalanx.actors.checkpoint.group_checkpoints import CheckpointManager
from phalanx.actors.health.hang_detector import HangDetector
from phalanx.actors.remote.links import Links, NodeLinks
from phalanx.actors.remote.node_places import NodePlaces
from phalanx.actors.spec.factory import SourceFile
from phalanx.actors.spec.results import Emitted, Status
from phalanx.cluster import RemoteProcess
from phalanx.runtime import (
    Frame,
    GroupEnded,
    GroupUp,
    Kind,
    Payload,
    RankInfo,
    RemoteFailure,
    RendezvousStore,
    WorkerReady,
    WorkerStarted,
    descriptor_limit,
    occupied,
)
from phalanx.supervision import (
    SHUTDOWN,
    CallerError,
    ExitKind,
    ExitReason,
    GroupState,
    NoDevice,
    Phase,
    ProtectedActor,
    RuntimeFault,
    StartRanks,
    decide,
)

from .deaths import Deaths, EndErrors, deaths_behind, reason_of
from .device_leases import DeviceLeases
from .launcher import EpochSpec, WorkerBuilder, threads_of_each, too_few_descriptors
from .membership import Membership
from .shutdown import Shutdown
from .standby import Standby
from .worker import Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import ExitStack

    from phalanx.actors.calls.rank import Progress
    from phalanx.actors.spec.layout import Layout
    from phalanx.cluster import Reservation
    from phalanx.runtime import Rendezvous

    from .handle import Group, Parent
    from .membership import Launch

_CALLBACKS = 5.0  # seconds for the last callbacks to be run
_LOOK = attrgetter("pid", "incarnation", "epoch", "state", "device")  # of a RankInfo
_TOGETHER = 0.1  # seconds in which the lost links of all ranks beside one relay are reported


@dataclass(slots=True)
class PlannedChange:
    """A planned restart or resize; nothing is in flight, but for a restart by force.

    Attributes:
        force: Whether calls in flight are ended.
        done: Set once the group is whole again, has ended, or the request came too late.
        reservation: Of the machines that it needs; None where it needs no others.
        accepted: Whether it was carried out.
    """

    ranks: frozenset[int] = frozenset()
    size: int | None = None
    layout: Layout | None = None
    force: bool = False
    reservation: Reservation | None = None
    accepted: bool = False
    done: threading.Event = field(default_factory=threading.Event)


class GroupActor(ProtectedActor):
    """See the module's docstring. Built and started by its `Group`.

    Args:
        release_runtime: Gives back the runtime; called last.
        parent: The supervisor that it is a child of; None if it stands alone.
        made: Gives back what this constructor has made, if it raises.
    """

    def __init__(
        self,
        group: Group,
        release_runtime: Callable[[], None],
        parent: Parent | None,
        made: ExitStack,
    ) -> None:
        super().__init__()
        group.actor = self  # from here on it may be posted to
        self._spec = spec = group.spec
        self._runtime = runtime = group.runtime
        self._release_runtime = release_runtime
        self._parent = parent
        self._state: GroupState = GroupState(
            spec.policy.strategy,
            spec.policy.intensity.window(),
            spec.world_size,
            restart=spec.policy.restart,
            backoff=spec.policy.backoff,
            keep=spec.policy.survivors == "keep",
        )
        self.group = group
        self._plane = group.plane
        self._clock = group.clock
        self._publish = group.publish
        self._ending = False
        self._layout = spec.layout  # of the ranks that are started from now on
        self._no_device: NoDevice | None = None  # why the group has given up
        self._plan: PlannedChange | None = None  # the planned change under way
        self._planned = 0
        self._planned_at = self._clock()
        self._forget = runtime.loop.when_lost(partial(group.post, self._loop_lost))
        made.callback(self._forget)
        self._places: NodePlaces | None = None
        self._leases: DeviceLeases | NodePlaces
        if spec.cluster is None:
            self._leases = DeviceLeases(group, self._start_again, self.look_at_devices)
        else:
            self._leases = self._places = NodePlaces(
                group, spec.cluster, self._start_again, self._node_lost, self._note_fences
            )
            group.nodes, group.machines = self._places.nodes, self._places.pool
        made.callback(self._leases.close)
        group.devices = self._leases.status
        self._shutdown = Shutdown(group, self._abandon)
        links: Links | None = None
        ends: dict[str, Any] = {"lost": self._link_lost, "gone": self._exited}
        if self._places is not None:
            places = self._places
            links = NodeLinks(group, places.pool, gpus=places.gpus, **ends)
        elif (transport := spec.transport) is not None:
            links = Links(group, transport, **ends)
        self._membership = Membership(
            group,
            self._leases,
            WorkerBuilder(group, None if self._places is None else self._places.place_of),
            links,
            on_launched=self._launched,
            on_exit=self._exited,
        )
        made.callback(self._membership.close)
        self._checkpoints = CheckpointManager(group)
        self._standby = Standby(group, self._membership)
        self._deaths = Deaths(group, self._membership, self._checkpoints, self._show)
        self._store = RendezvousStore(
            runtime.loop,
            runtime.launcher,
            preload=spec.launch.preload,
            asked_env=spec.launch.env_of(0),
            group=spec.name,
            on_event=self._publish,
        )
        self._rendezvous: Rendezvous | None = None
        self._source = SourceFile(spec.worker)
        self.health = HangDetector(
            group, self._membership, self._shutdown, state=lambda: self._state
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

    def _actor_loop_running(self) -> None:
        with occupied:
            super()._actor_loop_running()

    def on_message(self, message: Any, /) -> None:
        """Act on one message; a value that is none of these has no effect."""
        match message:
            case PlannedChange():
                self._change(message)
            case (Worker() as worker, Frame() as frame):
                self._said(worker, frame)
            case _ if isinstance(message, partial) and not self._ending:
                message()
            case _:
                pass

    def close(self, reason: ExitReason = SHUTDOWN) -> None:
        """Have the group end."""
        self.group.heartbeats.tell_draining()
        self._finish_plan(accepted=False)
        self._act(decide.close(self._state, reason))
        if self.group.probe is not None:
            self.group.probe.on_point("closing")

    def kill_all(self) -> None:
        """Kill every rank now."""
        for worker in self._membership.current():
            self._shutdown.kill(worker)

    def forgive(self, restarts: int) -> None:
        """Have the last *restarts* not count."""
        self._state = replace(self._state, window=self._state.window.forgive(restarts))

    def look_at_devices(self) -> None:
        """Kill the ranks whose devices cannot go on."""
        broken = self._leases.look()
        for worker in self._membership.current():
            why = None if worker.lease is None else broken.get(worker.lease)
            if why is not None and not worker.asked and not worker.broken:
                worker.broken = why
                self._shutdown.kill(worker)

    def expect_exit(self, rank: int, incarnation: int) -> None:
        """Note that the call socket of that incarnation has ended."""
        if (worker := self._membership.find(rank, incarnation)) is not None:
            self.health.expect_exit(worker)

    def _link_lost(self, worker: Worker, why: str) -> None:
        if not worker.released:
            worker.is_cut_off = True
            self._shutdown.examine(worker, why)

    def _loop_lost(self, cause: str) -> None:
        """End the group: no death and no timer is noticed from now on."""
        fault = RuntimeFault(cause)
        self._plane.end(lambda call: RuntimeFault(f"{call.name}: {cause}"), lambda: fault)
        raise fault

    def _said(self, worker: Worker, frame: Frame) -> None:
        """Act on a message of a worker's control socket."""
        if self._ending or worker.released or frame.incarnation != worker.incarnation:
            frame.drop()
            return
        match frame.kind:
            case Kind.STANDBY:
                self._standby.warm(worker)
                self._show()
            case Kind.READY if worker.attached:
                worker.failure = None
                now = self._clock()
                who = worker.rank, worker.incarnation
                self._act(decide.rank_ready(self._state, *who, now, joined=frame.epoch))
            case Kind.READY:
                self._attach(worker)
            case Kind.LEFT:
                worker.left = frame.epoch
            case Kind.VOIDED:
                worker.voided = max(worker.voided, frame.epoch)
                self._send_orders()
            case Kind.ENDING:
                self._plane.expect_end(worker.rank, worker.incarnation)
            case Kind.NOT_REFORMED:
                failure = RemoteFailure.read(frame)
                if frame.epoch == worker.epoch:
                    worker.failure = failure
                    self.health.suspect_reform(worker)
            case Kind.RESTORING:
                worker.restoring = self._clock()
            case Kind.EVENT:
                self._emit(worker, frame)
            case Kind.START_FAILED | Kind.LAST_WORDS:
                worker.failure = RemoteFailure.read(frame)
                # A thread of the user's may keep the process from ending by itself.
                self.health.expect_exit(worker)
            case _:
                frame.drop()

    def _attach(self, worker: Worker) -> None:
        """Have *worker*, which is ready for the first time, take part in calls."""
        greeting = worker.channel.peek()
        worker.channel.unhandled = None
        if not isinstance(greeting, Frame) or greeting.kind != Kind.HELLO:
            worker.hung = f"its call socket is broken: {greeting!r}"
            self._shutdown.kill(worker)
            return
        worker.ready = worker.attached = True
        self._plane.attach(worker.rank, worker.incarnation, worker.channel)
        now = self._clock()
        self._publish(WorkerReady(**worker.who(), took=now - worker.started_at, at=now))
        self._checkpoints.publish_restored(worker)
        self._act(decide.rank_ready(self._state, worker.rank, worker.incarnation, now))

    def _emit(self, worker: Worker, frame: Frame) -> None:
        """Hand an event of the user's to the subscribers."""
        try:
            value = frame.value()
        except Exception as error:  # noqa: BLE001  # a type this process does not know
            value = error
        name, now = self._spec.name, self._clock()
        self.group.deliver(Emitted(name, worker.rank, worker.incarnation, worker.epoch, value, now))

    # --- deaths -------------------------------------------------------------------------

    def _exited(self, worker: Worker) -> None:
        if worker.released:
            return
        if worker.rank >= 0:
            if worker.is_cut_off:  # the others beside its relay are about to be
                self._shutdown.after(worker, _TOGETHER, self._settle_cut_off, worker)
            else:
                self._settle([worker], reason_of(worker))
            return
        report = self._deaths.report_spare(worker)
        self._standby.gone(worker, str(report.reason))
        self._show()
        self._deaths.file(report)

    def _settle_cut_off(self, worker: Worker) -> None:
        """Settle the end of *worker*, with the last of those that were cut off with it."""
        if all(each.has_ended for each in self._membership.cut_off_with(worker)):
            self._settle([worker], reason_of(worker))

    def _abandon(self, worker: Worker, left: str) -> None:
        self.group.log.error("phalanx.worker_abandoned", **worker.who(), left=left)
        if worker.rank < 0:
            self._standby.gone(worker, left)
            self._show()
        else:
            detail = f"{worker.hung}; {left}" if worker.hung else left
            self._settle([worker], ExitReason(ExitKind.UNRESPONSIVE, detail))

    def _node_lost(self, ranks: Mapping[int, int], why: str) -> None:
        """Settle the end of all *ranks*, by number and incarnation, whose node was lost."""
        for launch in self._membership.launches_of(ranks):  # over, and its message is behind this
            self._launched(launch)
        lost = [self._membership.find(*pair) for pair in ranks.items()]
        if workers := [worker for worker in lost if worker is not None]:
            self._settle(workers, ExitReason(ExitKind.UNRESPONSIVE, why))

    def _note_fences(self) -> None:
        """Complete the reports on ranks whose nodes were lost, and are known to run nothing."""
        if self._places is not None:
            self._deaths.note_fences(self._places.fences)

    def _settle(self, workers: Sequence[Worker], reason: ExitReason) -> None:
        """Have it decided what follows from the end of *workers*, of one cause, and do it.

        Those that were cut off with them and have ended are settled, too.
        """
        now = self._clock()
        beside = (each for one in workers for each in self._membership.cut_off_with(one))
        workers = [*dict.fromkeys((*workers, *(each for each in beside if each.has_ended)))]
        ended: list[tuple[Worker, Progress]] = []
        for worker in workers:
            self._checkpoints.reject_if_restore_failed(worker, reason)
            progress = self._plane.progress(worker.rank, worker.incarnation)
            if progress.served and self._parent is not None:
                self._parent.ctx.progressed()
            ended.append((worker, progress))
        epoch = self._state.epoch
        self._state, actions = decide.ranks_exited(
            self._state,
            tuple((worker.rank, worker.incarnation) for worker in workers),
            reason,
            now,
            jitter=self.group.jitter(),
            directive=self._deaths.directive(workers[0], reason),
            out_of_step=any(worker.out_of_step for worker in workers),
        )
        self._deaths.settle(ended, reason, self._state, actions, epoch=epoch, at=now)
        for worker in workers:
            self._membership.release(worker)
        self._perform(actions)
        self._send_orders()

    def _not_started(self, ranks: tuple[tuple[int, int], ...], reason: ExitReason) -> None:
        if self.group.probe is not None:
            self.group.probe.on_point("not_started", ranks=ranks, reason=str(reason))
        now = self._clock()
        self._act(decide.ranks_exited(self._state, ranks, reason, now, jitter=self.group.jitter()))

    # --- planned changes ----------------------------------------------------------------

    def _change(self, plan: PlannedChange) -> None:
        """Begin a planned change, unless it comes too late, or too early."""
        has_ranks = plan.ranks <= {rank.number for rank in self._state.ranks}
        if self._state.phase is not Phase.SERVING or self._plan is not None or not has_ranks:
            plan.done.set()
            return
        plan.accepted = True
        if plan.reservation is not None:
            plan.reservation.is_confirmed = True
        self._plan = plan
        self._planned += 1
        self._planned_at = self._clock()
        if self.group.probe is not None:
            self.group.probe.on_point("planned", ranks=plan.ranks, size=plan.size)
        if plan.layout is not None:
            self._layout = plan.layout
            self._plane.expect(plan.layout, self._show)
        if plan.size is None:
            decision = decide.restart(self._state, plan.ranks, force=plan.force)
        else:
            decision = decide.resize(self._state, plan.size)
        self._state, actions = decision
        stopped = next(each.ranks for each in actions if isinstance(each, decide.StopRanks))
        for worker in self._membership.current():
            worker.forced = plan.force and worker.rank in stopped
        self._perform(actions)

    def _finish_plan(self, *, accepted: bool) -> None:
        """Release the caller of the planned change: it is done, or was not *accepted* after all."""
        plan, self._plan = self._plan, None
        if plan is not None:
            plan.accepted = accepted
            plan.done.set()

    # --- actions ------------------------------------------------------------------------

    def begin(self) -> None:
        """Start the group for the first time, unless what its ranks go on from cannot be used."""
        if "OMP_NUM_THREADS" not in os.environ and "OMP_NUM_THREADS" not in self._spec.launch.env:
            threads = threads_of_each(self._spec.world_size)
            self.group.log.info("phalanx.threads_limited", **threads)
        try:
            self._checkpoints.open()
        except (CallerError, OSError) as error:
            self.group.start_error = error
            reason = ExitReason(ExitKind.CRASH, str(error))
            self._state = replace(self._state, phase=Phase.ENDED, ending=reason)
            self._end(reason)
            return
        self._act(decide.begin(self._state))

    def _act(self, decision: decide.RankDecision) -> None:
        self._state, actions = decision
        self._perform(actions)

    def _perform(self, actions: tuple[decide.RankAction, ...]) -> None:
        for action in actions:
            match action:
                case StartRanks():
                    self._start_ranks(action)
                case decide.ReformRanks():
                    self._reform_ranks(action)
                case decide.StopRanks():
                    self._stop_ranks(action)
                case decide.Hold():
                    self._plane.close_epoch()
                case decide.Serve(epoch):
                    self._serve(epoch)
                case decide.WaitUntil(at):
                    self._runtime.loop.call_at(at, partial(self.group.post, self._wait_over))
                case decide.Decided():
                    pass  # it is in the report
                case decide.End(reason):
                    self._end(reason)
        if not self._ending:
            self._show()

    def _wait_over(self) -> None:
        self._act(decide.wait_over(self._state, self._clock()))

    @property
    def _is_first(self) -> bool:
        """Whether the group has not served yet."""
        return self._state.served_at is None

    def _start_ranks(self, action: StartRanks) -> None:
        """Begin to start ranks, or have them wait for their devices."""
        self._plane.resize(action.size)
        if not self._is_first and self._source.has_changed():
            is_preloaded = self._spec.worker.__module__ in self._spec.launch.preload
            runs = "the old code" if is_preloaded else "the new code"
            self.group.log.warning(
                "phalanx.worker_code_changed", file=self._source.path, starts_run=runs
            )
        try:
            leases = self._leases.ask(action, first=self._is_first)
            if leases is None:
                return  # `_start_again` follows
            try:
                epoch = self._epoch(action.epoch)
                restore_points = self._checkpoints.restore_points(action)
            except BaseException:
                self._leases.give_all_back(leases)
                raise
            taken = self._membership.start(
                epoch, action.ranks, leases, self._standby.take, restore_points
            )
        except NoDevice as none:
            self._no_device = none
            reason = replace(SHUTDOWN, detail=f"gave up: {none}")
            # To try again would only wait again.
            self.group.post(self.close, reason)
            self._start_failed(action.ranks, none, reason)
        except Exception as error:  # noqa: BLE001  # a start that fails is an exit of those ranks
            self._start_failed(action.ranks, error)
        else:
            self._started(taken)

    def _start_again(self, action: StartRanks) -> None:
        self._start_ranks(action)
        self._show()

    def _launched(self, launch: Launch) -> None:
        """Take over what *launch* has brought, once."""
        if not self._membership.commit_launch(launch):
            return
        workers, error = launch.workers, launch.error
        if error is None:
            self._started(workers)
            for worker in workers:
                self._shutdown.kill_unwanted(worker)
        elif workers[0].rank < 0:
            self._standby.failed(workers[0], error)
        else:
            asked = tuple((each.rank, each.incarnation) for each in workers if each.asked)
            if asked:
                self.group.post(self._not_started, asked, SHUTDOWN)
            missed = tuple((each.rank, each.incarnation) for each in workers if not each.asked)
            if missed:
                self._start_failed(missed, error)
        if not self._ending:
            self._show()

    def _started(self, workers: Sequence[Worker]) -> None:
        """Limit the starts of *workers*, which have a process, and publish those of ranks."""
        for worker in workers:
            self.health.limit_start(worker)
        ranks = [worker for worker in workers if worker.rank >= 0]
        now = self._clock()
        for worker in ranks:
            device, at = worker.labels.device, worker.started_at
            self._publish(WorkerStarted(**worker.who(), device=device, took=now - at, at=at))
        if ranks and self.group.probe is not None:
            pairs = tuple((each.rank, each.incarnation) for each in ranks)
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
                self.group.log.error("phalanx.start_failed", exc_info=error)
        # Through the mailbox, as any exit: a retry that fails again must not nest.
        self.group.post(self._not_started, ranks, reason)

    def _reform_ranks(self, action: decide.ReformRanks) -> None:
        """Have ranks that are kept leave their process group and join another."""
        why, epoch = "", None
        try:
            epoch = self._epoch(action.epoch)
        except Exception as error:
            self.group.log.exception("phalanx.start_failed")
            # Ranks that get no order are replaced.
            why = f"it could not be re-formed: {type(error).__name__}: {error}"
        for rank, incarnation in action.ranks:
            worker = self._membership.find(rank, incarnation)
            if worker is None:
                continue
            if epoch is None:
                worker.broken = why
                self._shutdown.kill(worker)
            else:
                worker.order = self._membership.reform(worker, epoch)
                self.health.limit_reform(worker)
                self.group.heartbeats.tell_void(rank, incarnation, worker.epoch)

    def _send_orders(self) -> None:
        """Have ranks leave their process group, once each that is kept has noted that it is void.

        The abort of a rank in a group of NCCL makes the results of ranks that wait in it undefined.
        """
        kept = [each for each in self._membership.current() if each.order is not None]
        if all(each.voided == each.epoch for each in kept):
            for each in kept:
                order, each.order = each.order, None
                assert order is not None
                self._plane.post(each.rank, each.incarnation, order, leaves_epoch=True)
                self.health.limit_leave(each)

    def _stop_ranks(self, action: decide.StopRanks) -> None:
        """Begin to stop ranks; those that wait for a device, or a process, never start."""
        for start in self._leases.withdraw(frozenset(action.ranks)):
            self.group.post(self._not_started, start.ranks, SHUTDOWN)
        for worker in self._membership.current():
            if worker.rank not in action.ranks:
                continue
            # In its start it reads no message; with its group broken it may never.
            hurry = action.hurry or not worker.attached
            if not hurry:
                stop = Payload.of(None).packet(Kind.STOP, epoch=worker.epoch, call_id=0)
                self._plane.post(worker.rank, worker.incarnation, stop)
            self._shutdown.ask(worker, hurry=hurry)

    def _serve(self, number: int) -> None:
        """Let collective calls go under epoch *number*: every rank is up."""
        now = self._clock()
        recovered, self._deaths.is_down = self._deaths.is_down, False
        self._plane.open(number)
        self._checkpoints.prune()
        self._publish(
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
        self._standby.fill_soon()

    def _epoch(self, number: int) -> EpochSpec:
        if self._rendezvous is None or self._rendezvous.epoch != number:
            where = () if self._places is None else (self._places.pool.address,)
            self._rendezvous = self._store.open(number, *where)
        trace = self.group.trace.starting()
        return EpochSpec(number, self._layout, self._rendezvous, trace)

    # --- the end ------------------------------------------------------------------------

    def _end(self, reason: ExitReason) -> None:
        """Give everything back; runs once, last."""
        self._ending = True
        group = self.group
        if not group.closing:
            group.cause = reason
        cause = group.cause
        deaths = deaths_behind(self._state, self._deaths.reports)
        errors = EndErrors(self._spec.name, cause, deaths, self._no_device)
        self._plane.end(errors.settle, errors.refuse)
        self._finish_plan(accepted=False)
        for launch in self._membership.end_launches():
            self._launched(launch)
        for worker in self._membership.current():
            worker.asked = True
            if worker.process is not None:  # no deadline behind it: the event loop may have ended
                worker.process.send_signal(signal.SIGKILL)
            self._plane.detach(worker.rank, worker.incarnation)
            self._membership.release(worker)
        self._show()
        why = "" if cause is None else str(reason)
        group.runtime.status_source.note_end(self._spec.name, why)
        was_lost = cause is not None and reason.kind is not ExitKind.NORMAL
        level = "error" if self._parent is not None else "critical"
        self._publish(
            GroupEnded(
                group=self._spec.name,
                epoch=self._state.epoch,
                cause=why,
                at=self._clock(),
                level=level if was_lost and not self._is_first else "info",
            )
        )
        if cause is not None and not self._is_first:
            group.tell_failed(reason)
        group.ready.set()
        self._checkpoints.close()
        parent, self._parent = self._parent, None  # it may hold on to what holds on to us
        if parent is not None:
            # Before the shared parts are released: the next executor finds them warm.
            parent.on_end(reason)
        self._give_back()
        self.stop()
        group.gone.set()

    def _give_back(self) -> None:
        """Give everything back; the workers are released. The shared parts go last."""
        group = self.group
        for give_back in (
            self._forget,
            group.hang_limits.close,
            self._standby.close,
            self._membership.close,
            self._store.close,
            self._leases.close,
            self._note_fences,
            self._plane.close,
            self._deaths.close,
            partial(group.callbacks.close, _CALLBACKS),
            self._release_runtime,
        ):
            try:
                give_back()
            except Exception as error:  # noqa: BLE001  # the rest must still be given back
                self.group.report_error(error)

    def failed(self, error: BaseException, /) -> None:
        """End the group after an exception of our own."""
        self.group.report_error(error)
        if not self._ending:
            if not self.group.ready.is_set():
                self.group.start_error = error
            what = f"the executor itself: {type(error).__name__}: {error}"
            reason = ExitReason(ExitKind.CRASH, what)
            self._state = replace(self._state, phase=Phase.ENDED, ending=reason)
            try:
                self._end(reason)
            except BaseException as second:  # noqa: BLE001  # nothing is left to try
                self.group.report_error(second)
            else:
                return
        self.group.ready.set()
        self.group.gone.set()
        self.stop()

    def _show(self) -> None:
        """Publish what the group looks like now."""
        state = self._state
        before = {info.rank: info for info in self.group.view.ranks}
        self.group.show(
            Status(
                name=self._spec.name,
                layout=self._layout,
                phase=state.phase,
                epoch=state.epoch,
                ranks=tuple(
                    self._info(r.number, r.incarnation, r.state, before.get(r.number))
                    for r in state.ranks
                ),
                restarts=self._deaths.restarts,
                window=state.window,
                planned=self._planned,
                standby=self._standby.count,
                reports=self._deaths.reports,
            )
        )

    def _info(self, rank: int, incarnation: int, state: str, before: RankInfo | None) -> RankInfo:
        """Return how *rank* is: as *before* unless that has changed, for every end shows all."""
        worker = self._membership.find(rank, incarnation)
        pid = None if worker is None else worker.labels.pid or None
        device = "" if worker is None else worker.labels.device
        epoch = self._state.epoch
        if before and _LOOK(before) == (pid, incarnation, epoch, state, device):
            return before
        process = None if worker is None else worker.process
        host = process.host if isinstance(process, RemoteProcess) else ""
        return RankInfo(rank, pid, incarnation, epoch, str(state), device, host=host)
