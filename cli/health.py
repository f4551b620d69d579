"""Say whether the groups of a running driver are complete.

Queries the driver once and prints one line, for the probes of a container or a
service. A wrong name or pid of the driver is a failed check as well.

Exit codes:
  0  every group serves with all of its ranks
  1  a rank is missing, the driver does not answer, or there is no such driver
  2  an option is invalid
  130  Ctrl-C

Examples:
  phalanx health
  phalanx health --live --timeout 2 trainer
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from phalanx.runtime import Observer, find_drivers, first_picture, safe_text
from phalanx.supervision import RuntimeFault, SpecError, check_number

from .driver_selection import add_driver_argument, choose

if TYPE_CHECKING:
    import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command line of this subcommand."""
    add_driver_argument(parser)
    add = parser.add_argument
    live = "only whether the driver answers, whatever its groups"
    add("--live", action="store_true", help=live)
    limit = "seconds for the driver's answer (10)"
    add("--timeout", type=float, default=10.0, metavar="S", help=limit)


def run(arguments: argparse.Namespace) -> int:
    """Look at a driver once; return 0 if it is well."""
    limit = check_number("--timeout", arguments.timeout, least=0.001, most=86400)
    try:
        driver = choose(find_drivers(), arguments.driver)
        with Observer(driver, watch=True) as observer:
            picture = first_picture(observer, driver, limit)
        problem = "" if arguments.live else picture.incomplete()
        groups = len(picture.groups)
    except (RuntimeFault, SpecError) as error:
        print(f"phalanx health: {safe_text(str(error))}", file=sys.stderr)
        return 1
    print(safe_text(problem) or f"ok: {groups} {'group' if groups == 1 else 'groups'}")
    return 1 if problem else 0
