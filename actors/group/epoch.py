"""Forms an epoch: starts, re-forms and stops ranks together.

Has the ranks of a group started, re-formed and stopped, as was decided.

Guarantees: ranks that are started together meet in one rendezvous, which no other epoch has used; a
start that fails is told as the exit of its ranks, with nothing left of it. Nobody waits here for a
process to be there.

Left to others: what is decided (`decide_ranks`), devices (`Leases`), the processes (`Members`), the
states they are given back (`Keeper`).

What the ranks of one epoch have in common.

Guarantees: ranks of two epochs never share one.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from phalanx.actors.spec.options import Source
from phalanx.actors.spec.validate import too_few_descriptors
from phalanx.runtime import GroupUp, Kind, Payload, RendezvousStore, WorkerStarted, descriptor_limit
from phalanx.supervision import SHUTDOWN, CallerError, ExitKind, ExitReason, NoDevice

from .messages import Close, NotStarted

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from phalanx.actors.checkpoint.restore import Keeper
    from phalanx.actors.spec.layout import Layout
    from phalanx.actors.spec.options import ExecutorSpec
    from phalanx.runtime import Rendezvous, Runtime
    from phalanx.supervision import ReformRanks, StartRanks, StopRanks

    from .devices import Leases
    from .events import Herald
    from .handle import Shared
    from .launcher import Launch
    from .members import Members
    from .messages import Notice
    from .shutdown import Stopping
    from .worker import Member


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


class Forming:
    """Forms one group. Used by its actor's thread alone.

    Args:
        take_spare: Returns a warm spare, which is none any more, or None.

    Attributes:
        layout: How the ranks that are started from now on are laid out.
        no_device: Why the group has given up, where it was for want of a device; else None.
    """

    def __init__(
        self,
        spec: ExecutorSpec,
        runtime: Runtime,
        shared: Shared,
        *,
        leases: Leases,
        members: Members,
        stopping: Stopping,
        keeper: Keeper,
        herald: Herald,
        tell: Callable[[Notice], None],
        take_spare: Callable[[], Member | None],
    ) -> None:
        self._spec = spec
        self._shared = shared
        self._seating = shared.plane.seating
        self._leases = leases
        self._members = members
        self._stopping = stopping
        self._keeper = keeper
        self._herald = herald
        self._tell = tell
        self._take_spare = take_spare
        self._store = RendezvousStore(
            runtime.hub,
            partial(runtime.launcher, spec.preload),
            group=spec.name,
            on_event=herald.publish,
        )
        self._rendezvous: Rendezvous | None = None
        self.layout = spec.layout
        self.no_device: NoDevice | None = None
        self._source = Source(spec.worker)

    def start(self, action: StartRanks, *, first: bool) -> None:
        """Start ranks, or have it told when to try again; *first* where none has served yet."""
        self._seating.resize(action.size)
        if not first and self._source.has_changed():
            self._herald.code_changed(self._spec.worker, self._source.file, self._spec.preload)
        try:
            leases = self._leases.ask(action, first=first)
            if leases is None:
                return  # it is told when to ask again
            try:
                formation = self._formation(action.epoch)
                gifts = self._keeper.gifts(action)
            except BaseException:
                self._leases.give_all_back(leases)
                raise
            taken = self._members.start(formation, action.ranks, leases, self._take_spare, gifts)
        except NoDevice as none:
            self._give_up(action, none, first=first)
        except Exception as error:  # noqa: BLE001  # a start that fails is an exit of those ranks
            self._failed(action.ranks, error, first=first)
        else:
            self._started(taken)

    def land(self, launch: Launch, *, first: bool) -> None:
        """Take over the ranks that were launched, or have it told that they have no process."""
        members = launch.members
        error = self._members.land(launch)
        if error is None:
            self._started(members)
            for member in members:
                self._stopping.make_up(member)
            return
        asked = tuple((each.rank, each.incarnation) for each in members if each.asked)
        if asked:
            self._tell(NotStarted(asked, SHUTDOWN))
        missed = tuple((each.rank, each.incarnation) for each in members if not each.asked)
        if missed:
            self._failed(missed, error, first=first)

    def reform(self, action: ReformRanks) -> None:
        """Have ranks that are kept leave their process group and join another."""
        why, formation = "", None
        try:
            formation = self._formation(action.epoch)
        except Exception as error:  # noqa: BLE001  # ranks that cannot be told are replaced
            self._herald.start_failed(error)
            why = f"it could not be re-formed: {type(error).__name__}: {error}"
        for rank, incarnation in action.ranks:
            member = self._members.find(rank, incarnation)
            if member is None:
                continue
            if formation is None:
                member.broken = why
                self._stopping.kill(member)
            else:
                order = self._members.reform(member, formation)
                self._seating.reform(rank, incarnation, order)

    def stop(self, action: StopRanks) -> None:
        """Begin to stop ranks; those that wait for a device, or a process, never start."""
        for start in self._leases.withdraw(frozenset(action.ranks)):
            self._tell(NotStarted(start.ranks, SHUTDOWN))
        for member in self._members.current():
            if member.rank not in action.ranks:
                continue
            if not action.hurry and member.seated:
                stop = Payload.of(None).packet(Kind.STOP, epoch=member.epoch, call_id=0)
                self._seating.post(member.rank, member.incarnation, stop)
                self._stopping.ask_to_stop(member, hurry=False)
            else:
                # It is still in its start, where it hears no message, or its group is broken.
                self._stopping.ask_to_stop(member, hurry=True)

    def open(self, epoch: int, *, since: float, recovered: bool) -> None:
        """Let collective calls go under *epoch*: every rank is up, which took *since* then.

        *recovered* says that the log has seen the group go down.
        """
        now = time.monotonic()
        self._seating.open(epoch)
        self._keeper.prune()
        self._herald.publish(
            GroupUp(
                group=self._spec.name,
                epoch=epoch,
                world_size=self.layout.world_size,
                took=now - since,
                at=now,
                level="warning" if recovered else "info",
            )
        )

    def close(self) -> None:
        """Give back where they met."""
        self._store.close()

    def _started(self, members: Sequence[Member]) -> None:
        """Tell of *members*, who have a process."""
        for member in members:
            device, at = member.labels.device, member.started_at
            self._herald.publish(WorkerStarted(**member.who(), device=device, at=at))
        if members and self._shared.probe is not None:
            self._shared.probe.restarting(tuple((each.rank, each.incarnation) for each in members))

    def _failed(
        self, ranks: tuple[tuple[int, int], ...], error: BaseException, *, first: bool
    ) -> None:
        """Have it told that *ranks* could not be started."""
        if descriptor_limit.is_shortage(error):
            error = too_few_descriptors(error)
        if first and self._shared.start_error is None:
            self._shared.start_error = error
        detail = f"it could not be started: {type(error).__name__}: {error}"
        if not isinstance(error, CallerError):  # that one is told to the caller alone
            self._herald.start_failed(error)
        # Through the mailbox, as any exit: a retry that fails again must not nest.
        self._tell(NotStarted(ranks, ExitReason(ExitKind.CRASH, detail)))

    def _give_up(self, action: StartRanks, none: NoDevice, *, first: bool) -> None:
        """End the group: there is no device for it, and it has waited."""
        self.no_device = none
        if first and self._shared.start_error is None:
            self._shared.start_error = none
        reason = replace(SHUTDOWN, detail=f"gave up: {none}")
        # Through the mailbox, as above. To try again would only wait again.
        self._tell(Close(reason))
        self._tell(NotStarted(action.ranks, reason))

    def _formation(self, epoch: int) -> Formation:
        if self._rendezvous is None or self._rendezvous.epoch != epoch:
            self._rendezvous = self._store.open(epoch)
        trace = self._shared.trace.starting()
        return Formation(epoch, self.layout, not self._spec.is_plain, self._rendezvous, trace)
