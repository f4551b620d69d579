"""What is known of a rank that died, gathered into its crash report.

Guarantees: nothing here waits for the dead for more than a tenth of a second, or raises for what
cannot be known.

Left to others: why it died (`executor_actor`), what was decided (`decide_ranks`), and what became
of calls (`plane`), which is added when that is known.
"""

from __future__ import annotations

import datetime as dt
import math
import time
from typing import TYPE_CHECKING, Any

from phalanx.runtime import CallInProgress, CrashReport, ExitEvidence

if TYPE_CHECKING:
    from collections.abc import Iterable

    from phalanx.supervision import Decided, ExitReason, GroupState

    from .members import Member, Members
    from .seat import Progress

# What Linux counts of a process, of ``struct rusage``.
_COUNTED = ("ru_maxrss", "ru_utime", "ru_stime", "ru_minflt", "ru_majflt", "ru_nvcsw", "ru_nivcsw")


def report_on(
    member: Member, reason: ExitReason, progress: Progress, decided: Decided, members: Members
) -> CrashReport:
    """Return the report on *member*, whose process has ended, as far as it can be told by now.

    *members* knows what it has left behind.
    """
    now = time.monotonic()
    assert member.process is not None
    status = member.process.status
    last = members.last_lines(member)
    call = None
    if progress.method is not None and progress.call is not None:
        call = CallInProgress(
            method=progress.method, call_id=progress.call, running_for=progress.running
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
        stacks=members.stacks(member),
        evidence=evidence,
        decision=decided.text,
        why=decided.why,
    )


def deaths_behind(end: GroupState, reports: Iterable[CrashReport]) -> tuple[CrashReport, ...]:
    """Return those of *reports* for which the group of *end* has ended, oldest first.

    They are the deaths since it served last, and all that were counted where they were too many.
    """
    known = tuple(reports)
    if not known:
        return ()
    last, window = known[-1].at_monotonic, end.window
    since = min(last, end.served_at) if end.served_at is not None else -math.inf
    if window.admit(last) is None:
        since = min([since, *(at for at in window.spent if last - at <= window.period)])
    return tuple(report for report in known if report.at_monotonic >= since)


def with_deaths(
    own: tuple[CrashReport, ...], deaths: tuple[CrashReport, ...]
) -> tuple[CrashReport, ...]:
    """Return a call's *own* reports and those of *deaths* that are not among them."""
    return (*own, *(death for death in deaths if all(death is not report for report in own)))


def _used(usage: Any) -> dict[str, float]:
    return {} if usage is None else {name: getattr(usage, name) for name in _COUNTED}
