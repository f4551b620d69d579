"""``phalanx report``: one death, told so that it is understood in ten seconds.

Guarantees: a file that is no report is named, with what is wrong with it; what a worker wrote does
not reach the terminal as commands.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.runtime import read_report, safe_text
from phalanx.supervision import SpecError

from .output import reader_may_leave
from .reports import add_directory, folder_of, told

if TYPE_CHECKING:
    import argparse

    from phalanx.runtime import CrashReport


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command line of this subcommand."""
    parser.add_argument(
        "file", metavar="FILE|latest", help="a report, as `phalanx reports` names it, or the newest"
    )
    add_directory(parser)
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print one report; return the exit code."""
    report = chosen(arguments.file, arguments.directory)
    with reader_may_leave():
        if arguments.json:
            print(json.dumps(json.loads(report.to_json()), indent=2))
        else:
            print("\n".join(map(safe_text, report.render().splitlines())))
    return 0


def chosen(name: str, directory: str | None) -> CrashReport:
    """Return the report that *name* means: a path, a file of the folder, or ``latest``.

    Raises:
        SpecError: there is none, or it is no report; the message names the file.
    """
    if name == "latest":
        folder = folder_of(directory)
        newest = next(told(folder.read()), None)
        if newest is None:
            raise SpecError("directory", str(folder.path), "has no crash reports")
        return newest[1]
    path = Path(name)
    if not path.exists() and path.name == name:
        named = directory or os.environ.get("PHALANX_REPORT_DIR", "")
        path = Path(named) / name if named else path
    file = read_report(path)
    if file.report is None:
        raise SpecError("file", str(path), file.problem)
    return file.report
