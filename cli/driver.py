"""Which running driver a subcommand is about: by pid, by name, or the only one there is.

Guarantees: a driver of another user is never looked at.
"""

from __future__ import annotations

import datetime as dt
import time
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.runtime import safe_text
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
    """Print one driver a line: pid, name, for how long it has run, command line."""
    for driver in drivers:
        up = dt.timedelta(seconds=int(max(0.0, time.time() - driver.started_at)))
        words = (driver.pid, safe_text(driver.name) or "-", f"up {up}", _command_of(driver.pid))
        print(*words, sep="\t")


def _command_of(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""
    return safe_text(words.strip("\0").replace("\0", " "))[:_WIDTH]


def choose(drivers: Sequence[DriverStream], wanted: str) -> DriverStream:
    """Return the one of *drivers* whose pid or name is *wanted*, or the only one.

    Raises:
        SpecError: There is none, or more than one; the message lists them.
    """
    found = [one for one in drivers if not wanted or wanted in (str(one.pid), one.name)]
    if len(found) == 1:
        return found[0]
    named = ", ".join(f"{one.pid} ({one.name})" if one.name else str(one.pid) for one in drivers)
    there = f"running: {named}" if drivers else _NONE
    raise SpecError("driver", wanted, there if not found else f"name one by its pid; {there}")
