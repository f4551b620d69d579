"""What is known of a rank that died: why it did, and its crash report.

Guarantees: nothing here waits for the dead for more than a tenth of a second, or raises for what
cannot be known.

Left to others: what was decided (`decide_ranks`), and what became of calls (`plane`), which is
added when that is known.
"""

from __future__ import annotations

import datetime as dt
import time
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from phalanx.runtime import CallInProgress, CrashReport, ExitEvidence, exit_of_process
from phalanx.supervision import ExitKind, ExitReason, StartFailed

if TYPE_CHECKING:
    from phalanx.runtime import RemoteFailure
    from phalanx.supervision import Decided

    from .member import Member
    from .seat import Progress

# What Linux counts of a process, of ``struct rusage``.
_COUNTED = ("ru_maxrss", "ru_utime", "ru_stime", "ru_minflt", "ru_majflt", "ru_nvcsw", "ru_nivcsw")


def report_on(
    member: Member, reason: ExitReason, progress: Progress, decided: Decided
) -> CrashReport:
    """Return the report on *member*, whose process has ended, as far as it can be told by now."""
    now = time.monotonic()
    assert member.process is not None
    status = member.process.status
    last = member.last_lines()
    call = None
    if progress.method is not None and progress.call is not None:
        call = CallInProgress(
            method=progress.method,
            call_id=progress.call,
            running_for=progress.running,
            abandoned=progress.abandoned,
        )
    evidence = ExitEvidence()
    if status is not None:
        evidence = ExitEvidence(
            code=status.code,
            signal=status.signal,
            core_dumped=status.core_dumped,
            oom=status.out_of_memory,
            rusage=_used(status.usage),
        )
    return CrashReport.of(
        member.labels,
        reason,
        at=dt.datetime.now(dt.UTC).isoformat(timespec="microseconds"),
        at_monotonic=now,
        ran_for=now - member.started_at,
        call=call,
        logs=last.logs,
        stdout=last.stdout,
        stderr=last.stderr,
        last_words=last.last_words or (member.failure.trace if member.failure is not None else ""),
        stacks=member.stacks(),
        evidence=evidence,
        decision=decided.text,
        why=decided.why,
    )


def reason_of(member: Member) -> ExitReason:
    """Return why *member*, whose process has ended, did."""
    assert member.process is not None
    status = member.process.status
    assert status is not None
    detail = "restart(force=True)" if member.forced else ""
    if member.failure is not None:
        detail = member.failure.headline
    if status.out_of_memory:
        detail = "out of memory"
    reason = exit_of_process(
        status.code,
        status.signal,
        asked=member.asked and not member.hung,
        unresponsive=bool(member.hung),
        detail=member.hung or detail,
    )
    if member.broken:
        return replace(reason, kind=ExitKind.CRASH, detail=member.broken)
    if not member.ready and not member.asked and not reason.is_failure:
        # Exit code 0 before READY is no normal end: the start was left by sys.exit or os._exit.
        return replace(reason, kind=ExitKind.CRASH, detail="it exited during its start")
    return reason


def start_error(member: Member, reason: ExitReason, report: CrashReport) -> BaseException:
    """Return what the constructor raises: the worker's own exception where there is one."""
    where = f"raised in the start of rank {member.rank} (pid {report.pid})"
    failure: RemoteFailure | None = member.failure
    if failure is not None and failure.type_name != "SystemExit":
        error = failure.revive()
        if isinstance(error, Exception):
            with suppress(Exception):  # an exception type may refuse further attributes
                error.add_note(f"{where}; remote traceback:\n{failure.trace.rstrip()}")
            return error
    detail = f"rank {member.rank} (pid {report.pid}) did not become ready: {reason}"
    tail = (report.last_words or report.stderr).strip()
    return StartFailed(f"{detail}\n{tail}" if tail else detail, (report,))


def _used(usage: Any) -> dict[str, float]:
    return {} if usage is None else {name: getattr(usage, name) for name in _COUNTED}
