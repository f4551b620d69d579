"""What the actor of a group works with: made together, given back together.

Guarantees: whatever of it fails to be given back, the rest is.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from phalanx.runtime import ReportFolder

from .deadlines import Deadlines
from .deaths import Deaths
from .forming import Forming
from .hearing import Hearing
from .herald import Herald
from .keeper import Keeper
from .launching import Launches
from .leases import Leases
from .links import Links
from .members import Members
from .outfit import Outfit
from .standby import Standby
from .stopping import Stopping
from .suspicion import Suspicion

if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx.runtime import Runtime
    from phalanx.supervision import GroupState

    from .launching import Launch
    from .member import Member
    from .notices import Notice
    from .shared import Shared
    from .spec import ExecutorSpec

_CALLBACKS = 5.0  # seconds for the last callbacks to be run


class Staff:
    """Those who work for one group's actor, on its thread.

    Args:
        tell: Puts a notice into the actor's mailbox.
        state: Returns what the group is just now.
        show: Has the group's view made anew.
    """

    def __init__(
        self,
        spec: ExecutorSpec,
        runtime: Runtime,
        shared: Shared,
        *,
        tell: Callable[[Notice], None],
        state: Callable[[], GroupState],
        show: Callable[[], None],
    ) -> None:
        hub = runtime.hub
        self._shared = shared
        self.herald = herald = Herald(spec.name, runtime.scribe, shared)
        publish = herald.publish
        self.leases = Leases(spec, runtime, tell, publish, shared.deliver)
        links = None
        if spec.transport is not None:
            links = Links(spec.transport, runtime, spec.name, tell, publish)
        self.deadlines = Deadlines(hub, shared.watch, tell)
        self.stopping = Stopping(spec.stop, self.deadlines)
        self.outfit = Outfit(spec, runtime, shared.plane.arena, probe=shared.probe)
        self.launches = Launches(spec.name, tell)
        self.members = Members(
            spec,
            runtime,
            leases=self.leases,
            outfit=self.outfit,
            launches=self.launches,
            deadlines=self.deadlines,
            links=links,
            pulses=shared.pulses,
            tell=tell,
        )
        self.keeper = Keeper(
            spec, shared.cuts, shared.plane, publish, shared.deliver, ends=shared.owns_cuts
        )
        self.standby = Standby(
            spec.standby, self.members, self.stopping, hub, tell=tell, publish=publish
        )
        self.deaths = Deaths(
            spec,
            shared,
            self.members,
            self.keeper,
            herald,
            folder=spec.report_dir or runtime.reports or ReportFolder.from_environment(),
            show=show,
        )
        self.forming = Forming(
            spec,
            runtime,
            shared,
            leases=self.leases,
            members=self.members,
            stopping=self.stopping,
            keeper=self.keeper,
            herald=herald,
            tell=tell,
            take_spare=self.standby.take,
        )
        self.suspicion = Suspicion(
            spec,
            shared,
            self.members,
            self.stopping,
            hub,
            tell=tell,
            find=self.find,
            state=state,
        )
        self.hearing = Hearing(
            spec.name,
            shared,
            find=self.find,
            show=show,
            standby=self.standby,
            deadlines=self.deadlines,
            stopping=self.stopping,
            keeper=self.keeper,
            herald=herald,
        )

    def find(self, rank: int, incarnation: int) -> Member | None:
        """Return that spare, while it is one, or that incarnation, while it is the current one."""
        return self.standby.find(rank) or self.members.find(rank, incarnation)

    def land(self, launch: Launch, *, first: bool) -> None:
        """Take over what *launch* has brought, once; *first* where none has served yet."""
        if not self.launches.take(launch):
            return
        if launch.members[0].spare:
            self.standby.land(launch)
        else:
            self.forming.land(launch, first=first)

    def close(self, release_runtime: Callable[[], None]) -> None:
        """Give everything back; the ranks are buried. The shared parts go last."""
        shared = self._shared
        for give_back in (
            shared.watch.close,
            self.suspicion.close,
            self.standby.close,
            self.members.close,
            self.forming.close,
            self.leases.close,
            shared.plane.close,
            self.deaths.close,
            partial(shared.callbacks.close, _CALLBACKS),
            release_runtime,
        ):
            try:
                give_back()
            except Exception as error:  # noqa: BLE001  # the rest must still be given back
                self.herald.complain(error)
