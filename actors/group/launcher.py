"""How a worker is equipped and its process made, while the group's actor goes on.

- Environment, working directory and variables are those of the moment of the start; what was opened
  for a worker that could not be equipped is closed.
- Each launch is made on a thread of its own, since it may wait for a zygote that imports torch, or
  is stopped; one message tells the actor that it is over.
- A launch whose workers have all been asked to stop is given up within a moment. After `close` none
  is under way.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from phalanx.actors.host.host import Reform, Restoring, Saving, Seed, host_spare, host_worker
from phalanx.runtime import (
    Assignment,
    Boot,
    Kind,
    LaunchSpec,
    Payload,
    SocketChannel,
    WorkerLabels,
    create_lock_file,
    descriptors,
    encode,
    occupied,
    rendezvous_environment,
    usable_processors,
)
from phalanx.supervision import RuntimeFault

from .messages import Launched
from .worker import Worker, control_pair

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from phalanx.actors.observe.hooks import GroupProbe
    from phalanx.actors.spec.layout import Layout
    from phalanx.actors.spec.options import ExecutorSpec
    from phalanx.runtime import Arena, Lease, Process, Rendezvous, Runtime

    from .messages import Message

    Make: TypeAlias = Callable[[Callable[[], bool]], list[Process]]


THREAD = "phalanx-launch"
"""What the names of the threads begin with."""

_END = 30.0  # seconds for launches that nobody wants any more: a gateway may have to be ended


@dataclass(frozen=True, slots=True)
class EpochSpec:
    """What the ranks of one epoch have in common; ranks of two epochs never share one.

    Attributes:
        coordinates: Whether a layout was asked for, so that places in it are shown.
        trace: The span that the start of the ranks belongs to; empty for none.
    """

    number: int
    layout: Layout
    coordinates: bool
    rendezvous: Rendezvous | None
    trace: Mapping[str, str]


Join: TypeAlias = "Callable[[float], bool]"
"""Waits for what `Spawn` has begun, so many seconds at most; returns whether it has ended."""
Spawn: TypeAlias = "Callable[[Callable[[], None], str], Join]"
"""Begins to run a function beside the caller, under a name."""


def spawn_thread(run: Callable[[], None], name: str) -> Join:
    """Run *run* on a daemon thread; a `Spawn`."""
    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()

    def join(timeout: float) -> bool:
        thread.join(timeout)
        return not thread.is_alive()

    return join


class Launch:
    """One launch, of all its members or of none.

    Attributes:
        members: Whom it is for; each waits for its process, and holds what that is started with.
        processes: Theirs, in their order, once they have been started.
        error: Why they could not be; None where they were.
    """

    def __init__(self, members: Sequence[Worker], make: Make) -> None:
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

    def __init__(self, group: str, tell: Callable[[Message], None], spawn: Spawn) -> None:
        self._name = f"{THREAD} {group}"
        self._tell = tell
        self._spawn = spawn
        self._under_way: dict[Launch, Join] = {}

    def begin(self, members: Sequence[Worker], make: Make) -> None:
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

        try:
            self._under_way[launch] = self._spawn(run, self._name)
        except RuntimeError as error:
            raise RuntimeFault(f"no thread to start processes from: {error}") from error

    def take(self, launch: Launch) -> bool:
        """Return whether *launch*, which is over, was not taken over yet; it is from now on."""
        join = self._under_way.pop(launch, None)
        if join is None:
            return False
        join(_END)  # the message was the last thing that its thread did
        return True

    def close(self) -> list[Launch]:
        """Give up what is under way; return it once it has come to an end, to be taken over."""
        for launch in self._under_way:
            for member in launch.members:
                member.asked = True
        deadline = time.monotonic() + _END
        return [
            launch
            for launch, join in self._under_way.items()
            if join(max(0.0, deadline - time.monotonic()))
        ]


# A spare has no lease, so it sees no device; and it must be able to ask how many there are without
# CUDA's start, after which what is visible is fixed for the life of a process.
_BLIND = {"CUDA_VISIBLE_DEVICES": "", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


class WorkerBuilder:
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
        clock: Callable[[], float],
        channel: Callable[[Arena, int], SocketChannel],
    ) -> None:
        self._spec = spec
        self._clock = clock
        self._make_channel = channel
        self._collector = runtime.collector
        self._arena = arena
        self._probe = probe
        self._saving: Saving | None = None
        self._locks = descriptors.own(create_lock_file())

    def save_from(self, base: int) -> None:
        """Have ranks that are started from now on number their snapshots from *base*."""
        self._saving = Saving(base=base, folder=self._spec.snapshots)

    def labels(self, epoch: EpochSpec, rank: int, incarnation: int, lease: Lease) -> WorkerLabels:
        """Return how a rank that has *lease* is called everywhere."""
        place = epoch.layout.coordinates(rank) if epoch.coordinates else {}
        return WorkerLabels(
            child=f"{self._spec.name}/{rank}",
            group=self._spec.name,
            rank=rank,
            incarnation=incarnation,
            epoch=epoch.number,
            coordinates=",".join(f"{name}={at}" for name, at in place.items()),
            device=str(lease),
        )

    def equip(self, labels: WorkerLabels, rank: int, incarnation: int, epoch: int) -> Worker:
        """Return a member without a process."""
        with contextlib.ExitStack() as made:
            channel = self._make_channel(self._arena, epoch)
            made.callback(channel.close)
            control, control_end = control_pair(made)
            output = self._collector.open_worker(labels)
            made.callback(output.close)
            control.setblocking(False)
            member = Worker(
                rank=rank,
                incarnation=incarnation,
                epoch=epoch,
                labels=labels,
                channel=channel,
                control=control,
                control_end=control_end,
                output=output,
                lease=None,
                started_at=self._clock(),
            )
            made.pop_all()
        return member

    def launch(self, member: Worker, epoch: EpochSpec) -> LaunchSpec:
        """Return what the process of *member* is started with, beside the way to it."""
        seed = self._seed(member, epoch, self._spec.factory)
        boot = Boot(member.rank, member.incarnation, member.epoch, host_worker, pickle.dumps(seed))
        env = self._environment(member, epoch)
        return self._launch_in(member, boot, env, self._title(member, epoch))

    def launch_spare(self, spare: Worker) -> LaunchSpec:
        """Return what the process of *spare* is started with, beside the way to it."""
        spec = self._spec
        boot = Boot(spare.rank, 0, 0, host_spare, spec.factory)
        env = {**threads_of_each(spec.world_size), **os.environ, **_BLIND, **spec.launch.env}
        return self._launch_in(spare, boot, env, f"phalanx: {spec.name} standby")

    def assignment(self, spare: Worker, epoch: EpochSpec) -> Payload:
        """Return what tells *spare* which rank it is from now on."""
        assignment = Assignment(
            rank=spare.rank,
            incarnation=spare.incarnation,
            epoch=spare.epoch,
            blob=pickle.dumps(self._seed(spare, epoch, b"")),
            env=self._environment(spare, epoch),
            cwd=_cwd(),
            title=self._title(spare, epoch),
        )
        return Payload.of(encode(assignment, "the assignment"))

    def reform(self, member: Worker, epoch: EpochSpec) -> bytes:
        """Return what tells *member*, which is kept, to join *epoch*."""
        env: dict[str, str] = {}
        if epoch.rendezvous is not None:
            size, rank = epoch.layout.world_size, member.rank
            env = rendezvous_environment(epoch.rendezvous, rank, rank, size)
        order = Reform(epoch=epoch.number, rendezvous=epoch.rendezvous, env=env)
        payload = Payload.of(encode(order, "the order"))
        return payload.packet(Kind.REFORM, epoch=epoch.number, call_id=0)

    def _seed(self, member: Worker, epoch: EpochSpec, factory: bytes) -> Seed:
        spec = self._spec
        layout = epoch.layout
        rank = member.rank
        restore_point = member.restore_point
        restoring = None
        if restore_point is not None:
            restoring = Restoring(restore_point.spans, spread=restore_point.is_spread)
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
            decider=spec.pickled_decider,
            rendezvous=epoch.rendezvous,
            trace=epoch.trace,
            witness=self._probe.witness(rank, member.incarnation) if self._probe else b"",
            saving=self._saving,
            restoring=restoring,
        )

    def _environment(self, member: Worker, epoch: EpochSpec) -> dict[str, str]:
        spec = self._spec
        rank = member.rank
        rendezvous = epoch.rendezvous
        env = {**threads_of_each(epoch.layout.world_size), **os.environ}
        if rendezvous is not None:
            env |= rendezvous_environment(rendezvous, rank, rank, epoch.layout.world_size)
        if member.lease is not None:
            env |= member.lease.environment
        env |= spec.launch.env
        if rank < len(spec.launch.rank_env):
            env |= spec.launch.rank_env[rank]
        return env

    def _title(self, member: Worker, epoch: EpochSpec) -> str:
        where = f" {member.labels.coordinates}" if member.labels.coordinates else ""
        at = f"rank {member.rank}/{epoch.layout.world_size}{where} #{member.incarnation}"
        return f"phalanx: {self._spec.name} {at}"

    def _launch_in(
        self,
        member: Worker,
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
            method="exec" if spec.launch.method == "exec" else "zygote",
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
