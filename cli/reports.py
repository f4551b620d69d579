"""List and show crash reports.

Without an action it is `reports list`. Guide: docs/howto/reports.md.

Exit codes:
  those of the action

Examples:
  phalanx reports /var/log/crashes
  phalanx reports show latest
"""

from __future__ import annotations

import datetime as dt
import itertools
import json
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.runtime import REPORT_VARIABLE, ReportFolder, read_report, safe_text
from phalanx.supervision import ExitKind, SpecError

from .terminal import add_page, rank_number, reader_may_leave

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
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    listed, shown = add_page(actions, "list", _list), add_page(actions, "show", _show)
    shown.add_argument("file", metavar="FILE|latest", help="a path, a FILE of the list, or latest")
    for each in (listed, shown):
        folder = f"the folder of the reports; without it, the one that {REPORT_VARIABLE} names"
        each.add_argument("directory", nargs="?", metavar="DIR", help=folder)
        each.add_argument("--json", action="store_true", help="print whole reports as JSON")
    add = listed.add_argument
    add("--group", help="only of this rank group")
    add("--rank", type=rank_number, help="only of this rank")
    add("--method", help="only of workers that died in this method")
    add("--reason", choices=[str(kind) for kind in ExitKind], help="only for this reason")
    add("--oom", action="store_true", help="only kills because of a lack of memory")
    since = "only from then on: 30s, 10m, 2h, 7d, or a date and time"
    add("--since", metavar="WHEN", help=since)
    add("--limit", type=int, metavar="N", help="maximum number of reports (all)")


def run(arguments: argparse.Namespace) -> int:
    """Print the list, or one report."""
    with reader_may_leave():
        (_show if arguments.action == "show" else _list)(arguments)
    return 0


def _list(arguments: argparse.Namespace) -> None:
    """List the reports of a folder, the newest first (the default action).

    A file that is no report is passed over, with a note on stderr.

    Exit codes:
      0  listed, also if there are none
      2  the command line is invalid, or no folder

    Examples:
      phalanx reports list /var/log/crashes --since 2h --reason killed
    """
    folder = _folder(arguments.directory)
    if arguments.limit is not None and arguments.limit < 1:
        raise SpecError("--limit", arguments.limit, "give a number of reports, at least 1")
    since = None if arguments.since is None else moment(arguments.since, dt.datetime.now(dt.UTC))
    wanted = (
        each
        for each in _readable(folder.read())
        if _is_wanted(each[1], arguments) and (since is None or _moment_of(each[1]) >= since)
    )
    limit = None if arguments.limit is None else min(arguments.limit, sys.maxsize)
    found = list(itertools.islice(wanted, limit))
    if arguments.json:
        records = [
            {**json.loads(report.to_json()), "file": str(file.path)} for file, report in found
        ]
        print(json.dumps(records, indent=2))
    elif found:
        print("\n".join(_table([_HEAD, *(_row(*each) for each in found)])))
    else:
        print(f"no crash reports in {folder.path}", file=sys.stderr)


def _show(arguments: argparse.Namespace) -> None:
    """Show one report: what died, of what, doing what, and what was decided.

    Control characters in what workers wrote are escaped.

    Exit codes:
      0  shown
      2  the command line is invalid, or there is no such report

    Examples:
      phalanx reports show latest /var/log/crashes
    """
    report = _chosen(arguments.file, arguments.directory)
    if arguments.json:
        print(json.dumps(json.loads(report.to_json()), indent=2))
    else:
        print("\n".join(map(safe_text, report.render().splitlines())))


def _chosen(name: str, directory: str | None) -> CrashReport:
    """Return the report that *name* means: a path, a file of the folder, or ``latest``."""
    if name == "latest":
        folder = _folder(directory)
        newest = next(_readable(folder.read()), None)
        if newest is None:
            raise SpecError("directory", str(folder.path), "has no crash reports")
        return newest[1]
    path = Path(name)
    if path.name == name and not os.path.exists(name):  # noqa: PTH110  # raises nothing
        path = _folder(directory).path / name
    file = read_report(path)
    if file.report is None:
        raise SpecError("file", str(path), file.problem)
    return file.report


def _folder(given: str | None) -> ReportFolder:
    named = given or os.environ.get(REPORT_VARIABLE, "")
    if not named:
        raise SpecError(
            "directory", "", f"name the folder of the reports, or set {REPORT_VARIABLE}"
        )
    return ReportFolder.at(named)


def _readable(files: Iterator[ReportFile]) -> Iterator[tuple[ReportFile, CrashReport]]:
    for file in files:
        if file.report is None:
            print(safe_text(f"passed over {file.path}: {file.problem}"), file=sys.stderr)
        else:
            yield file, file.report


def _is_wanted(report: CrashReport, arguments: argparse.Namespace) -> bool:
    asked = (
        (arguments.group, report.group),
        (arguments.rank, report.rank),
        (arguments.reason, str(report.reason.kind)),
        (arguments.method, None if report.call is None else report.call.method),
        (arguments.oom or None, bool(report.evidence.oom)),
    )
    return all(wanted is None or wanted == has for wanted, has in asked)


def moment(text: str, now: dt.datetime) -> dt.datetime:
    """Return the time that *text* means: so long before *now*, or a date and time."""
    ago = re.fullmatch(r"(\d+)([smhd])", text)
    try:
        if ago:
            return now - dt.timedelta(seconds=float(ago[1]) * _UNITS[ago[2]])
        at = dt.datetime.fromisoformat(text)
    except OverflowError:
        return _LONG_AGO  # before there were dates
    except ValueError:
        remedy = "give 30s, 10m, 2h, 7d, or a date such as 2026-01-31T12:00"
        raise SpecError("--since", text, remedy) from None
    return at if at.tzinfo else _local(at)


def _moment_of(report: CrashReport) -> dt.datetime:
    """Return the time of *report*; long ago if it names none."""
    try:
        at = dt.datetime.fromisoformat(report.at)
    except ValueError:
        return _LONG_AGO
    return at if at.tzinfo else at.replace(tzinfo=dt.UTC)


def _local(at: dt.datetime) -> dt.datetime:
    """Return *at* in the time zone of this machine; on the first and last days there are in UTC."""
    try:
        return at.astimezone()
    except (OverflowError, ValueError):
        return at.replace(tzinfo=dt.UTC)


def _row(file: ReportFile, report: CrashReport) -> tuple[str, ...]:
    return (
        _local(_moment_of(report)).strftime("%Y-%m-%d %H:%M:%S"),
        report.child,
        "" if report.rank is None else str(report.rank),
        str(report.incarnation),
        str(report.reason),
        "" if report.call is None else report.call.method,
        report.decision,
        file.path.name,
    )


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return *rows* as lines with aligned columns."""
    shown = [[safe_text(_cut(cell)) for cell in row[:-1]] + [safe_text(row[-1])] for row in rows]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in shown
    ]


def _cut(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _WIDEST else text[: _WIDEST - 1] + "…"
