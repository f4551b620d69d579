"""`WorkerBuilder`: makes the launch spec of a worker: sockets, output, config, environment, title.

Environment, working directory and variables are those of the moment of the start. If a spec cannot
be completed, the descriptors that were opened for it are closed.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from phalanx.actors.spec.layout import Layout
from phalanx.actors.worker_side.user_object import (
    Reform,
    WorkerConfig,
    host_spare,
    host_worker,
)
from phalanx.runtime import (
    Assignment,
    Boot,
    Kind,
    LaunchSpec,
    Payload,
    WorkerLabels,
    create_lock_file,
    descriptors,
    encode,
    rendezvous_environment,
    usable_processors,
)
from phalanx.supervision import RuntimeFault

from .worker import Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from phalanx.runtime import Lease, Place, Rendezvous

    from .handle import Group


@dataclass(frozen=True, slots=True)
class EpochSpec:
    """The values that the ranks of one epoch share; ranks of two epochs never share one.

    Attributes:
        trace: The span that the start of the ranks belongs to; empty for none.
    """

    number: int
    layout: Layout
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


# A spare has no lease, so it sees no device; and it must be able to ask how many there are without
# CUDA's start, after which what is visible is fixed for the life of a process.
_NO_DEVICES = {"CUDA_VISIBLE_DEVICES": "", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
# Variables of torch that are 0 in a rank that may be kept, and their older names.
_SURVIVOR = (
    # By default torch ends a process whose NCCL group has failed. Nor may torch abort the group by
    # itself ("2"): results would be undefined before the worker has noted it.
    ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"),
    # Torch's record of collective operations. To print the Python stack of one that has failed,
    # torch imports its compiler, 4 to 5 seconds in which the survivor cannot join the next group.
    ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"),
)


class WorkerBuilder:
    """Equips the workers of *group*.

    Args:
        place_of: Returns where a rank is; None if all are on this machine.
    """

    def __init__(self, group: Group, place_of: Callable[[int], Place] | None = None) -> None:
        self._group = group
        self._spec = group.spec
        self._place_of = place_of
        self._locks = descriptors.own(create_lock_file())
        # A copy: a process that is executed has another descriptor 0 at first.
        inherits = self._spec.launch.stdio == "inherit"
        with descriptors.closed_on_error(self._locks):
            self._stdin = {"stdin": descriptors.own(os.dup(0))} if inherits else {}

    def labels(self, epoch: EpochSpec, rank: int, incarnation: int, lease: Lease) -> WorkerLabels:
        """Return how a rank that has *lease* is called everywhere."""
        # Without a layout of the user's there is no place to show.
        is_plain = self._spec.is_plain and epoch.layout == Layout(tensor=epoch.layout.world_size)
        place = {} if is_plain else epoch.layout.coordinates(rank)
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
        """Return a worker without a process."""
        group = self._group
        with contextlib.ExitStack() as made:
            channel = group.channel(group.plane.arena, epoch)
            made.callback(channel.close)
            control, control_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            descriptors.own(control)
            made.callback(descriptors.close, control)
            made.callback(control_end.close)
            output = group.runtime.collector.open_worker(labels)
            made.callback(output.close)
            control.setblocking(False)
            worker = Worker(
                rank=rank,
                incarnation=incarnation,
                epoch=epoch,
                labels=labels,
                channel=channel,
                control=control,
                control_end=control_end,
                output=output,
                started_at=group.clock(),
            )
            made.pop_all()
        return worker

    def launch(self, worker: Worker, epoch: EpochSpec) -> LaunchSpec:
        """Return what the process of *worker* is started with."""
        config = pickle.dumps(self._config(worker, epoch, self._spec.factory))
        boot = Boot(worker.rank, worker.incarnation, worker.epoch, host_worker, config)
        env = self._environment(worker, epoch)
        return self._launch_in(worker, boot, env, self._title(worker, epoch))

    def launch_spare(self, spare: Worker) -> LaunchSpec:
        """Return what the process of *spare* is started with."""
        spec = self._spec
        boot = Boot(spare.rank, 0, 0, host_spare, spec.factory)
        env = {**threads_of_each(spec.world_size), **os.environ, **_NO_DEVICES, **spec.launch.env}
        return self._launch_in(spare, boot, env, f"phalanx: {spec.name} standby")

    def assignment(self, spare: Worker, epoch: EpochSpec) -> Payload:
        """Return what tells *spare* which rank it is from now on."""
        assignment = Assignment(
            rank=spare.rank,
            incarnation=spare.incarnation,
            epoch=spare.epoch,
            blob=pickle.dumps(self._config(spare, epoch, b"")),
            env=self._environment(spare, epoch),
            cwd=_cwd(),
            title=self._title(spare, epoch),
        )
        return Payload.of(encode(assignment, "the assignment"))

    def reform(self, worker: Worker, epoch: EpochSpec) -> bytes:
        """Return what tells *worker*, which is kept, to join *epoch*."""
        env: dict[str, str] = {}
        if epoch.rendezvous is not None:
            own = self._spec.launch.env_of(worker.rank)  # goes first, as at its start
            env = self._meeting(worker.rank, epoch.rendezvous, epoch.layout.world_size)
            env = {name: own.get(name, value) for name, value in env.items()}
        order = Reform(epoch=epoch.number, rendezvous=epoch.rendezvous, env=env)
        payload = Payload.of(encode(order, "the order"))
        return payload.packet(Kind.REFORM, epoch=epoch.number, call_id=0)

    def _config(self, worker: Worker, epoch: EpochSpec, factory: bytes) -> WorkerConfig:
        spec, rank = self._spec, worker.rank
        probe, checkpoints = self._group.probe, self._group.checkpoints
        restore_point = worker.restore_point
        place = None if self._place_of is None else self._place_of(rank)
        assert worker.lease is not None
        return WorkerConfig(
            factory=factory,
            keywords=spec.keywords[rank] if rank < len(spec.keywords) else spec.keywords[-1],
            labels=worker.labels,
            layout=epoch.layout,
            devices=worker.lease.devices,
            decider=spec.pickled_decider,
            rendezvous=epoch.rendezvous,
            trace=epoch.trace,
            probe=b"" if probe is None else probe.worker_probe(rank, worker.incarnation),
            saving=None if checkpoints is None else (checkpoints.base, checkpoints.store.where),
            restoring=() if restore_point is None else restore_point.spans,
            reshards=restore_point is not None and restore_point.is_spread,
            local_rank=rank if place is None else place.local_rank,
            machines=1 if place is None else place.nodes,
        )

    def _environment(self, worker: Worker, epoch: EpochSpec) -> dict[str, str]:
        spec, rank, rendezvous = self._spec, worker.rank, epoch.rendezvous
        env: dict[str, str] = {}  # on a node it is set over the node's own
        if self._place_of is None:
            env |= {**threads_of_each(epoch.layout.world_size), **os.environ}
        if rendezvous is not None:
            env |= self._meeting(rank, rendezvous, epoch.layout.world_size)
        if worker.lease is not None:
            env |= worker.lease.environment
        env |= spec.launch.env_of(rank)
        if spec.policy.survivors == "keep":
            for names in _SURVIVOR:
                if not any(name in env for name in names):
                    env[names[0]] = "0"
        return env

    def _meeting(self, rank: int, rendezvous: Rendezvous, size: int) -> dict[str, str]:
        place = None if self._place_of is None else self._place_of(rank)
        return rendezvous_environment(rendezvous, rank, size, place)

    def _title(self, worker: Worker, epoch: EpochSpec) -> str:
        where = f" {worker.labels.coordinates}" if worker.labels.coordinates else ""
        at = f"rank {worker.rank}/{epoch.layout.world_size}{where} #{worker.incarnation}"
        return f"phalanx: {self._spec.name} {at}"

    def _launch_in(self, worker: Worker, boot: Boot, env: dict[str, str], title: str) -> LaunchSpec:
        launch = self._spec.launch
        inherits = launch.stdio == "inherit"
        # A rank elsewhere has a link's ends in their place.
        way = {} if self._spec.is_remote else worker.worker_fds()
        return LaunchSpec(
            entry="phalanx.runtime.worker.call_loop:main",
            payload=pickle.dumps(boot),
            fds={"locks": self._locks, **self._stdin, **worker.output.child_fds(), **way},
            preload=launch.preload,
            asked_env=launch.env_of(worker.rank),
            label=f"{worker.labels.child}#{worker.labels.incarnation}",
            title=title,
            env=env,
            stdout=None if inherits else worker.output.stdout,
            stderr=None if inherits else worker.output.stderr,
            method="exec" if launch.method == "exec" else "zygote",
        )

    def close(self) -> None:
        """Give back what the ranks shared."""
        for fd in (self._locks, *self._stdin.values()):
            descriptors.close(fd)


def _cwd() -> str | None:
    try:
        return str(Path.cwd())
    except FileNotFoundError:
        return None  # the driver's own was removed; the process stays where it is


def too_few_descriptors(error: BaseException) -> RuntimeFault:
    """Return what *error*, a want of descriptors, is for a user."""
    fault = RuntimeFault(
        f"no descriptor was free ({error}); close files, or raise the hard limit (`ulimit -Hn`)"
    )
    fault.__cause__ = error
    return fault


def threads_of_each(world_size: int) -> dict[str, str]:
    """Return how many threads each of *world_size* ranks computes with: its share of processors.

    Left to themselves all of them would start one for each processor, of the machine and not of the
    quota of a container.
    """
    return {"OMP_NUM_THREADS": str(max(1, int(usable_processors() // world_size)))}
