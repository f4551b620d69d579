"""Handling of a death: exit reason, crash report, errors of its calls, and files of reports.

- When a caller gets an error because of a death, its report is already in the status; each report
  lists the outcome of every call that the death interrupted.
- No disk delays a restart: a thread writes the files. If there is no room, a report is kept, a
  few hundred at most, and written with the next one for which there is, or at the end.
- When a group ends by itself, callers get the reports of the deaths that it ended for, and the
  `NoDevice` if that was the reason.
- Nothing here waits for the last lines of a dead worker for more than a tenth of a second.
"""

from __future__ import annotations

import datetime as dt
import math
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

from phalanx.actors.calls.callbacks import CallbackThread
from phalanx.actors.calls.rank import Progress
from phalanx.cluster import RemoteProcess
from phalanx.runtime import (
    CallInProgress,
    CrashReport,
    ExitEvidence,
    GroupDown,
    Lost,
    ReportFolder,
    ReportNotWritten,
    ReportWritten,
    WorkerCrashed,
    WorkerExited,
    exit_of_process,
)
from phalanx.supervision import (
    Directive,
    ExecutorClosed,
    ExitKind,
    ExitReason,
    Phase,
    StartFailed,
    WorkerDied,
    decide,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from phalanx.actors.calls.call import Call
    from phalanx.actors.checkpoint.group_checkpoints import CheckpointManager
    from phalanx.runtime import CallFate, RemoteFailure
    from phalanx.supervision import GroupState, NoDevice

    from .handle import Group
    from .membership import Membership
    from .worker import Worker


_KEPT = 256  # reports that wait for room on a disk
_NO_CODE = (
    "its machine has not the code of the driver; install it there, or have it sent, with Ray by "
    "runtime_env={'working_dir': '.'}"
)
_DISK_TIMEOUT = 5.0  # seconds for the disk at the end


@dataclass(frozen=True, slots=True)
class EndErrors:
    """The errors of calls to a group that has ended.

    Attributes:
        reason: Why by itself; None where it was closed.
        deaths: The reports on those it ended for, oldest first.
        no_device: The reason for which it gave up, if it was that; else None.
    """

    name: str
    reason: ExitReason | None
    deaths: tuple[CrashReport, ...]
    no_device: NoDevice | None

    @property
    def _message(self) -> str:
        what = "was closed" if self.reason is None else f"has ended: {self.reason}"
        return f"executor {self.name} {what}"

    def settle(self, call: Call) -> BaseException:
        """Return what *call*, which was not answered, ends in."""
        message = f"{call.name}: {self._message}"
        own = call.reports
        known = {report.name for report in own}  # one of them may have been completed since
        others = (each for each in self.deaths if each.name not in known)
        reports = (*own, *others)
        error: ExecutorClosed | WorkerDied
        if self.reason is None or not reports:
            error = ExecutorClosed(f"{message} before it was answered")
        else:
            error = WorkerDied(message, reports)
        error.sent = bool(call.wire or own)
        if self.reason is not None:
            error.__cause__ = self.no_device
        return error

    def refuse(self) -> BaseException:
        """Return what a call that comes too late is refused with."""
        error = ExecutorClosed(f"{self._message}; build a new one", sent=False)
        if self.reason is not None:
            died = WorkerDied(self._message, self.deaths) if self.deaths else None
            error.__cause__ = self.no_device or died
        return error


def deaths_behind(end: GroupState, reports: Iterable[CrashReport]) -> tuple[CrashReport, ...]:
    """Return those of *reports* for which the group of *end* has ended, oldest first.

    They are the deaths since it served last, and all that were counted where they were too many;
    none where it has ended for something else.
    """
    known = tuple(reports)
    if not known:
        return ()
    last, window = known[-1].at_monotonic, end.window
    since = -math.inf if end.served_at is None else end.served_at
    if last >= since and window.admit(last) is None:
        since = min([since, *(at for at in window.spent if last - at <= window.period)])
    return tuple(report for report in known if report.at_monotonic >= since)


def report_on(
    worker: Worker, reason: ExitReason, progress: Progress, decided: decide.Decided, now: float
) -> CrashReport:
    """Return the report on *worker*, whose process has ended, as complete as it can be by now."""
    assert worker.process is not None
    last = worker.last_lines()
    call = None
    if progress.call is not None:
        call = CallInProgress(
            method=progress.method,
            call_id=progress.call,
            running_for=progress.running,
            abandoned=progress.abandoned,
        )
    report = CrashReport.of(
        worker.labels,
        reason,
        at=dt.datetime.now(dt.UTC).isoformat(timespec="microseconds"),
        at_monotonic=now,
        ran_for=now - worker.started_at,
        call=call,
        logs=last.logs,
        stdout=last.stdout,
        stderr=last.stderr,
        last_words=last.last_words or (worker.failure.trace if worker.failure is not None else ""),
        stacks=worker.stacks(),
        evidence=worker.process.status or ExitEvidence(),
        decision=decided.text,
        why=decided.why,
        lost=worker.lost,
    )
    if isinstance(process := worker.process, RemoteProcess):
        report = replace(report, host=process.host, node=process.node)
    return report


def reason_of(worker: Worker) -> ExitReason:
    """Return why *worker*, whose process has ended, did."""
    assert worker.process is not None
    status = worker.process.status
    assert status is not None
    detail = "restart(force=True)" if worker.forced else ""
    if worker.failure is not None:
        detail = worker.failure.headline
    if status.oom:
        detail = "out of memory"
    reason = exit_of_process(
        status,
        asked=worker.asked and not worker.hung,
        unresponsive=bool(worker.hung),
        detail=worker.hung or detail,
    )
    if fault := worker.fault:
        return replace(reason, kind=ExitKind.CRASH, detail=fault)
    if not worker.ready and not worker.asked and not reason.is_failure:
        # Exit code 0 before READY is no normal end: the start was left by sys.exit or os._exit.
        return replace(reason, kind=ExitKind.CRASH, detail="it exited during its start")
    return reason


def _death(report: CrashReport) -> tuple[str, str]:
    """Return what two reports on one death share: spares have no number that differs."""
    return report.name, report.at


def start_error(worker: Worker, reason: ExitReason, report: CrashReport) -> StartFailed:
    """Return what the constructor raises; its cause is the worker's own exception, if it raised."""
    detail = f"rank {worker.rank} (pid {report.pid}) did not become ready: {reason}"
    failure: RemoteFailure | None = worker.failure
    is_remote = isinstance(worker.process, RemoteProcess)
    if failure is not None and is_remote and failure.type_name == "ModuleNotFoundError":
        detail += f": {_NO_CODE}"
    if failure is not None and failure.type_name != "SystemExit":
        error = StartFailed(detail, (report,))
        error.__cause__ = failure.revive()
        with suppress(Exception):  # an exception type may refuse further attributes
            error.__cause__.add_note(f"remote traceback:\n{failure.trace.rstrip()}")
        return error
    tail = (report.last_words or report.stderr).strip()
    return StartFailed(f"{detail}\n{tail}" if tail else detail, (report,))


class Deaths:
    """The deaths of one group. Used by its actor's thread alone.

    Args:
        show: Has the group's view made anew; called under the plane's lock as well.

    Attributes:
        restarts: Deaths that led to a restart, in all.
        at: When the latest of those became known, on the monotonic clock; 0.0 for never.
        last: The report on the latest death; None before there is one.
        is_down: The group has been said to be down, and not yet to be up again.
    """

    def __init__(
        self,
        group: Group,
        membership: Membership,
        checkpoints: CheckpointManager,
        show: Callable[[], None],
    ) -> None:
        spec = group.spec
        self._decider = spec.policy.decider
        self._group = group
        self._plane = group.plane
        self._membership = membership
        self._checkpoints = checkpoints
        self._show = show
        kept = cast("ReportFolder | None", spec.policy.report_dir)
        self._folder = kept or group.runtime.reports or ReportFolder.from_environment()
        self._writer = CallbackThread(group.report_error)
        self._unwritten: list[CrashReport] = []  # the writer's; as is
        self._incomplete: dict[tuple[str, str], str] = {}  # files of reports without the fence
        self._reports: deque[CrashReport] = deque(maxlen=_KEPT)
        self.restarts = 0
        self.at = 0.0
        self.last: CrashReport | None = None
        self.is_down = False

    @property
    def reports(self) -> tuple[CrashReport, ...]:
        """The latest reports, oldest first."""
        return tuple(self._reports)

    def directive(self, worker: Worker, reason: ExitReason) -> Directive | None:
        """Return what the user's decider says of an unasked exit, or said in the worker."""
        failure, decider = worker.failure, self._decider
        if decider is None:
            return None  # a worker has the usual rules then, and their restart is that of a crash
        if failure is not None and failure.directive:
            return Directive(failure.directive)
        if worker.asked:
            return None
        return decider.directive(reason, str(worker.rank), failed=self._group.report_error)

    def settle(
        self,
        ended: Sequence[tuple[Worker, Progress]],
        reason: ExitReason,
        state: GroupState,
        actions: tuple[decide.RankAction, ...],
        *,
        epoch: int,
        at: float,
    ) -> None:
        """Report the end of workers at *at*, in *epoch*, and settle or re-send what it cut short.

        Args:
            ended: Those that have ended of one cause, each with what it was doing.
            state: That which has been decided after it; *actions* likewise.
        """
        for worker, _ in ended:
            # One that stayed when others were restarted, under REST_FOR_ONE, has that of its start.
            worker.epoch, worker.labels = epoch, replace(worker.labels, epoch=epoch)
            ran_for = at - worker.started_at
            self._group.publish(WorkerExited(**worker.who(), reason=reason, ran_for=ran_for, at=at))
        decided = next((each for each in actions if isinstance(each, decide.Decided)), None)
        first, doing = ended[0]
        if decided is None and first.forced and (doing.method or doing.queued):
            decided = decide.Decided("restart it", "restart(force=True) was called")
        lost = {worker.rank: worker.incarnation for worker, _ in ended}
        if decided is None:
            self._plane.lose(lost, None, self._stopped)
        else:
            self._report(ended, reason, decided, lost, state=state, actions=actions, epoch=epoch)
        for worker, _ in ended:
            self._plane.detach(worker.rank, worker.incarnation)

    def _report(
        self,
        ended: Sequence[tuple[Worker, Progress]],
        reason: ExitReason,
        decided: decide.Decided,
        lost: dict[int, int],
        *,
        state: GroupState,
        actions: tuple[decide.RankAction, ...],
        epoch: int,
    ) -> None:
        """Report on workers, of whose end something follows, and settle their calls."""
        first = ended[0][0]
        now = self._group.clock()
        ends = state.phase in (Phase.CLOSING, Phase.ENDED)
        if not ends and not first.forced:
            self.restarts += 1
            self.at = now
        known = [report_on(worker, reason, doing, decided, now) for worker, doing in ended]
        name = f"rank {first.rank} (pid {known[0].pid})"
        if len(ended) > 1:
            name = f"ranks {', '.join(str(rank) for rank in sorted(lost))}"
        message = f"{name} died: {reason}; {decided}"
        for action in actions:
            # Without hurry the others may finish what they have.
            if isinstance(action, decide.StopRanks) and action.hurry:
                others = (m for m in self._membership.current() if m.rank in action.ranks)
                lost |= {other.rank: other.incarnation for other in others}
        reports: list[CrashReport] = []

        def make_report(fates: tuple[CallFate, ...], waiting: int) -> CrashReport:
            for (worker, _), report in zip(ended, known, strict=True):
                checkpoint = "" if ends else self._checkpoints.describe_restore_point(worker.rank)
                settled = report.settled(fates, waiting)
                reports.append(replace(settled, checkpoint=checkpoint))
            self.last = reports[0]
            self._reports.extend(reports)
            self._show()  # before calls fail: their callers find the report in the status
            return reports[0]

        def died(call: Call) -> BaseException:
            return WorkerDied(f"{call.name}: {message}", call.reports or (self.last,))

        self._plane.lose(lost, make_report, died, ends=ends)
        if state.served_at is None and self._group.start_error is None:
            self._group.start_error = start_error(first, reason, reports[0])
        for report in reports:
            self.file(report)
        if not first.forced:
            self.is_down = True
            group = self._group.spec.name
            self._group.publish(GroupDown(group=group, epoch=epoch, cause=message, at=now))

    def report_spare(self, spare: Worker) -> CrashReport:
        """Return the report on *spare*, whose end is no failure of the group; `file` it."""
        decided = decide.Decided("replace the spare", "its death is no failure of the group")
        return report_on(
            spare,
            reason_of(spare),
            Progress(spare.rank, spare.incarnation),
            decided,
            self._group.clock(),
        )

    def file(self, report: CrashReport) -> None:
        """Publish a death, and keep its report if there is a folder for that."""
        self._group.publish(WorkerCrashed(report=report, at=report.at_monotonic))
        self._keep(report)

    def note_fences(self, fences: Mapping[int, str]) -> None:
        """Complete the reports on ranks of lost nodes: *fences* says how each has been fenced."""
        for index, report in enumerate(self._reports):
            fenced = "" if report.node is None else fences.get(report.node, "")
            if report.lost is Lost.NODE and fenced and not report.fenced:
                complete = self._reports[index] = replace(report, fenced=fenced)
                self.last = complete if report is self.last else self.last
                self._keep(complete)
        self._show()

    def close(self) -> None:
        """Write what is left, as far as there is room; waits for a few seconds at most."""
        if self._folder is not None:
            self._writer.run(self._catch_up, self._folder)
        self._writer.close(_DISK_TIMEOUT)

    def _keep(self, report: CrashReport) -> None:
        """Have *report* written soon, in place of an earlier one on the same death."""
        if self._folder is not None:
            self._writer.run(self._write, self._folder, report)

    # --- on the writer's thread ---------------------------------------------------------

    def _write(self, folder: ReportFolder, report: CrashReport) -> None:
        self._unwritten = [each for each in self._unwritten if _death(each) != _death(report)]
        self._catch_up(folder)
        event = self._try(folder, report)
        if isinstance(event, ReportNotWritten):
            self._unwritten = [*self._unwritten[1 - _KEPT :], report]
        self._group.publish(event)

    def _catch_up(self, folder: ReportFolder) -> None:
        """Write the reports for which there was no room, while there is."""
        while self._unwritten:
            event = self._try(folder, self._unwritten[0])
            if isinstance(event, ReportNotWritten):
                return  # that was said when it was tried first
            del self._unwritten[0]
            self._group.publish(event)

    def _try(self, folder: ReportFolder, report: CrashReport) -> ReportWritten | ReportNotWritten:
        event = folder.write(report, self._incomplete.get(_death(report), ""))
        if isinstance(event, ReportWritten):
            self._incomplete.pop(_death(report), None)
            if report.lost is Lost.NODE and not report.fenced:
                self._incomplete[_death(report)] = event.path
        return event

    # --- the errors of calls ------------------------------------------------------------

    def _stopped(self, call: Call) -> BaseException:
        """Return the error of a call that a rank had begun and did not end, as it was stopped."""
        message = f"{call.name}: a rank was stopped before it had answered"
        if self._group.closing or self.last is None:
            return ExecutorClosed(message)
        return WorkerDied(message, call.reports or (self.last,))
