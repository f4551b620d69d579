"""``phalanx reports``: the deaths that a folder tells of, the newest first.

Guarantees: what is torn or foreign is passed over, with a note on stderr; what workers wrote does
not reach the terminal as commands.
"""

from __future__ import annotations

import datetime as dt
import itertools
import json
import os
import re
import sys
from typing import TYPE_CHECKING, Any

from phalanx.runtime import ReportFolder, safe_text
from phalanx.supervision import ExitKind, SpecError

from .output import reader_may_leave

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

    from phalanx.runtime import CrashReport, ReportFile

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_HEAD = ("WHEN", "CHILD", "RANK", "#", "REASON", "IN CALL", "THEN", "FILE")
_LONG_AGO = dt.datetime.min.replace(tzinfo=dt.UTC)
_WIDEST = 44  # characters of a column but the last


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command line of this subcommand."""
    add_directory(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON list of whole reports")
    parser.add_argument("--group", help="only of this rank group")
    parser.add_argument("--rank", type=int, help="only of this rank")
    parser.add_argument("--method", help="only of workers that died in this method")
    parser.add_argument(
        "--reason", choices=[str(kind) for kind in ExitKind], help="only for this reason"
    )
    parser.add_argument("--oom", action="store_true", help="only kills for want of memory")
    parser.add_argument(
        "--since", metavar="WHEN", help="only from then on: 30s, 10m, 2h, 7d, or a date and time"
    )
    parser.add_argument("--limit", type=int, metavar="N", help="at most so many")


def add_directory(parser: argparse.ArgumentParser) -> None:
    """Describe where the reports are."""
    parser.add_argument(
        "directory",
        nargs="?",
        metavar="DIR",
        help="the folder of the reports; without it, that which PHALANX_REPORT_DIR names",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the list; return the exit code."""
    folder = folder_of(arguments.directory)
    if arguments.limit is not None and arguments.limit < 1:
        raise SpecError("--limit", arguments.limit, "give a number of reports, at least 1")
    since = None if arguments.since is None else moment(arguments.since, dt.datetime.now(dt.UTC))
    wanted = (
        each
        for each in told(folder.read())
        if is_wanted(each[1], arguments) and (since is None or moment_of(each[1]) >= since)
    )
    limit = None if arguments.limit is None else min(arguments.limit, sys.maxsize)
    found = list(itertools.islice(wanted, limit))
    with reader_may_leave():
        if arguments.json:
            records = [
                {**json.loads(report.to_json()), "file": str(file.path)} for file, report in found
            ]
            print(json.dumps(records, indent=2))
        elif found:
            print("\n".join(lines([_HEAD, *(_row(*each) for each in found)])))
        else:
            print(f"no crash reports in {folder.path}", file=sys.stderr)
    return 0


def folder_of(given: str | None) -> ReportFolder:
    """Return the folder that was *given*, or else that of the environment."""
    named = given or os.environ.get("PHALANX_REPORT_DIR", "")
    if not named:
        raise SpecError(
            "directory", "", "name the folder of the reports, or set PHALANX_REPORT_DIR"
        )
    return ReportFolder.at(named)


def told(files: Iterator[ReportFile]) -> Iterator[tuple[ReportFile, CrashReport]]:
    """Yield those that are reports; note the others on stderr."""
    for file in files:
        if file.report is None:
            print(f"passed over {safe_text(str(file.path))}: {file.problem}", file=sys.stderr)
        else:
            yield file, file.report


def is_wanted(report: CrashReport, arguments: argparse.Namespace) -> bool:
    """Return whether *report* is one of those the user asked for."""
    method = None if report.call is None else report.call.method
    asked = (
        (arguments.group, report.group),
        (arguments.rank, report.rank),
        (arguments.reason, str(report.reason.kind)),
        (arguments.method, method),
    )
    if arguments.oom and not report.evidence.oom:
        return False
    return all(wanted is None or wanted == has for wanted, has in asked)


def moment(text: str, now: dt.datetime) -> dt.datetime:
    """Return when *text* says: so long before *now*, or a date and time."""
    ago = re.fullmatch(r"(\d+)([smhd])", text)
    if ago:
        try:
            return now - dt.timedelta(seconds=float(ago[1]) * _UNITS[ago[2]])
        except OverflowError:
            return _LONG_AGO  # before there were dates
    try:
        at = dt.datetime.fromisoformat(text)
    except ValueError:
        raise SpecError(
            "--since", text, "give 30s, 10m, 2h, 7d, or a date such as 2026-01-31T12:00"
        ) from None
    return at if at.tzinfo else _local(at)


def moment_of(report: CrashReport) -> dt.datetime:
    """Return when *report* says that it was; long ago where it does not."""
    try:
        at = dt.datetime.fromisoformat(report.at)
    except ValueError:
        return _LONG_AGO
    return at if at.tzinfo else at.replace(tzinfo=dt.UTC)


def _local(at: dt.datetime) -> dt.datetime:
    """Return *at* in the zone of this machine; on the first and last days there are in UTC."""
    try:
        return at.astimezone()
    except (OverflowError, ValueError):
        return at.replace(tzinfo=dt.UTC)


def lines(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return *rows* with their columns under each other."""
    shown = [[safe_text(_cut(cell)) for cell in row[:-1]] + [safe_text(row[-1])] for row in rows]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in shown
    ]


def _row(file: ReportFile, report: CrashReport) -> tuple[Any, ...]:
    return (
        _local(moment_of(report)).strftime("%Y-%m-%d %H:%M:%S"),
        report.child,
        "" if report.rank is None else str(report.rank),
        str(report.incarnation),
        str(report.reason),
        "" if report.call is None else report.call.method,
        report.decision,
        file.path.name,
    )


def _cut(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _WIDEST else text[: _WIDEST - 1] + "…"
