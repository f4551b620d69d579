"""Which running driver a subcommand is about: by pid, by name, or the only one there is.

Guarantees: a driver of another user is never looked at.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.runtime import safe_text
from phalanx.supervision import SpecError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from phalanx.runtime import DriverStream


def add_driver_arguments(parser: argparse.ArgumentParser) -> None:
    """Have the user name a driver, or ask which there are."""
    parser.add_argument(
        "driver",
        nargs="?",
        default="",
        help="pid or name of the driver; may be left out where only one is running",
    )
    parser.add_argument("--list", action="store_true", help="list the drivers there are, and end")


def print_drivers(drivers: Sequence[DriverStream]) -> None:
    """Print one driver a line."""
    for driver in drivers:
        print(f"{driver.pid}\t{safe_text(driver.name)}")


def choose(drivers: Sequence[DriverStream], wanted: str) -> DriverStream:
    """Return the one of *drivers* whose pid or name is *wanted*, or the only one.

    Raises:
        SpecError: There is none, or more than one; the message lists them.
    """
    found = [one for one in drivers if not wanted or wanted in (str(one.pid), one.name)]
    if len(found) == 1:
        return found[0]
    named = ", ".join(f"{one.pid} ({one.name})" if one.name else str(one.pid) for one in drivers)
    there = f"running: {named}" if drivers else "no driver of yours is running with a stream"
    raise SpecError("driver", wanted, there if not found else f"name one by its pid; {there}")
