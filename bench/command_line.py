"""``phalanx bench WHAT``: which measurements there are.

Left to others: each is a module of this folder with ``add_arguments(parser)`` and
``run(arguments) -> exit code``.
"""

from __future__ import annotations

import signal
import sys
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse
    from types import FrameType

_COMMANDS = {
    "rpc": ("rpc_command", "how long a call takes, beside what a user could use instead"),
    "recovery": ("recovery", "how long a group is gone when a rank is killed"),
    "kill": ("kill", "what becomes of calls and machines when something is killed"),
    "startup": ("startup", "how long ranks take to start, beside multiprocessing"),
    "supervision": ("supervision", "what supervision costs by the number of children"),
    "peers": ("peers_command", "where peers are installed, and install them"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command line of ``phalanx bench``."""
    subparsers = parser.add_subparsers(dest="bench", metavar="WHAT", required=True)
    for name, (module, summary) in _COMMANDS.items():
        subparser = subparsers.add_parser(name, help=summary, description=summary.capitalize())
        import_module(f".{module}", __package__).add_arguments(subparser)


def run(arguments: argparse.Namespace) -> int:
    """Run the measurement that was chosen; return the exit code."""
    # A run has processes to end: SIGTERM is to unwind it, as Ctrl-C does.
    previous = signal.signal(signal.SIGTERM, _leave)
    try:
        module = import_module(f".{_COMMANDS[arguments.bench][0]}", __package__)
        code: int = module.run(arguments)
    finally:
        signal.signal(signal.SIGTERM, previous)
    return code


def _leave(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)
