"""The workers of one rank group: started together, released one by one.

- All that a worker holds in the driver (sockets, pages, output, lease) is made in `start`, belongs
  to one incarnation, and is given back in `bury`, also if the start failed half-way.
- A process is taken over once its launch has ended, and nothing here waits for that.
- A worker is released only when its whole process tree is gone.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from functools import partial
from select import EPOLLIN
from typing import TYPE_CHECKING

from phalanx.runtime import Kind, LaunchSpec, Payload, WorkerLabels, send

from .messages import ProcessGone, RankSaid, RankSaidNothing
from .worker import read_control, shut_control

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from phalanx.actors.checkpoint.snapshot import RestorePoint
    from phalanx.actors.health.heartbeat import HeartbeatClient
    from phalanx.actors.remote.links import Links
    from phalanx.actors.spec.options import ExecutorSpec
    from phalanx.runtime import Lease, Process, Runtime

    from .devices import DeviceLeases
    from .launcher import EpochSpec, Launch, Launches, WorkerBuilder
    from .messages import Message
    from .shutdown import Shutdown
    from .worker import Worker

_RELEASE = 10.0  # seconds for a dead rank's tree and device; generous: 100 ms per GiB it held
_LAST_TRY = 0.5  # seconds for the tree of one that was given up


class Members:
    """Those that have a rank of one group, and its spares' processes.

    Args:
        links: Where the ranks are elsewhere; else None.
    """

    def __init__(
        self,
        spec: ExecutorSpec,
        runtime: Runtime,
        *,
        leases: DeviceLeases,
        builder: WorkerBuilder,
        launches: Launches,
        stopping: Shutdown,
        links: Links | None,
        heartbeats: HeartbeatClient,
        tell: Callable[[Message], None],
        clock: Callable[[], float],
    ) -> None:
        self._clock = clock
        self._spec = spec
        self._runtime = runtime
        self._leases = leases
        self._builder = builder
        self._launches = launches
        self._stopping = stopping
        self._links = links
        self._heartbeats = heartbeats
        self._tell = tell
        self._members: dict[int, Worker] = {}
        self.name = spec.name

    def find(self, rank: int, incarnation: int) -> Worker | None:
        """Return that incarnation if it is the current one, or who was that spare."""
        if rank < 0:
            return next((m for m in self._members.values() if m.spare == rank), None)
        member = self._members.get(rank)
        return member if member is not None and member.incarnation == incarnation else None

    def current(self) -> list[Worker]:
        """Return who is there, by rank."""
        return [self._members[rank] for rank in sorted(self._members)]

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
        by `land`. Each rank's lease is its process's from here on, or given back; so is each of
        *restore_points*, the states that ranks are given back.

        Raises:
            PhalanxError, OSError: one could not be equipped; then none of them is left.
        """
        made: list[Worker] = []
        taken: list[Worker] = []
        launches: list[LaunchSpec] = []
        unused = dict(leases)
        try:
            for rank, incarnation in ranks:
                spare = take_spare()
                if spare is not None:
                    taken.append(spare)
                    spare.lease = unused.pop(rank)
                    spare.restore_point = restore_points.get(rank)
                    self._assign(spare, epoch, rank, incarnation)
                    self._give(spare)
                    continue
                labels = self._builder.labels(epoch, rank, incarnation, unused[rank])
                member = self._builder.equip(labels, rank, incarnation, epoch.number)
                member.lease = unused.pop(rank)
                made.append(member)
                self._members[rank] = member
                member.restore_point = restore_points.get(rank)
                self._give(member)
                launches.append(self._builder.launch(member, epoch))
            if made:
                self._launch(made, launches)
        except BaseException:
            for member in (*taken, *made):
                member.asked = True
                self.release(member)
            for member in made:
                member.close_child_ends()
            self._leases.give_all_back(unused)
            raise
        finally:
            for restore_point in restore_points.values():
                restore_point.close()
        return taken

    def start_spare(self, number: int) -> Worker:
        """Begin to start a process that has no rank yet; *number* stands for one until it has.

        Raises:
            PhalanxError, OSError: it could not be equipped; nothing is left of it.
        """
        spec = self._spec
        labels = WorkerLabels(
            child=f"{spec.name}/standby", group=spec.name, rank=None, incarnation=-number
        )
        with contextlib.ExitStack() as made:
            member = self._builder.equip(labels, number, 0, 0)
            made.callback(self.release, member)
            made.callback(member.close_child_ends)
            member.spare = number
            self._launch([member], [self._builder.launch_spare(member)])
            made.pop_all()
        return member

    def _launch(self, made: list[Worker], launches: list[LaunchSpec]) -> None:
        """Have each of *made* given its process."""
        spec, links = self._spec, self._links
        deadline = self._clock() + spec.limits.start
        gone = {launch.label: member for launch, member in zip(launches, made, strict=True)}

        def make(is_wanted: Callable[[], bool]) -> list[Process]:
            if links is not None:
                links.launch(made, deadline, is_wanted)
            complete = [
                replace(
                    launch, fds={**launch.fds, **member.worker_fds()}, preload=spec.launch.preload
                )
                for launch, member in zip(launches, made, strict=True)
            ]
            return self._runtime.launcher.launch_many(
                complete,
                on_exit=lambda process: self._gone(gone[process.label]),
                deadline=deadline,
                is_wanted=is_wanted,
            )

        self._launches.begin(made, make)

    def land(self, launch: Launch) -> BaseException | None:
        """Take over what *launch* has brought; return why it failed: nothing is left of it then."""
        for member in launch.members:
            member.close_child_ends()
        if launch.error is not None:
            for member in launch.members:
                self.release(member)
            return launch.error
        for member, process in zip(launch.members, launch.processes, strict=True):
            member.process = process
        for member, process in zip(launch.members, launch.processes, strict=True):
            member.labels = _with_pid(member.labels, process.pid)
            member.output.label(pid=process.pid)
            member.watch = self._runtime.loop.watch(
                member.control.fileno(), EPOLLIN, partial(self._hear, member)
            )
            self._heartbeats.attach(member.rank, member.incarnation, member.control.send)
            self._stopping.limit_start(member, self._spec.limits.start)
            if process.status is not None:
                # Dead already. Where that was told, nobody could make anything of it yet.
                self._runtime.loop.post(partial(self._gone, member))
        return None

    def _assign(self, spare: Worker, epoch: EpochSpec, rank: int, incarnation: int) -> None:
        """Make *spare* that rank."""
        assert spare.lease is not None
        self._heartbeats.detach(spare.rank, spare.incarnation)
        self._heartbeats.attach(rank, incarnation, spare.control.send)
        labels = self._builder.labels(epoch, rank, incarnation, spare.lease)
        spare.rank, spare.incarnation, spare.epoch = rank, incarnation, epoch.number
        assert spare.process is not None
        spare.labels = _with_pid(labels, spare.process.pid)
        spare.started_at = self._clock()
        spare.ready = False
        self._members[rank] = spare
        spare.output.label(spare.labels)
        payload = self._builder.assignment(spare, epoch)
        try:
            # Where it has just died its end is on the way to us, and is that rank's.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                packet = payload.packet(Kind.ASSIGN, epoch=epoch.number, call_id=0)
                send(spare.control, packet, payload.file)
        finally:
            payload.close()
        self._stopping.limit_start(spare, self._spec.limits.start)

    def _give(self, member: Worker) -> None:
        """Send *member* the state it is given back, which it looks for after `on_start`."""
        restore_point = member.restore_point
        if restore_point is None:
            return
        payload = Payload.in_file(restore_point.file, os.fstat(restore_point.file).st_size)
        packet = payload.packet(Kind.RESTORE, epoch=member.epoch, call_id=0)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # a spare that has died
            send(member.control, packet, restore_point.file)

    def reform(self, member: Worker, epoch: EpochSpec) -> bytes:
        """Return the order for *member*, which is kept, to join *epoch*; sees to deadlines."""
        member.failure = None  # of an epoch that is void
        member.epoch = epoch.number
        member.labels = replace(member.labels, epoch=epoch.number)
        member.output.label(member.labels)
        spec = self._spec
        self._stopping.limit_reform(member, leave=spec.policy.leave_within, join=spec.limits.start)
        return self._builder.reform(member, epoch)

    def release(self, member: Worker) -> None:
        """Give back what *member* holds; kills what is left of its process tree first."""
        if self._members.get(member.rank) is member:
            del self._members[member.rank]
        for timer in member.timers:
            timer.cancel()
        if member.watch is not None:
            member.watch.cancel()
        self._heartbeats.detach(member.rank, member.incarnation)
        deadline = self._clock() + (_LAST_TRY if member.abandoned else _RELEASE)
        if member.process is not None:
            member.process.kill_tree(deadline)
            if not member.abandoned or member.process.status is not None:
                member.process.close()
        if member.lease is not None:
            pid = None if member.process is None else member.process.pid
            self._leases.give_back(member.lease, pid)
        if member.remote is not None:
            member.remote.outpost.bury()
        shut_control(member.control)
        if not member.seated:
            member.channel.close()
        member.output.close()

    def close(self) -> None:
        """Give back what the ranks shared; all of them are buried."""
        self._builder.close()
        if self._links is not None:
            self._links.close()

    # --- hearing ------------------------------------------------------------------------

    def _gone(self, member: Worker) -> None:
        if member.process is None:
            return  # `land` sees it
        if member.abandoned:
            member.process.close()
        elif member.remote is not None:
            member.remote.process_gone()
        else:
            self._tell(ProcessGone(member.rank, member.incarnation))

    def _hear(self, member: Worker, _events: int) -> None:
        """Pass on what *member* says; runs on the hub's thread."""
        frames, foreign, ended = read_control(member.control)
        if foreign:
            self._tell(RankSaidNothing(member.rank, member.incarnation, foreign))
        remote = member.remote
        for frame in frames:
            if frame.kind == Kind.PULSE:
                self._heartbeats.receive(member.rank, frame)
            elif remote is None or not remote.heard(frame):
                self._tell(RankSaid(member.rank, member.incarnation, frame))
        if ended and member.watch is not None:
            member.watch.cancel()
            if remote is not None:
                remote.ended()


def _with_pid(labels: WorkerLabels, pid: int) -> WorkerLabels:
    return replace(labels, pid=pid)
