"""What the end of a rank means to its group: told, reported, and settled with its calls.

Guarantees: whoever hears of a death from a call finds its report in the status already; each report
says what became of every call the death cut short; no disk delays a restart.

Left to others: why a rank died and what is known of it (`postmortem`), what follows for the group
(`decide_ranks`), what becomes of calls (`seating`), files (`filing`).
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

from phalanx.runtime import GroupDown, ReportFolder, WorkerCrashed, WorkerExited
from phalanx.supervision import Decided, Directive, ExecutorClosed, Phase, StopRanks, WorkerDied

from .filing import Filing
from .postmortem import reason_of, report_on, start_error
from .seat import Progress

if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx.runtime import CallFate, CrashReport
    from phalanx.supervision import ExitReason, GroupState, RankAction

    from .calls import Call
    from .herald import Herald
    from .keeper import Keeper
    from .member import Member
    from .members import Members
    from .shared import Shared
    from .spec import ExecutorSpec

_KEPT = 256  # reports


class Deaths:
    """The deaths of one group. Used by its actor's thread alone.

    Args:
        folder: Where reports are written; None for nowhere.
        show: Has the group's view made anew; called under the plane's lock as well.

    Attributes:
        restarts: Deaths that led to a restart, in all.
        at: When the latest of those was heard of, on the monotonic clock; 0.0 for never.
        last: The report on the latest death; None before there is one.
        is_down: The group has been said to be down, and not yet to be up again.
    """

    def __init__(
        self,
        spec: ExecutorSpec,
        shared: Shared,
        members: Members,
        keeper: Keeper,
        herald: Herald,
        *,
        folder: ReportFolder | None,
        show: Callable[[], None],
    ) -> None:
        self._name = spec.name
        self._decider = spec.decider
        self._shared = shared
        self._seating = shared.plane.seating
        self._members = members
        self._keeper = keeper
        self._herald = herald
        self._show = show
        self._filing = Filing(folder, herald.publish, herald.complain)
        self._reports: deque[CrashReport] = deque(maxlen=_KEPT)
        self.restarts = 0
        self.at = 0.0
        self.last: CrashReport | None = None
        self.is_down = False

    @property
    def reports(self) -> tuple[CrashReport, ...]:
        """The latest reports, oldest first."""
        return tuple(self._reports)

    def directive(self, member: Member, reason: ExitReason) -> Directive | None:
        """Return what the user's decider says of an unasked exit, or said in the worker."""
        failure, decider = member.failure, self._decider
        if failure is not None and failure.directive:
            return Directive(failure.directive)
        if decider is None or member.asked:
            return None
        return decider.directive(reason, str(member.rank), failed=self._herald.complain)

    def settle(
        self,
        member: Member,
        reason: ExitReason,
        progress: Progress,
        state: GroupState,
        actions: tuple[RankAction, ...],
        *,
        epoch: int,
        at: float,
    ) -> None:
        """Tell of the end of *member*, and settle or re-send what it cut short.

        Args:
            member: Whose process has ended, or is given up.
            reason: Why.
            progress: What it was doing.
            state: What the group is after it.
            actions: What was decided to do.
            epoch: The group's when it ended.
            at: When the end was heard of.
        """
        ran_for = at - member.started_at
        self._herald.publish(WorkerExited(**member.who(), reason=reason, ran_for=ran_for, at=at))
        decided = next((each for each in actions if isinstance(each, Decided)), None)
        if decided is None and member.forced and (progress.method or progress.queued):
            decided = Decided("restart it", "restart(force=True) was called")
        if decided is None:
            self._seating.lose({member.rank: member.incarnation}, None, self._stopped)
        else:
            self._report(member, reason, progress, state, actions, decided=decided, epoch=epoch)
        self._seating.leave(member.rank, member.incarnation)

    def report_spare(self, spare: Member) -> CrashReport:
        """Return the report on *spare*, whose end is no failure of the group; `file` it."""
        decided = Decided("replace the spare", "its death is no failure of the group")
        return report_on(spare, reason_of(spare), Progress(), decided)

    def file(self, report: CrashReport) -> None:
        """Tell of a death, and keep its report where there is a folder for that."""
        self._herald.publish(WorkerCrashed(report=report, at=report.at_monotonic))
        self._filing.file(report)

    def close(self) -> None:
        """Write the reports that are not written yet, as far as there is room."""
        self._filing.close()

    def _report(
        self,
        member: Member,
        reason: ExitReason,
        progress: Progress,
        state: GroupState,
        actions: tuple[RankAction, ...],
        *,
        decided: Decided,
        epoch: int,
    ) -> None:
        now = time.monotonic()
        ends = state.phase in (Phase.CLOSING, Phase.ENDED)
        if not ends and not member.forced:
            self.restarts += 1
            self.at = now
        known = report_on(member, reason, progress, decided)
        message = f"rank {member.rank} (pid {known.pid}) died: {reason}; {decided}"
        lost = {member.rank: member.incarnation}
        for action in actions:
            # Without hurry the others may finish what they have.
            if isinstance(action, StopRanks) and action.hurry:
                others = (m for m in self._members.current() if m.rank in action.ranks)
                lost |= {other.rank: other.incarnation for other in others}

        def story(fates: tuple[CallFate, ...], waiting: int) -> CrashReport:
            settled = known.settled(fates, waiting)
            prospect = "" if ends else self._keeper.prospect(member.rank)
            self.last = report = replace(settled, checkpoint=prospect)
            self._reports.append(report)
            self._show()  # whoever hears of the death from a call finds its report in the status
            return report

        def died(call: Call) -> BaseException:
            return WorkerDied(f"{call.name}: {message}", call.reports or (self.last,))

        self._seating.lose(lost, story, died, ends=ends)
        report = self.last
        assert report is not None
        if state.served_at is None and self._shared.start_error is None:
            self._shared.start_error = start_error(member, reason, report)
        self.file(report)
        if not member.forced:
            self.is_down = True
            self._herald.publish(GroupDown(group=self._name, epoch=epoch, cause=message, at=now))

    def _stopped(self, call: Call) -> BaseException:
        """Return the error of a call that a rank had begun and, told to stop, did not end."""
        message = f"{call.name}: a rank was stopped before it had answered"
        if self._shared.closing or self.last is None:
            return ExecutorClosed(message)
        return WorkerDied(message, call.reports or (self.last,))
