"""Follow output, log records and events of a running driver.

Prints new output of the driver and its workers, until the driver ends.

Exit codes:
  0  the driver has ended, or stdout was closed
  2  the command line is invalid, or the driver that it names does not run
  130  Ctrl-C

Examples:
  phalanx logs trainer --rank 3 --level warning
  phalanx logs --json --kind event
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from phalanx.runtime import LEVELS, Observer, render

from .driver_selection import add_driver_arguments, select_driver
from .terminal import rank_number, reader_may_leave

if TYPE_CHECKING:
    import argparse

_LINES = ("stdout", "stderr")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command line of this subcommand."""
    add_driver_arguments(parser)
    add = parser.add_argument
    add("--json", action="store_true", help="one JSON object per line")
    add("--level", default="info", choices=tuple(LEVELS), help="least level of records (info)")
    add("--group", help="only lines and records of this rank group")
    add("--rank", type=rank_number, help="only lines and records of this rank")
    add("--kind", choices=("event", "log", *_LINES), help="only this kind")


def run(arguments: argparse.Namespace) -> int:
    """Follow a driver until it ends, or the reader of stdout does."""
    driver = select_driver(arguments)
    if driver is None:
        return 0
    with reader_may_leave(), Observer(driver) as observer:
        for record in observer:
            if is_wanted(record, arguments):
                data = json.dumps(record).encode() + b"\n" if arguments.json else render(record)
                sys.stdout.buffer.write(data)
                sys.stdout.buffer.flush()
        if observer.missed:
            print(f"missed {observer.missed} messages: too slow", file=sys.stderr)
    return 0


def is_wanted(record: dict[str, Any], arguments: argparse.Namespace) -> bool:
    """Return whether *record* matches the options."""
    if arguments.kind is not None and record["kind"] != arguments.kind:
        return False
    about = record if record["kind"] == "log" else record.get("report", record)
    for key in ("group", "rank"):
        value = getattr(arguments, key)
        if value is not None and about.get(key) != value:
            return False
    if record["kind"] in _LINES:
        return True
    level = LEVELS.get(str(record.get("level", "info")), LEVELS["info"])
    return level >= LEVELS[arguments.level]
