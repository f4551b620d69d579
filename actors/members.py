"""The processes of one rank group: started together, stopped together, buried one by one.

Guarantees: everything a rank holds in the driver (sockets, pages, output, lease, process) is made
in `start`, belongs to one incarnation, and is given back in `bury`, also where the start failed
half-way; a rank is buried only when its whole process tree is gone.

Left to others: what to start and stop (`decide_ranks`), what became of calls (`plane`).
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import time
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from select import EPOLLIN
from typing import TYPE_CHECKING, Any

from phalanx.runtime import (
    STACKS,
    Assignment,
    Boot,
    Frame,
    Kind,
    LaunchSpec,
    LockTable,
    Payload,
    SocketChannel,
    Vitals,
    WorkerLabels,
    describe_threads,
    encode,
    ledger,
    read_stacks,
    receive,
    rendezvous_environment,
    send,
    size_of,
)

from .hosting import Reform, Restoring, Saving, Seed, host_spare, host_worker
from .notices import (
    Overdue,
    ProcessGone,
    RankSaid,
    RankSaidNothing,
    ReformOverdue,
    StopOverdue,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from phalanx.runtime import (
        Arena,
        Lease,
        Process,
        RemoteFailure,
        Rendezvous,
        Runtime,
        Timer,
        Watch,
        WorkerOutput,
    )

    from .gifts import Gift
    from .layout import Layout
    from .leases import Leases
    from .links import Links, Remote
    from .notices import Notice
    from .probe import GroupProbe
    from .pulses import Pulses
    from .spec import ExecutorSpec

_BURIAL = 10.0  # seconds for a dead rank's tree and device; generous: 100 ms per GiB it held
_DOUBT = 0.5  # seconds for the news of a death that made a kept rank's joining fail
_UNDEAD = 10.0  # seconds from SIGKILL until a process that does not end is looked at
_LONGEST_END = 120.0  # seconds that one may take to end: 100 ms for each GiB it held
_LAST_TRY = 0.5  # seconds for the tree of one that was given up
_EXAMINE = 1.0  # seconds to write its stacks before it is killed; it takes milliseconds
# A spare has no lease, so it sees no device; and it must be able to ask how many there are without
# CUDA's start, after which what is visible is fixed for the life of a process.
_BLIND = {"CUDA_VISIBLE_DEVICES": "", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
_LAST_LINES = 0.1  # seconds to have a dead rank's last lines read before its report is cut


@dataclass(slots=True)
class Member:
    """One incarnation of one rank, as the driver holds it.

    Attributes:
        spare: Its number among the spares, below 0, where it is or was one; then that is also its
            rank until it takes one.
        asked: A stop was asked for, so its exit is no failure.
        hung: Why it is being killed for hanging; empty otherwise.
        broken: What happened to its device, or how it failed to be re-formed, for which it is
            being killed; empty otherwise.
        killed_at: When it was first sent SIGKILL by us; 0.0 for never.
        abandoned: It withstood that, and is not waited for any more.
        left: The last epoch for which it has left the process group of the one before.
        gift: The state it is given back; None where it begins anew.
        restoring: Whether it has got as far as restoring that.
        threads: Its threads as the kernel saw them when it was found hanging.
        words_end: Where its stacks begin, behind its last words.
        failure: The exception of its start, or the one that ended it, once it has told.
        remote: Its link, where it is elsewhere.
    """

    rank: int
    incarnation: int
    epoch: int
    labels: WorkerLabels
    channel: SocketChannel
    control: socket.socket
    control_end: socket.socket
    output: WorkerOutput
    lease: Lease | None
    started_at: float
    spare: int = 0
    process: Process | None = None
    watch: Watch | None = None
    seated: bool = False
    ready: bool = False
    asked: bool = False
    hung: str = ""
    broken: str = ""
    killed_at: float = 0.0
    abandoned: bool = False
    left: int = 0
    gift: Gift | None = None
    restoring: bool = False
    threads: str = ""
    words_end: int | None = None
    failure: RemoteFailure | None = None
    remote: Remote | None = None
    timers: list[Timer] = field(default_factory=list["Timer"])

    def worker_fds(self) -> dict[str, int]:
        """Return what the worker inherits of the way to it, by name."""
        if self.remote is not None:
            return self.remote.outpost.worker_fds()
        return {"control": self.control_end.fileno(), **self.channel.child_fds()}

    def close_child_ends(self) -> None:
        """Let go of what only the process uses, which has been started or never will be."""
        self.control_end.close()
        self.channel.close_child_ends()
        self.output.close_child_ends()
        if self.remote is not None:
            self.remote.outpost.close_ends()


@dataclass(frozen=True, slots=True)
class Formation:
    """What the ranks of one epoch have in common.

    Attributes:
        coordinates: Whether a layout was asked for, so that places in it are shown.
        trace: The span that the start of the ranks belongs to; empty for none.
    """

    epoch: int
    layout: Layout
    coordinates: bool
    rendezvous: Rendezvous | None
    trace: Mapping[str, str]


class Members:
    """Starts and stops the ranks of one group."""

    def __init__(
        self,
        spec: ExecutorSpec,
        runtime: Runtime,
        leases: Leases,
        tell: Callable[[Notice], None],
        arena: Arena,
        *,
        probe: GroupProbe | None = None,
        links: Links | None,
        pulses: Pulses,
    ) -> None:
        self._spec = spec
        self._saving: Saving | None = None
        self._runtime = runtime
        self._leases = leases
        self._tell = tell
        self._arena = arena
        self._probe = probe
        self._links = links
        self._pulses = pulses
        self._members: dict[int, Member] = {}
        self._locks = LockTable.create()
        self.name = spec.name

    def save_from(self, base: int) -> None:
        """Have ranks that are started from now on number their snapshots from *base*."""
        self._saving = Saving(base=base, folder=self._spec.snapshots)

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
        """Start these (rank, incarnation) together; return them once all have a process.

        Spares come first: they have theirs already. Each rank's lease is its process's from here
        on, or given back; so is each of *gifts*, the states that ranks are given back.

        Raises:
            PhalanxError, OSError: one could not be started; then none of them is left.
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
                labels = self._labels(formation, rank, incarnation, unused[rank])
                member = self._equip(labels, rank, incarnation, formation.epoch)
                member.lease = unused.pop(rank)
                made.append(member)
                self._members[rank] = member
                member.gift = gifts.get(rank)
                self._give(member)
                launches.append(self._launch_spec(member, formation))
            if made:
                self._launch(made, launches)
        except BaseException:
            for member in (*taken, *made):
                member.asked = True
                self.bury(member)
            self._leases.give_all_back(unused)
            raise
        finally:
            for member in made:
                member.close_child_ends()
            for gift in gifts.values():
                gift.close()
        return [*taken, *made]

    def start_spare(self, number: int) -> Member:
        """Start a process that has no rank yet; *number* stands for one until it has.

        Raises:
            PhalanxError, OSError: it could not be started; nothing is left of it.
        """
        spec = self._spec
        labels = WorkerLabels(
            child=f"{spec.name}/standby", group=spec.name, rank=None, incarnation=-number
        )
        with contextlib.ExitStack() as made:
            member = self._equip(labels, number, 0, 0)
            made.callback(self.bury, member)
            made.callback(member.close_child_ends)
            member.spare = number
            boot = Boot(number, 0, 0, host_spare, spec.factory)
            env = {"OMP_NUM_THREADS": "1", **os.environ, **_BLIND, **spec.env}
            launch = self._launch_in(member, boot, env, f"phalanx: {spec.name} standby")
            self._launch([member], [launch])
            made.pop_all()
        member.close_child_ends()
        return member

    def _launch(self, made: list[Member], launches: list[LaunchSpec]) -> None:
        """Give each of *made* its process."""
        spec = self._spec
        deadline = time.monotonic() + spec.start_timeout
        if self._links is not None:
            self._links.launch(made, deadline)
        gone = {launch.label: member for launch, member in zip(launches, made, strict=True)}
        processes = self._runtime.launcher(spec.preload).launch_many(
            launches,
            on_exit=lambda process: self._gone(gone[process.label]),
            deadline=deadline,
        )
        for member, process in zip(made, processes, strict=True):
            member.process = process
            member.labels = _with_pid(member.labels, process.pid)
            member.output.label(pid=process.pid)
            member.watch = self._runtime.hub.watch(
                member.control.fileno(), EPOLLIN, partial(self._hear, member)
            )
            self._pulses.enter(member.rank, member.incarnation, member.control.send)
            overdue = Overdue(member.rank, member.incarnation, "start")
            self._after(member, spec.start_timeout, overdue)

    def _assign(self, spare: Member, formation: Formation, rank: int, incarnation: int) -> None:
        """Make *spare* that rank."""
        assert spare.lease is not None
        self._pulses.leave(spare.rank, spare.incarnation)
        self._pulses.enter(rank, incarnation, spare.control.send)
        labels = self._labels(formation, rank, incarnation, spare.lease)
        epoch = formation.epoch
        spare.rank, spare.incarnation, spare.epoch = rank, incarnation, epoch
        assert spare.process is not None
        spare.labels = _with_pid(labels, spare.process.pid)
        spare.started_at = time.monotonic()
        spare.ready = False
        self._members[rank] = spare
        spare.output.label(spare.labels)
        seed = self._seed(spare, formation, b"")
        assignment = Assignment(
            rank=rank,
            incarnation=incarnation,
            epoch=epoch,
            blob=pickle.dumps(seed),
            env=self._environment(spare, formation),
            cwd=_cwd(),
            title=self._title(spare, formation),
        )
        payload = Payload.of(encode(assignment, "the assignment"))
        try:
            # Where it has just died its end is on the way to us, and is that rank's.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                packet = payload.packet(Kind.ASSIGN, epoch=epoch, call_id=0)
                send(spare.control, packet, payload.file)
        finally:
            payload.close()
        self._after(spare, self._spec.start_timeout, Overdue(rank, incarnation, "start"))

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
        env: dict[str, str] = {}
        if formation.rendezvous is not None:
            size, rank = formation.layout.world_size, member.rank
            env = rendezvous_environment(formation.rendezvous, rank, rank, size)
        order = Reform(epoch=epoch, rendezvous=formation.rendezvous, env=env)
        late = partial(ReformOverdue, member.rank, member.incarnation, epoch)
        self._after(member, self._spec.leave_within, late("leave"))
        self._after(member, self._spec.start_timeout, late("join"))
        payload = Payload.of(encode(order, "the order"))
        return payload.packet(Kind.REFORM, epoch=epoch, call_id=0)

    def doubt_reform(self, member: Member) -> None:
        """Have it told soon that *member* could not join, unless another epoch explains that."""
        failed = ReformOverdue(member.rank, member.incarnation, member.epoch, "failed")
        self._after(member, _DOUBT, failed)

    def ask_to_stop(self, member: Member, *, hurry: bool) -> None:
        """Begin to stop *member*; what follows comes as notices."""
        if member.asked or member.process is None:
            return
        member.asked = True
        stop = self._spec.stop
        if hurry:
            if stop.hurry > 0:
                member.process.send_signal(signal.SIGTERM)
                self._stage(member, "kill", stop.hurry)
            else:
                self.kill(member)
        else:
            self._stage(member, "terminate", stop.ask)

    def escalate(self, member: Member, notice: StopOverdue) -> None:
        """Go one stage further with a member that has not stopped."""
        if member.process is None:
            return
        if notice.stage == "terminate":
            member.process.send_signal(signal.SIGTERM)
            # A stopped process takes no SIGTERM; SIGCONT lets it.
            member.process.send_signal(signal.SIGCONT)
            self._stage(member, "kill", self._spec.stop.terminate)
        else:
            self.kill(member)

    def kill(self, member: Member) -> None:
        """Kill *member* now; its exit is told like any other."""
        if member.process is not None and member.process.send_signal(signal.SIGKILL):
            if not member.killed_at:
                member.killed_at = time.monotonic()
            self._stage(member, "abandon", _UNDEAD)

    def abandon(self, member: Member) -> str:
        """Give *member* up, which was killed and does not end; return how that looks.

        Empty where it is too early for that: a process that has begun to end gives back its memory,
        which takes its time.
        """
        process = member.process
        if process is None or process.status is not None:
            return ""
        vitals = Vitals.of(process.pid)
        took = time.monotonic() - member.killed_at
        if vitals.is_ending and took < _LONGEST_END:
            self._stage(member, "abandon", _UNDEAD)
            return ""
        member.abandoned = True
        place = f" in {vitals.wait}" if vitals.wait else ""
        state = f"state {vitals.state or 'Z'}{place}"
        return (
            f"it withstood SIGKILL for {took:.0f} s ({state}) and is left behind as {process.pid}"
        )

    def examine(self, member: Member, why: str, seen: str = "") -> None:
        """End *member*, which hangs, and have it write the stacks of its threads as it goes.

        *seen* is what it was found doing.
        """
        process = member.process
        if process is None or member.hung:
            return
        member.hung = f"{why}; {seen}" if seen else why
        member.threads = describe_threads(process.pid)
        member.words_end = size_of(member.output.faults)
        process.send_signal(STACKS)
        if process.is_stopped():
            # Only a running process handles a signal; this one takes it before anything else.
            process.send_signal(signal.SIGCONT)
        self._stage(member, "kill", _EXAMINE)

    def stacks(self, member: Member) -> str:
        """Return what `examine` brought to light."""
        if member.words_end is None:
            return ""
        stacks = read_stacks(member.output.faults, member.words_end)
        return f"{member.threads}\n\n{stacks}".strip()

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
        _shut(member.control)
        if not member.seated:
            member.channel.close()
        member.output.close()

    def close(self) -> None:
        """Give back what the ranks shared; all of them are buried."""
        ledger.close(self._locks)
        if self._links is not None:
            self._links.close()

    def last_lines(self, member: Member) -> Any:
        """Return what *member* wrote last, once that has been read."""
        with contextlib.suppress(OSError):
            member.output.drain(time.monotonic() + _LAST_LINES)
        tail = member.output.tail()
        if member.words_end is not None:
            words = tail.last_words.encode()[: member.words_end].decode("utf-8", "replace")
            tail = replace(tail, last_words=words)
        return tail

    # --- starting -----------------------------------------------------------------------

    def _labels(
        self, formation: Formation, rank: int, incarnation: int, lease: Lease
    ) -> WorkerLabels:
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

    def _equip(self, labels: WorkerLabels, rank: int, incarnation: int, epoch: int) -> Member:
        """Return a member without a process."""
        with contextlib.ExitStack() as made:
            channel = SocketChannel.create(self._arena, epoch)
            made.callback(channel.close)
            control, control_end = _pair(made)
            output = self._runtime.scribe.open_worker(labels)
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
            if self._links is not None:
                self._links.open()
                self._links.equip(member)
            made.pop_all()
        return member

    def _launch_spec(self, member: Member, formation: Formation) -> LaunchSpec:
        seed = self._seed(member, formation, self._spec.factory)
        boot = Boot(member.rank, member.incarnation, member.epoch, host_worker, pickle.dumps(seed))
        env = self._environment(member, formation)
        return self._launch_in(member, boot, env, self._title(member, formation))

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
        env = {"OMP_NUM_THREADS": "1", **os.environ}
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
            entry="phalanx.runtime.worker_main:main",
            payload=pickle.dumps(boot),
            fds={
                "locks": self._locks,
                **member.worker_fds(),
                **member.output.child_fds(),
            },
            label=f"{member.labels.child}#{member.labels.incarnation}",
            title=title,
            env=env,
            stdout=member.output.stdout,
            stderr=member.output.stderr,
            method="exec" if spec.launch == "exec" else "zygote",
        )

    # --- hearing ------------------------------------------------------------------------

    def _gone(self, member: Member) -> None:
        if member.abandoned:
            assert member.process is not None
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

    def _after(self, member: Member, seconds: float, notice: Notice) -> None:
        at = time.monotonic() + seconds
        member.timers.append(self._runtime.hub.call_at(at, partial(self._tell, notice)))

    def _stage(self, member: Member, stage: Any, seconds: float) -> None:
        self._after(member, seconds, StopOverdue(member.rank, member.incarnation, stage))

    def expect_exit(self, member: Member, seconds: float) -> None:
        """Have it told if *member*, whose stream has ended, is still alive after *seconds*."""
        self._after(member, seconds, Overdue(member.rank, member.incarnation, "stream"))


def read_control(control: socket.socket) -> tuple[list[Frame], int, bool]:
    """Return what has arrived on *control*, how many packets were none, and whether it ended."""
    frames: list[Frame] = []
    foreign = 0
    while True:
        try:
            frame = receive(control)
        except BlockingIOError:
            return frames, foreign, False
        except ConnectionResetError:
            continue
        except OSError:
            return frames, foreign, True
        if isinstance(frame, Frame):
            frames.append(frame)
        elif frame is None:
            foreign += 1
        else:
            return frames, foreign, True


def _cwd() -> str | None:
    try:
        return str(Path.cwd())
    except FileNotFoundError:
        return None  # the driver's own was removed; the process stays where it is


def _pair(made: contextlib.ExitStack) -> tuple[socket.socket, socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ledger.own(ours.fileno())
    made.callback(_shut, ours)
    made.callback(theirs.close)
    return ours, theirs


def _shut(sock: socket.socket) -> None:
    ledger.disown(sock.fileno())
    sock.close()


def _with_pid(labels: WorkerLabels, pid: int) -> WorkerLabels:
    return replace(labels, pid=pid)
