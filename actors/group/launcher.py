"""Equips and launches worker processes.

What a rank is given on its way: labels, sockets, a place for its output, a seed, an environment.

Guarantees: environment, working directory and variables are those of the moment of the start; what
was opened for a member that could not be equipped is closed.

Left to others: its device (`Leases`) and its process (`Members`).

Launches: how members of a group come by their processes while its actor goes on hearing.

Guarantees: each launch is made on a thread of its own, which ends with it; what came of it is told
as one notice, in its turn among the others; a launch all of whose members have been asked to stop
meanwhile is given up within a moment. After `close` none is under way.

Left to others: what is launched, and taking it over (`Members`); what a failure means (`Forming`,
`Standby`).

Why a thread for each: a launch may have to wait for a zygote that imports torch, or is stopped, and
one for another rank, from a zygote or an interpreter of its own, need not wait behind it.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from phalanx.actors.host.host import Reform, Restoring, Saving, Seed, host_spare, host_worker
from phalanx.runtime import (
    Assignment,
    Boot,
    Kind,
    LaunchSpec,
    LockTable,
    Payload,
    SocketChannel,
    WorkerLabels,
    descriptors,
    encode,
    occupied,
    rendezvous_environment,
    usable_processors,
)
from phalanx.supervision import RuntimeFault

from .messages import Launched
from .worker import Member, control_pair

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from phalanx.actors.observe.hooks import GroupProbe
    from phalanx.actors.spec.options import ExecutorSpec
    from phalanx.runtime import Arena, Lease, Process, Runtime

    from .epoch import Formation
    from .messages import Notice

    Make: TypeAlias = Callable[[Callable[[], bool]], list[Process]]


THREAD = "phalanx-launch"
"""What the names of the threads begin with."""

_END = 30.0  # seconds for launches that nobody wants any more: a gateway may have to be ended


class Launch:
    """One launch, of all its members or of none.

    Attributes:
        members: Whom it is for; each waits for its process, and holds what that is started with.
        processes: Theirs, in their order, once they have been started.
        error: Why they could not be; None where they were.
    """

    def __init__(self, members: Sequence[Member], make: Make) -> None:
        self.members = tuple(members)
        self.processes: list[Process] = []
        self.error: BaseException | None = None
        self._make = make

    def is_wanted(self) -> bool:
        """Whether any of the members is still to get its process."""
        return not all(member.asked for member in self.members)

    def run(self) -> None:
        """Make it; never raises."""
        try:
            self.processes = self._make(self.is_wanted)
        except BaseException as error:  # noqa: BLE001  # it is told to whoever takes this over
            self.error = error


class Launches:
    """Those of one group. Used by its actor's thread alone."""

    def __init__(self, group: str, tell: Callable[[Notice], None]) -> None:
        self._name = f"{THREAD} {group}"
        self._tell = tell
        self._under_way: dict[Launch, threading.Thread] = {}

    def begin(self, members: Sequence[Member], make: Make) -> None:
        """Have *make* start the processes of *members*; what came of it is told as `Launched`.

        *make* gets what tells it whether they are still wanted.

        Raises:
            RuntimeFault: there is no thread for it.
        """
        launch = Launch(members, make)

        def run() -> None:
            with occupied:
                launch.run()
            self._tell(Launched(launch))

        thread = threading.Thread(target=run, name=self._name, daemon=True)
        self._under_way[launch] = thread
        try:
            thread.start()
        except RuntimeError as error:
            del self._under_way[launch]
            raise RuntimeFault(f"no thread to start processes from: {error}") from error

    def take(self, launch: Launch) -> bool:
        """Return whether *launch*, which is over, was not taken over yet; it is from now on."""
        thread = self._under_way.pop(launch, None)
        if thread is None:
            return False
        thread.join(_END)  # to have told of the launch was the last it did
        return True

    def close(self) -> list[Launch]:
        """Give up what is under way; return it once it has come to an end, to be taken over."""
        for launch in self._under_way:
            for member in launch.members:
                member.asked = True
        deadline = time.monotonic() + _END
        for thread in self._under_way.values():
            thread.join(max(0.0, deadline - time.monotonic()))
        return [launch for launch, thread in self._under_way.items() if not thread.is_alive()]


