"""``phalanx health``: whether every group of a running driver serves with all of its ranks.

The exit code is 0 or 1, for probes; one line on stdout says why.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.runtime import Observer, find_drivers, first_picture
from phalanx.supervision import RuntimeFault, SpecError

from .select_driver import choose

if TYPE_CHECKING:
    import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command line of this subcommand."""
    whom = "pid or name of the driver; may be left out if only one is running"
    parser.add_argument("driver", nargs="?", default="", help=whom)
    parser.add_argument(
        "--live", action="store_true", help="only whether the driver answers, whatever its groups"
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=10.0,
        metavar="S",
        help="seconds for the driver's answer (10)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Look at a driver once; return 0 if it is well."""
    try:
        driver = choose(find_drivers(), arguments.driver)
        with Observer(driver, watch=True) as observer:
            picture = first_picture(observer, driver, arguments.timeout)
        problem = "" if arguments.live else picture.incomplete()
        groups = len(picture.groups)
    except (RuntimeFault, SpecError) as error:
        problem, groups = str(error), 0
    print(problem or f"ok: {groups} {'group' if groups == 1 else 'groups'}")
    return 1 if problem else 0
