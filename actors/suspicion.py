"""When a rank of a group is suspected to hang, and what is done about it.

Guarantees: whoever is suspected is examined first, and let go where the suspicion holds no more; a
rank that was asked to stop has its own deadlines and is not suspected.

Left to others: when to look (`watch`), what the examined were doing (`examination`), who cannot
leave an old process group (`leaving`), ending them (`stopping`).
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

from phalanx.supervision import Phase, RankState

from .examination import Examinations, Suspect
from .leaving import Leavings
from .notices import Examined, LeaveDue, Look, OutOfStep, Overdue, ReformOverdue
from .seat import Running

if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx.runtime import Hub
    from phalanx.supervision import GroupState

    from .member import Member
    from .members import Members
    from .notices import Notice
    from .shared import Shared
    from .spec import ExecutorSpec
    from .stopping import Stopping

Doubt = Overdue | ReformOverdue | LeaveDue | Look | Examined | OutOfStep
"""What may speak against a rank."""

_LOOK_AGAIN = 0.5  # seconds for ranks that waited for one that hung to come free by its death


class Suspicion:
    """What speaks against the ranks of one group. Used by its actor's thread alone.

    Args:
        find: Returns the member, or spare, of that rank and incarnation.
        state: Returns what the group is just now.
    """

    def __init__(
        self,
        spec: ExecutorSpec,
        shared: Shared,
        members: Members,
        stopping: Stopping,
        hub: Hub,
        *,
        tell: Callable[[Notice], None],
        find: Callable[[int, int], Member | None],
        state: Callable[[], GroupState],
    ) -> None:
        self._spec = spec
        self._seating = shared.plane.seating
        self._watch = shared.watch
        self._members = members
        self._stopping = stopping
        self._find = find
        self._state = state
        self._examinations = Examinations(shared.pulses, hub, tell, find)
        self._leavings = Leavings(members, stopping, shared.pulses, hub, tell=tell, state=state)

    def hear(self, notice: Doubt) -> None:
        """Suspect, examine, or end whom *notice* speaks against."""
        match notice:
            case Overdue():
                self._overdue(notice)
            case ReformOverdue():
                self._reform_overdue(notice)
            case LeaveDue():
                self._leavings.hear(notice)
            case Look():
                self._look(notice)
            case Examined():
                self._conclude(notice)
            case OutOfStep(wire):
                self._out_of_step(wire)

    def watch_leaving(self, epoch: int) -> None:
        """Watch those that have just been told to leave their process group for *epoch*."""
        self._leavings.begin(epoch)

    def close(self) -> None:
        """Wait for no more answers."""
        self._leavings.close()

    def _out_of_step(self, wire: int) -> None:
        """End a rank of a group that cannot go on, so that the group is formed anew."""
        state = self._state()
        if state.keep and state.phase is not Phase.SERVING:
            return  # it is being formed anew
        discord = self._seating.out_of_step(wire)
        if discord is None:
            return
        member = self._members.find(discord.rank, discord.incarnation)
        if member is None or member.asked or member.hung or member.broken:
            return
        member.out_of_step = True
        if discord.is_stuck:
            self._stopping.examine(member, discord.why)
        else:
            member.broken = discord.why
            self._stopping.kill(member)

    def _overdue(self, notice: Overdue) -> None:
        """Suspect a rank that has had its time."""
        member = self._find(notice.rank, notice.incarnation)
        starting = notice.what == "start"
        if member is None or (starting and member.ready):
            return
        match notice.what:
            case "start":
                limit = self._spec.start_timeout
                why = f"its start took longer than start_timeout={limit:g} s"
            case "stream":
                why = "it closed its call socket and lived on"
            case "call":
                why = notice.detail
        suspect = Suspect(
            notice.rank, notice.incarnation, why, lambda: not (starting and member.ready)
        )
        self._examinations.begin([suspect])

    def _reform_overdue(self, notice: ReformOverdue) -> None:
        """Suspect, or end, a rank that could not be kept; what follows is decided by its exit."""
        member = self._members.find(notice.rank, notice.incarnation)
        if member is None:
            return

        def reforms() -> bool:
            mine = member.epoch == notice.epoch and not member.asked
            return mine and self._state().ranks[member.rank].state is RankState.REFORMING

        def lingers() -> bool:
            return reforms() and member.left < notice.epoch

        if not reforms():
            return
        match notice.what:
            case "leave":
                if lingers():
                    limit = self._spec.leave_within
                    why = f"it had not left the old process group within leave_within={limit:g} s"
                    suspect = Suspect(member.rank, member.incarnation, why, lingers)
                    self._examinations.begin([suspect])
            case "join":
                limit = self._spec.start_timeout
                why = f"on_reform took longer than start_timeout={limit:g} s"
                suspect = Suspect(member.rank, member.incarnation, why, reforms)
                self._examinations.begin([suspect])
            case "failed":
                if not self._state().mending:  # else a further epoch is on its way, for all
                    failure = member.failure
                    if failure is not None and not member.hung:
                        member.broken = f"it could not be re-formed: {failure.headline}"
                    self._stopping.kill(member)

    def _look(self, look: Look) -> None:
        """See whether a rank hangs, and suspect those that seem to."""

        def is_stopped(running: Running) -> bool:
            member = self._members.find(running.rank, running.incarnation)
            return member is not None and member.process is not None and member.process.is_stopped()

        running = self._seating.running()
        arriving = {each.rank: each for each in self._members.current() if self._arrives(each)}
        others = [Running(each.rank, each.incarnation) for each in arriving.values()]
        watched = [*(each for each in running if each.rank not in arriving), *others]
        judged = self._watch.judge(look, watched, is_stopped, time.monotonic())
        suspects: list[Suspect] = []
        for rank, why in judged:
            holds = partial(self._runs_on, rank)
            if member := arriving.get(rank.rank):
                holds = partial(self._arrives, member)
            if holds():
                in_call = member is None
                suspects.append(Suspect(rank.rank, rank.incarnation, why, holds, in_call=in_call))
        self._examinations.begin(suspects, running)

    def _conclude(self, notice: Examined) -> None:
        """End those that an examination has found to hang."""
        findings, look_again = self._examinations.end(notice)
        if look_again:
            self._watch.wake(_LOOK_AGAIN)
        for finding in findings:
            self._stopping.examine(finding.member, finding.why, finding.seen)

    def _arrives(self, member: Member) -> bool:
        """Whether *member* starts, or is to join another epoch: then it is waited for."""
        if member.process is None or member.asked:
            return False
        reforms = self._state().ranks[member.rank].state is RankState.REFORMING
        return reforms or not member.ready

    def _runs_on(self, rank: Running) -> bool:
        """Whether *rank* is still in the call it was found in, and is to be judged by it."""
        member = self._members.find(rank.rank, rank.incarnation)
        if member is None or member.asked:
            return False
        if self._state().ranks[rank.rank].state is RankState.REFORMING:
            return False  # it is to leave its process group, and has a limit for that
        now = (each for each in self._seating.running() if each.rank == rank.rank)
        return next((each.began for each in now), 0.0) == rank.began
