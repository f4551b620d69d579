"""``phalanx logs``: follow what a running driver and its workers write, from outside.

Guarantees: it only listens; a driver of another user is never looked at. Ends when the driver ends.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from phalanx.runtime import LEVELS, Observer, find_drivers, render
from phalanx.supervision import CallerError, PhalanxError

from .driver import add_driver_arguments, choose, print_drivers
from .output import reader_may_leave

if TYPE_CHECKING:
    import argparse


_LINES = ("stdout", "stderr")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command line of this subcommand."""
    add_driver_arguments(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    parser.add_argument(
        "--level", default="info", choices=tuple(LEVELS), help="least level of records (info)"
    )
    parser.add_argument("--group", help="only lines and records of this rank group")
    parser.add_argument("--rank", type=int, help="only lines and records of this rank")
    parser.add_argument("--kind", choices=("event", "log", *_LINES), help="only this kind")


def run(arguments: argparse.Namespace) -> int:
    """Follow a driver until it ends, or the user has enough; return the exit code."""
    drivers = find_drivers()
    if arguments.list:
        print_drivers(drivers)
        return 0
    try:
        driver = choose(drivers, arguments.driver)
        with reader_may_leave(), Observer(driver) as observer:
            for record in observer:
                if is_wanted(record, arguments):
                    _show(record, as_json=arguments.json)
            if observer.missed:
                print(f"missed {observer.missed} messages: too slow", file=sys.stderr)
    except CallerError:
        raise  # a mistake of the user's: `main` reports it
    except PhalanxError as error:
        print(f"phalanx logs: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def is_wanted(record: dict[str, Any], arguments: argparse.Namespace) -> bool:
    """Return whether *record* is one of those the user asked for."""
    if arguments.kind is not None and record["kind"] != arguments.kind:
        return False
    about = record.get("report") or record
    for key in ("group", "rank"):
        value = getattr(arguments, key)
        if value is not None and about.get(key) != value:
            return False
    if record["kind"] in _LINES:
        return True
    level = LEVELS.get(str(record.get("level", "info")), LEVELS["info"])
    return level >= LEVELS[arguments.level]


def _show(record: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(record), flush=True)
    else:
        sys.stdout.buffer.write(render(record))
        sys.stdout.buffer.flush()
