"""Choice of a running driver: by pid, by name, or the only one; drivers of this user alone."""

from __future__ import annotations

import datetime as dt
import time
from typing import TYPE_CHECKING

from phalanx.runtime import find_drivers, procfs, safe_text
from phalanx.supervision import SpecError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from phalanx.runtime import DriverStream

_NONE = (
    "no program of this user has a phalanx executor or supervisor just now; one that was started "
    "with Runtime(stream=False), as another user, or in another container cannot be seen from here"
)
_WIDTH = 100  # characters of a command line


def add_driver_argument(parser: argparse.ArgumentParser) -> None:
    """Describe how a driver is chosen."""
    whom = "pid or name of the driver; may be left out if only one is running"
    parser.add_argument("driver", nargs="?", default="", help=whom)


def add_driver_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe how a driver is chosen, or all are listed."""
    add_driver_argument(parser)
    parser.add_argument("--list", action="store_true", help="list the running drivers, and end")


def select_driver(arguments: argparse.Namespace) -> DriverStream | None:
    """Return the driver that the user has chosen; None once all are listed, if that was the option.

    Raises:
        SpecError: there is none, or more than one; the message lists them. Or the list is wanted
            with an option that it does not take.
    """
    drivers = find_drivers()
    if not arguments.list:
        return choose(drivers, arguments.driver)
    if arguments.driver or arguments.json or getattr(arguments, "once", False):
        raise SpecError("--list", True, "give it alone: it lists all drivers, as text")
    for driver in drivers:
        command = safe_text(procfs.command(driver.pid))[:_WIDTH]
        name = safe_text(driver.name) or "-"
        print(driver.pid, name, f"up {uptime(driver)}", command, sep="\t")
    return None


def choose(drivers: Sequence[DriverStream], wanted: str) -> DriverStream:
    """Return the one of *drivers* whose pid or name is *wanted*, or the only one.

    Of several in one process it is the newest.
    """
    found = [one for one in drivers if not wanted or wanted in (str(one.pid), one.name)]
    if len({one.pid for one in found}) == 1:
        return found[-1]
    named = ", ".join(f"{one.pid} ({one.name})" if one.name else str(one.pid) for one in drivers)
    there = f"running: {named}" if drivers else _NONE
    raise SpecError("driver", wanted, there if not found else f"name one by its pid; {there}")


def uptime(driver: DriverStream) -> dt.timedelta:
    """Return for how many whole seconds *driver* has run."""
    return dt.timedelta(seconds=int(max(0.0, time.time() - driver.started_at)))