# A spare has no lease, so it sees no device; and it must be able to ask how many there are without
# CUDA's start, after which what is visible is fixed for the life of a process.
_BLIND = {"CUDA_VISIBLE_DEVICES": "", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


class Outfit:
    """Equips the ranks of one group.

    Args:
        arena: Where large buffers lie.
        probe: What looks on, where faults are injected.
    """

    def __init__(
        self,
        spec: ExecutorSpec,
        runtime: Runtime,
        arena: Arena,
        *,
        probe: GroupProbe | None,
    ) -> None:
        self._spec = spec
        self._scribe = runtime.scribe
        self._arena = arena
        self._probe = probe
        self._saving: Saving | None = None
        self._locks = LockTable.create()

    def save_from(self, base: int) -> None:
        """Have ranks that are started from now on number their snapshots from *base*."""
        self._saving = Saving(base=base, folder=self._spec.snapshots)

    def labels(
        self, formation: Formation, rank: int, incarnation: int, lease: Lease
    ) -> WorkerLabels:
        """Return how a rank that has *lease* is called everywhere."""
        place = formation.layout.coordinates(rank) if formation.coordinates else {}
        return WorkerLabels(
            child=f"{self._spec.name}/{rank}",
            group=self._spec.name,
            rank=rank,
            incarnation=incarnation,
            epoch=formation.epoch,
            coordinates=",".join(f"{name}={at}" for name, at in place.items()),
            device=str(lease),
        )

    def equip(self, labels: WorkerLabels, rank: int, incarnation: int, epoch: int) -> Member:
        """Return a member without a process."""
        with contextlib.ExitStack() as made:
            channel = SocketChannel.create(self._arena, epoch)
            made.callback(channel.close)
            control, control_end = control_pair(made)
            output = self._scribe.open_worker(labels)
            made.callback(output.close)
            control.setblocking(False)
            member = Member(
                rank=rank,
                incarnation=incarnation,
                epoch=epoch,
                labels=labels,
                channel=channel,
                control=control,
                control_end=control_end,
                output=output,
                lease=None,
                started_at=time.monotonic(),
            )
            made.pop_all()
        return member

    def launch(self, member: Member, formation: Formation) -> LaunchSpec:
        """Return what the process of *member* is started with, beside the way to it."""
        seed = self._seed(member, formation, self._spec.factory)
        boot = Boot(member.rank, member.incarnation, member.epoch, host_worker, pickle.dumps(seed))
        env = self._environment(member, formation)
        return self._launch_in(member, boot, env, self._title(member, formation))

    def launch_spare(self, spare: Member) -> LaunchSpec:
        """Return what the process of *spare* is started with, beside the way to it."""
        spec = self._spec
        boot = Boot(spare.rank, 0, 0, host_spare, spec.factory)
        env = {**threads_of_each(spec.world_size), **os.environ, **_BLIND, **spec.env}
        return self._launch_in(spare, boot, env, f"phalanx: {spec.name} standby")

    def assignment(self, spare: Member, formation: Formation) -> Payload:
        """Return what tells *spare* which rank it is from now on."""
        assignment = Assignment(
            rank=spare.rank,
            incarnation=spare.incarnation,
            epoch=spare.epoch,
            blob=pickle.dumps(self._seed(spare, formation, b"")),
            env=self._environment(spare, formation),
            cwd=_cwd(),
            title=self._title(spare, formation),
        )
        return Payload.of(encode(assignment, "the assignment"))

    def reform(self, member: Member, formation: Formation) -> bytes:
        """Return what tells *member*, which is kept, to join *formation*."""
        env: dict[str, str] = {}
        if formation.rendezvous is not None:
            size, rank = formation.layout.world_size, member.rank
            env = rendezvous_environment(formation.rendezvous, rank, rank, size)
        order = Reform(epoch=formation.epoch, rendezvous=formation.rendezvous, env=env)
        payload = Payload.of(encode(order, "the order"))
        return payload.packet(Kind.REFORM, epoch=formation.epoch, call_id=0)

    def _seed(self, member: Member, formation: Formation, factory: bytes) -> Seed:
        spec = self._spec
        layout = formation.layout
        rank = member.rank
        gift = member.gift
        restoring = None
        if gift is not None:
            restoring = Restoring(gift.spans, spread=gift.is_spread)
        assert member.lease is not None
        return Seed(
            factory=factory,
            keywords=spec.keywords[rank] if rank < len(spec.keywords) else spec.keywords[-1],
            labels=member.labels,
            rank=rank,
            local_rank=rank,
            world_size=layout.world_size,
            layout=layout,
            coordinates=layout.coordinates(rank) if member.labels.coordinates else {},
            devices=member.lease.devices,
            decider=spec.decider_blob,
            rendezvous=formation.rendezvous,
            trace=formation.trace,
            witness=self._probe.witness(rank, member.incarnation) if self._probe else b"",
            saving=self._saving,
            restoring=restoring,
        )

    def _environment(self, member: Member, formation: Formation) -> dict[str, str]:
        spec = self._spec
        rank = member.rank
        rendezvous = formation.rendezvous
        env = {**threads_of_each(formation.layout.world_size), **os.environ}
        if rendezvous is not None:
            env |= rendezvous_environment(rendezvous, rank, rank, formation.layout.world_size)
        if member.lease is not None:
            env |= member.lease.environment
        env |= spec.env
        if rank < len(spec.rank_env):
            env |= spec.rank_env[rank]
        return env

    def _title(self, member: Member, formation: Formation) -> str:
        where = f" {member.labels.coordinates}" if member.labels.coordinates else ""
        at = f"rank {member.rank}/{formation.layout.world_size}{where} #{member.incarnation}"
        return f"phalanx: {self._spec.name} {at}"

    def _launch_in(
        self,
        member: Member,
        boot: Boot,
        env: dict[str, str],
        title: str,
    ) -> LaunchSpec:
        spec = self._spec
        return LaunchSpec(
            entry="phalanx.runtime.worker.main:main",
            payload=pickle.dumps(boot),
            fds={"locks": self._locks, **member.output.child_fds()},
            label=f"{member.labels.child}#{member.labels.incarnation}",
            title=title,
            env=env,
            stdout=member.output.stdout,
            stderr=member.output.stderr,
            method="exec" if spec.launch == "exec" else "zygote",
        )

    def close(self) -> None:
        """Give back what the ranks shared."""
        descriptors.close(self._locks)


def _cwd() -> str | None:
    try:
        return str(Path.cwd())
    except FileNotFoundError:
        return None  # the driver's own was removed; the process stays where it is


def threads_of_each(world_size: int) -> dict[str, str]:
    """Return how many threads each of *world_size* ranks computes with: its share of processors.

    Left to themselves all of them would start one for each processor, of the machine and not of the
    quota of a container.
    """
    return {"OMP_NUM_THREADS": str(max(1, int(usable_processors() // world_size)))}
