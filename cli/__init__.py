"""The command line: ``phalanx SUBCOMMAND``.

Guarantees: a mistake of the user is one line on stderr and exit code 2, never a traceback; a
subcommand that is not run is not paid for; text that the encoding of stdout lacks is escaped.

Left to others: each subcommand is a module of this folder, named as in `_SUBCOMMANDS`, with
``add_arguments(parser)`` and ``run(arguments) -> exit code``.
"""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING

from phalanx.supervision import CallerError

from .output import whatever_the_encoding

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]

_SUBCOMMANDS = {
    "chaos": "do faults to your workers under traffic, and say whether anything was lost",
    "doctor": "say what this machine has, what is missing, and what to do about it",
    "logs": "follow what a running driver and its workers write",
    "report": "tell of one death: what died, of what, doing what, and what was decided",
    "reports": "list the deaths that a folder of crash reports tells of",
    "run": "run an example, or a function of yours",
    "top": "show a running driver's groups and trees, live",
    "version": "print the versions of phalanx and of what it stands on",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line *arguments* (None: those of this process); return the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        with whatever_the_encoding():
            return _run(words)
    except KeyboardInterrupt:
        return 130


def _run(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="phalanx",
        description="Supervised GPU worker actors.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--version", action="version", version=f"phalanx {version('phalanx')}", help="print it"
    )
    subparsers = parser.add_subparsers(dest="subcommand", metavar="SUBCOMMAND", required=True)
    chosen = next((word for word in words if not word.startswith("-")), None)
    for name, summary in _SUBCOMMANDS.items():
        subparser = subparsers.add_parser(name, help=summary, description=summary.capitalize())
        if name == chosen:
            import_module(f".{name}", __name__).add_arguments(subparser)
    parsed = parser.parse_args(words)
    try:
        code: int = import_module(f".{parsed.subcommand}", __name__).run(parsed)
    except CallerError as error:
        print(f"phalanx {parsed.subcommand}: {error}", file=sys.stderr)
        return 2
    return code
