"""The processes of one rank group: started together, buried one by one.

Guarantees: everything a rank holds in the driver (sockets, pages, output, lease) is made in
`start`, belongs to one incarnation, and is given back in `bury`, also where the start failed
half-way; its process is taken over once its launch has ended, and nothing here waits for that; a
rank is buried only when its whole process tree is gone.

Left to others: what to start (`decide_ranks`), what a rank is given on its way (`Outfit`), how it
is stopped (`Stopping`), what became of calls (`plane`).
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import replace
from functools import partial
from select import EPOLLIN
from typing import TYPE_CHECKING

from phalanx.runtime import Kind, LaunchSpec, Payload, WorkerLabels, send

from .messages import ProcessGone, RankSaid, RankSaidNothing
from .worker import read_control, shut_control

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from phalanx.actors.checkpoint.store import Gift
    from phalanx.actors.health.heartbeat import Pulses
    from phalanx.actors.remote.links import Links
    from phalanx.actors.spec.options import ExecutorSpec
    from phalanx.runtime import Lease, Process, Runtime

    from .devices import Leases
    from .epoch import Formation
    from .launcher import Launch, Launches, Outfit
    from .messages import Notice
    from .shutdown import Deadlines
    from .worker import Member

_BURIAL = 10.0  # seconds for a dead rank's tree and device; generous: 100 ms per GiB it held
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
        leases: Leases,
        outfit: Outfit,
        launches: Launches,
        deadlines: Deadlines,
        links: Links | None,
        pulses: Pulses,
        tell: Callable[[Notice], None],
    ) -> None:
        self._spec = spec
        self._runtime = runtime
        self._leases = leases
        self._outfit = outfit
        self._launches = launches
        self._deadlines = deadlines
        self._links = links
        self._pulses = pulses
        self._tell = tell
        self._members: dict[int, Member] = {}
        self.name = spec.name

    def find(self, rank: int, incarnation: int) -> Member | None:
        """Return that incarnation if it is the current one, or who was that spare."""
        if rank < 0:
            return next((m for m in self._members.values() if m.spare == rank), None)
        member = self._members.get(rank)
        return member if member is not None and member.incarnation == incarnation else None

    def current(self) -> list[Member]:
        """Return who is there, by rank."""
        return [self._members[rank] for rank in sorted(self._members)]

    def start(
        self,
        formation: Formation,
        ranks: Iterable[tuple[int, int]],
        leases: Mapping[int, Lease],
        take_spare: Callable[[], Member | None],
        gifts: Mapping[int, Gift],
    ) -> list[Member]:
        """Begin to start these (rank, incarnation) together; return those that have a process.

        Those are the spares, which come first; the others have theirs launched, and are taken over
        by `land`. Each rank's lease is its process's from here on, or given back; so is each of
        *gifts*, the states that ranks are given back.

        Raises:
            PhalanxError, OSError: one could not be equipped; then none of them is left.
        """
        made: list[Member] = []
        taken: list[Member] = []
        launches: list[LaunchSpec] = []
        unused = dict(leases)
        try:
            for rank, incarnation in ranks:
                spare = take_spare()
                if spare is not None:
                    taken.append(spare)
                    spare.lease = unused.pop(rank)
                    spare.gift = gifts.get(rank)
                    self._assign(spare, formation, rank, incarnation)
                    self._give(spare)
                    continue
                labels = self._outfit.labels(formation, rank, incarnation, unused[rank])
                member = self._outfit.equip(labels, rank, incarnation, formation.epoch)
                member.lease = unused.pop(rank)
                made.append(member)
                self._members[rank] = member
                member.gift = gifts.get(rank)
                self._give(member)
                launches.append(self._outfit.launch(member, formation))
            if made:
                self._launch(made, launches)
        except BaseException:
            for member in (*taken, *made):
                member.asked = True
                self.bury(member)
            for member in made:
                member.close_child_ends()
            self._leases.give_all_back(unused)
            raise
        finally:
            for gift in gifts.values():
                gift.close()
        return taken

    def start_spare(self, number: int) -> Member:
        """Begin to start a process that has no rank yet; *number* stands for one until it has.

        Raises:
            PhalanxError, OSError: it could not be equipped; nothing is left of it.
        """
        spec = self._spec
        labels = WorkerLabels(
            child=f"{spec.name}/standby", group=spec.name, rank=None, incarnation=-number
        )
        with contextlib.ExitStack() as made:
            member = self._outfit.equip(labels, number, 0, 0)
            made.callback(self.bury, member)
            made.callback(member.close_child_ends)
            member.spare = number
            self._launch([member], [self._outfit.launch_spare(member)])
            made.pop_all()
        return member

    def _launch(self, made: list[Member], launches: list[LaunchSpec]) -> None:
        """Have each of *made* given its process."""
        spec, links = self._spec, self._links
        deadline = time.monotonic() + spec.start_timeout
        gone = {launch.label: member for launch, member in zip(launches, made, strict=True)}

        def make(is_wanted: Callable[[], bool]) -> list[Process]:
            if links is not None:
                links.launch(made, deadline, is_wanted)
            complete = [
                replace(launch, fds={**launch.fds, **member.worker_fds()})
                for launch, member in zip(launches, made, strict=True)
            ]
            return self._runtime.launcher(spec.preload).launch_many(
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
                self.bury(member)
            return launch.error
        for member, process in zip(launch.members, launch.processes, strict=True):
            member.process = process
        for member, process in zip(launch.members, launch.processes, strict=True):
            member.labels = _with_pid(member.labels, process.pid)
            member.output.label(pid=process.pid)
            member.watch = self._runtime.hub.watch(
                member.control.fileno(), EPOLLIN, partial(self._hear, member)
            )
            self._pulses.enter(member.rank, member.incarnation, member.control.send)
            self._deadlines.start(member, self._spec.start_timeout)
            if process.status is not None:
                # Dead already. Where that was told, nobody could make anything of it yet.
                self._runtime.hub.post(partial(self._gone, member))
        return None

    def _assign(self, spare: Member, formation: Formation, rank: int, incarnation: int) -> None:
        """Make *spare* that rank."""
        assert spare.lease is not None
        self._pulses.leave(spare.rank, spare.incarnation)
        self._pulses.enter(rank, incarnation, spare.control.send)
        labels = self._outfit.labels(formation, rank, incarnation, spare.lease)
        epoch = formation.epoch
        spare.rank, spare.incarnation, spare.epoch = rank, incarnation, epoch
        assert spare.process is not None
        spare.labels = _with_pid(labels, spare.process.pid)
        spare.started_at = time.monotonic()
        spare.ready = False
        self._members[rank] = spare
        spare.output.label(spare.labels)
        payload = self._outfit.assignment(spare, formation)
        try:
            # Where it has just died its end is on the way to us, and is that rank's.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                packet = payload.packet(Kind.ASSIGN, epoch=epoch, call_id=0)
                send(spare.control, packet, payload.file)
        finally:
            payload.close()
        self._deadlines.start(spare, self._spec.start_timeout)

    def _give(self, member: Member) -> None:
        """Send *member* the state it is given back, which it looks for after `on_start`."""
        gift = member.gift
        if gift is None:
            return
        payload = Payload.in_file(gift.file, os.fstat(gift.file).st_size)
        packet = payload.packet(Kind.RESTORE, epoch=member.epoch, call_id=0)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # a spare that has died
            send(member.control, packet, gift.file)

    def reform(self, member: Member, formation: Formation) -> bytes:
        """Return the order for *member*, which is kept, to join *formation*; sees to deadlines."""
        epoch = formation.epoch
        member.failure = None  # of an epoch that is void
        member.epoch = epoch
        member.labels = replace(member.labels, epoch=epoch)
        member.output.label(member.labels)
        spec = self._spec
        self._deadlines.reform(member, leave=spec.leave_within, join=spec.start_timeout)
        return self._outfit.reform(member, formation)

    def bury(self, member: Member) -> None:
        """Give back what *member* holds; kills what is left of its process tree first."""
        if self._members.get(member.rank) is member:
            del self._members[member.rank]
        for timer in member.timers:
            timer.cancel()
        if member.watch is not None:
            member.watch.cancel()
        self._pulses.leave(member.rank, member.incarnation)
        deadline = time.monotonic() + (_LAST_TRY if member.abandoned else _BURIAL)
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
        self._outfit.close()
        if self._links is not None:
            self._links.close()

    # --- hearing ------------------------------------------------------------------------

    def _gone(self, member: Member) -> None:
        if member.process is None:
            return  # `land` sees it
        if member.abandoned:
            member.process.close()
        elif member.remote is not None:
            member.remote.process_gone()
        else:
            self._tell(ProcessGone(member.rank, member.incarnation))

    def _hear(self, member: Member, _events: int) -> None:
        """Pass on what *member* says; runs on the hub's thread."""
        frames, foreign, ended = read_control(member.control)
        if foreign:
            self._tell(RankSaidNothing(member.rank, member.incarnation, foreign))
        remote = member.remote
        for frame in frames:
            if frame.kind == Kind.PULSE:
                self._pulses.hear(member.rank, frame)
            elif remote is None or not remote.heard(frame):
                self._tell(RankSaid(member.rank, member.incarnation, frame))
        if ended and member.watch is not None:
            member.watch.cancel()
            if remote is not None:
                remote.ended()


def _with_pid(labels: WorkerLabels, pid: int) -> WorkerLabels:
    return replace(labels, pid=pid)
