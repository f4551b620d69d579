"""`Membership`: the workers of one rank group, started together and released one by one.

- A worker's resources in the driver (sockets, pages, output, lease) are made for one incarnation,
  and are released in `release`, also if the start failed half-way.
- Processes are launched on a separate thread, since that may wait for a zygote that imports
  torch, or is stopped. A launch whose workers have all been asked to stop is given up within a
  moment; after `end_launches` none is in progress.
- A worker is released only when its whole process tree is gone.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, replace
from functools import partial
from select import EPOLLIN
from typing import TYPE_CHECKING, Any

from phalanx.cluster import RemoteProcess
from phalanx.runtime import (
    Kind,
    LaunchSpec,
    Process,
    WorkerLabels,
    descriptors,
    occupied,
)
from phalanx.supervision import RuntimeFault

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from phalanx.actors.checkpoint.snapshot_store import RestorePoint
    from phalanx.actors.remote.links import Links
    from phalanx.actors.remote.node_places import NodePlaces
    from phalanx.runtime import Lease

    from .device_leases import DeviceLeases
    from .handle import Group
    from .launcher import EpochSpec, Join, WorkerBuilder
    from .worker import Worker

THREAD = "phalanx-launch"
"""The prefix of the names of launch threads."""

_RELEASE = 10.0  # seconds for tree and device of an exited rank; generous: 100 ms per GiB it held
_LAST_TRY = 0.5  # seconds for the tree of one that was given up
_LAUNCHES_END = 30.0  # seconds for launches that are not wanted: a gateway may have to be ended


@dataclass(slots=True, eq=False)
class Launch:
    """One launch, of all its workers or of none.

    Attributes:
        processes: Theirs, in their order, once they have been started.
        error: Why they could not be; None where they were.
    """

    workers: tuple[Worker, ...]
    processes: Sequence[Process | RemoteProcess] = ()
    error: BaseException | None = None


class Membership:
    """See the module. Used by the thread of the actor of *group* alone.

    Args:
        links: Where the ranks are elsewhere; else None.
        on_launched: Called with each `Launch` once it is over, on the actor's thread.
        on_exit: Called with each worker whose process has ended, on the actor's thread.
    """

    def __init__(
        self,
        group: Group,
        leases: DeviceLeases | NodePlaces,
        builder: WorkerBuilder,
        links: Links | None,
        *,
        on_launched: Callable[[Launch], None],
        on_exit: Callable[[Worker], None],
    ) -> None:
        self._group = group
        self._spec = group.spec
        self._loop = group.runtime.loop
        self._leases = leases
        self._builder = builder
        self._links = links
        self._on_launched = on_launched
        self._on_exit = on_exit
        self._workers: dict[int, Worker] = {}
        self._launches: dict[Launch, Join] = {}  # under way

    def find(self, rank: int, incarnation: int) -> Worker | None:
        """Return that incarnation if it is the current one."""
        worker = self._workers.get(rank)
        return worker if worker is not None and worker.incarnation == incarnation else None

    def cut_off_with(self, worker: Worker) -> list[Worker]:
        """Return those with a process that *worker*'s relay, if it was lost, has cut off."""
        return [
            each
            for each in self.current()
            if each.is_cut_off and worker.is_cut_off and each.process is not None
            if (each.hung, each.node) == (worker.hung, worker.node)
        ]

    def current(self) -> list[Worker]:
        """Return those that have a rank, by rank."""
        return [self._workers[rank] for rank in sorted(self._workers)]

    # --- starting -----------------------------------------------------------------------

    def start(
        self,
        epoch: EpochSpec,
        ranks: Iterable[tuple[int, int]],
        leases: Mapping[int, Lease],
        take_spare: Callable[[], Worker | None],
        restore_points: Mapping[int, RestorePoint],
    ) -> list[Worker]:
        """Begin to start these (rank, incarnation) together; return those that have a process.

        Those are the spares, which come first; the others have theirs launched, and are taken over
        by `commit_launch`. Each rank's lease is its process's from here on, or given back; so is
        each of *restore_points*, the states that ranks are given back.

        Raises:
            PhalanxError, OSError: one could not be equipped; then none of them is left.
        """
        made: list[Worker] = []
        taken: list[Worker] = []
        launches: list[LaunchSpec] = []
        unused = dict(leases)
        try:
            for rank, incarnation in ranks:
                worker = take_spare()
                if worker is not None:
                    taken.append(worker)
                else:
                    labels = self._builder.labels(epoch, rank, incarnation, unused[rank])
                    worker = self._builder.equip(labels, rank, incarnation, epoch.number)
                    made.append(worker)
                worker.lease = unused.pop(rank)
                worker.restore_point = restore_points.get(rank)
                if worker.process is not None:
                    self._assign(worker, epoch, rank, incarnation)
                else:
                    launches.append(self._builder.launch(worker, epoch))
                self._workers[rank] = worker
                worker.send_state()
            if made:
                self._launch(made, launches)
        except BaseException:
            for worker in (*taken, *made):
                worker.asked = True
                self.release(worker)
            for worker in made:
                worker.close_child_ends()
            self._leases.give_all_back(unused)
            raise
        finally:
            for restore_point in restore_points.values():
                restore_point.close()
        return taken

    def start_spare(self, number: int) -> Worker:
        """Begin to start a process that has no rank yet; *number*, below 0, stands for one.

        Raises:
            PhalanxError, OSError: it could not be equipped; nothing is left of it.
        """
        name = self._spec.name
        labels = WorkerLabels(child=f"{name}/standby", group=name, rank=None, incarnation=-number)
        with contextlib.ExitStack() as made:
            worker = self._builder.equip(labels, number, 0, 0)
            made.callback(self.release, worker)
            made.callback(worker.close_child_ends)
            self._launch([worker], [self._builder.launch_spare(worker)])
            made.pop_all()
        return worker

    def _launch(self, made: list[Worker], specs: list[LaunchSpec]) -> None:
        """Have each of *made* given its process.

        Raises:
            RuntimeFault: there is no thread for it.
        """
        launch = Launch(tuple(made))
        deadline = self._group.clock() + self._spec.limits.start
        by_label = {spec.label: worker for spec, worker in zip(specs, made, strict=True)}

        def on_exit(process: Process | RemoteProcess) -> None:
            self._exited(by_label[process.label])

        def is_wanted() -> bool:
            return not all(worker.asked for worker in made)

        how: dict[str, Any] = {"on_exit": on_exit, "deadline": deadline, "is_wanted": is_wanted}

        def run() -> None:
            with occupied:
                try:
                    if self._links is not None:
                        launch.processes = self._links.launch(made, specs, **how)
                    else:
                        launch.processes = self._group.runtime.launcher.launch(*specs, **how)
                except BaseException as error:  # noqa: BLE001  # the actor gets it
                    launch.error = error
            self._group.post(self._on_launched, launch)

        try:
            self._launches[launch] = self._group.spawn(run, f"{THREAD} {self._spec.name}")
        except RuntimeError as error:
            raise RuntimeFault(f"no thread to start processes from: {error}") from error

    def launches_of(self, ranks: Mapping[int, int]) -> list[Launch]:
        """Return those of *ranks*, by number and incarnation, that have not been taken over."""
        return [
            launch
            for launch in self._launches
            if any(ranks.get(each.rank) == each.incarnation for each in launch.workers)
        ]

    def end_launches(self) -> list[Launch]:
        """Give up what is under way; return it once it has come to an end, to be taken over."""
        for launch in self._launches:
            for worker in launch.workers:
                worker.asked = True
        deadline = time.monotonic() + _LAUNCHES_END
        launches = self._launches.items()
        return [each for each, join in launches if join(max(0.0, deadline - time.monotonic()))]

    def commit_launch(self, launch: Launch) -> bool:
        """Take over what *launch*, which is over, has brought; False if that has been done.

        Nothing is left of one that has failed.
        """
        join = self._launches.pop(launch, None)
        if join is None:
            return False
        join(_LAUNCHES_END)  # the message was the last thing that its thread did
        for worker in launch.workers:
            worker.close_child_ends()
        if launch.error is not None:
            for worker in launch.workers:
                self.release(worker)
            return True
        for worker, process in zip(launch.workers, launch.processes, strict=True):
            worker.process = process
        for worker, process in zip(launch.workers, launch.processes, strict=True):
            device = process.device if isinstance(process, RemoteProcess) else worker.labels.device
            worker.labels = replace(worker.labels, pid=process.pid, device=device)
            worker.output.label(pid=process.pid)
            on_readable = partial(worker.on_control_readable, self._group)
            worker.watch = self._loop.watch(worker.control.fileno(), EPOLLIN, on_readable)
            self._group.heartbeats.attach(worker.rank, worker.incarnation, worker.control.send)
            if process.status is not None:
                # Dead already. If its exit was delivered, it could not be handled yet.
                self._loop.post(partial(self._exited, worker))
        return True

    def _assign(self, spare: Worker, epoch: EpochSpec, rank: int, incarnation: int) -> None:
        """Make *spare* that rank."""
        assert spare.lease is not None
        assert spare.process is not None
        self._group.heartbeats.detach(spare.rank, spare.incarnation)
        self._group.heartbeats.attach(rank, incarnation, spare.control.send)
        labels = self._builder.labels(epoch, rank, incarnation, spare.lease)
        spare.rank, spare.incarnation, spare.epoch = rank, incarnation, epoch.number
        spare.labels = replace(labels, pid=spare.process.pid)
        spare.started_at = self._group.clock()
        spare.ready = False
        spare.output.label(spare.labels)
        payload = self._builder.assignment(spare, epoch)
        try:
            packet = payload.packet(Kind.ASSIGN, epoch=epoch.number, call_id=0)
            spare.send(packet, payload.file)
        finally:
            payload.close()

    def reform(self, worker: Worker, epoch: EpochSpec) -> bytes:
        """Return the order for *worker*, which is kept, to join *epoch*."""
        worker.failure = None  # of an epoch that is void
        worker.epoch = epoch.number
        worker.labels = replace(worker.labels, epoch=epoch.number)
        worker.output.label(worker.labels)
        return self._builder.reform(worker, epoch)

    # --- the end ------------------------------------------------------------------------

    def _kill_tree(self, process: Process, deadline: float) -> None:
        """Kill what is left of *process*, and of all that have ended: each look takes long."""
        ended = [
            (each, each.process)
            for each in self._workers.values()
            if isinstance(each.process, Process) and each.process.status and not each.swept
        ]
        left = process.kill_tree(deadline, [their for _, their in ended])
        for each, _ in ended:
            each.swept = not left

    def release(self, worker: Worker) -> None:
        """Give back what *worker* holds; kills what is left of its process tree first."""
        worker.released = True
        if self._workers.get(worker.rank) is worker:
            del self._workers[worker.rank]
        for timer in worker.timers:
            timer.cancel()
        if worker.watch is not None:
            worker.watch.cancel()
        self._group.heartbeats.detach(worker.rank, worker.incarnation)
        deadline = self._group.clock() + (_LAST_TRY if worker.abandoned else _RELEASE)
        process = worker.process
        if process is not None:
            if not isinstance(process, Process):
                process.kill_tree(deadline)
            elif not worker.swept:
                self._kill_tree(process, deadline)
            if not worker.abandoned or process.status is not None:
                process.close()
        if worker.lease is not None:
            self._leases.give_back(worker.lease, None if process is None else process.pid)
        if worker.remote is not None:
            worker.remote.release()
        descriptors.close(worker.control)
        if not worker.attached:
            worker.channel.close()
        worker.output.close()

    def close(self) -> None:
        """Give back what the ranks shared; all of them are released."""
        self._builder.close()
        if self._links is not None:
            self._links.close()

    # --- on the event loop's thread -----------------------------------------------------

    def _exited(self, worker: Worker) -> None:
        if worker.process is None:
            return  # `commit_launch` sees it
        if worker.abandoned:
            worker.process.close()
        elif worker.remote is not None:
            worker.remote.process_gone()
        else:
            self._group.post(self._on_exit, worker)
