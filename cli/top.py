"""Show the groups and trees of a running driver, live.

Shows the supervisors, groups and ranks of a driver from outside: running and
served calls, memory and restarts. The status is requested once a second while
a viewer is attached, and not otherwise. Ctrl-C ends it. Where stdout is no
terminal, or a dumb one, it is as with --once.
Needs the extra phalanx[cli], except with --json.

Exit codes:
  0  the driver has ended, or one picture was printed
  1  the driver does not answer, or the extra is not installed
  2  the command line is invalid, or the driver that it names does not run
  130  Ctrl-C

Examples:
  phalanx top
  phalanx top trainer --once
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from phalanx.runtime import Observer, first_picture
from phalanx.supervision import require_package

from .driver_selection import add_driver_arguments, select_driver
from .terminal import reader_may_leave

if TYPE_CHECKING:
    import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command line of this subcommand."""
    add_driver_arguments(parser)
    parser.add_argument("--once", action="store_true", help="show one picture, and end")
    parser.add_argument("--json", action="store_true", help="print one picture as JSON, and end")


def run(arguments: argparse.Namespace) -> int:
    """Show a driver until it ends, or the user has enough."""
    driver = select_driver(arguments)
    if driver is None:
        return 0
    if not arguments.json:
        require_package("rich", "cli")
    with reader_may_leave(), Observer(driver, watch=True) as observer:
        if arguments.json:
            first = first_picture(observer, driver)
            shown = {"driver": asdict(driver), "groups": first.groups, "trees": first.trees}
            print(json.dumps(shown, indent=2))
        else:
            from .top_view import follow, show

            is_live = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
            if arguments.once or not is_live:
                show(driver, first_picture(observer, driver))
            else:
                follow(driver, observer)
    return 0
