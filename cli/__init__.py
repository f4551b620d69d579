"""The command line: ``phalanx SUBCOMMAND``.

Guarantees:
- Exit codes: 0, success; 1, a check has failed, or what was asked for cannot be had now; 2, the
  command line makes no sense, said in one line on stderr; 130, Ctrl-C.
- Only the module of the subcommand that runs is imported.
- Text that the encoding of stdout lacks is escaped.

Each subcommand is a module, of this folder or of an integration, with ``add_arguments(parser)`` and
``run(arguments)``, which returns the exit code.
"""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from phalanx.supervision import CallerError, PhalanxError

from .terminal import whatever_the_encoding

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main", "parse"]

_SUBCOMMANDS = {
    "chaos": "inject faults into workers under load, and check that nothing is lost",
    "doctor": "check what phalanx needs of this machine",
    "health": "say whether the groups of a running driver are complete",
    "logs": "follow output, log records and events of a running driver",
    "metrics": "serve metrics and health routes of a running driver for Prometheus",
    "reports": "list and show crash reports",
    "top": "show the groups and trees of a running driver, live",
    "torchrun": "run a script for torchrun on ranks that are restarted at once",
    "web": "serve a read-only page of a running driver",
}
_ELSEWHERE = {
    "metrics": "phalanx.integrations.prometheus.command",
    "web": "phalanx.integrations.web.command",
}
_ACTIONS = {"chaos": ("run", "shrink"), "reports": ("list", "show")}  # the first, if none is named
_OLD_NAMES = {"report": ("reports", "show"), "version": ("--version",)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line *arguments* (None: those of this process); return the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        with whatever_the_encoding():
            return _run(words)
    except KeyboardInterrupt:
        return 130


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the parsed command line *arguments*; what makes no sense ends the program."""
    words = list(arguments)
    if words and (new := _OLD_NAMES.get(words[0])):
        print(f"phalanx {words[0]} is now: phalanx {' '.join(new)}", file=sys.stderr)
        words[:1] = new
    actions = _ACTIONS.get(words[0], ()) if words else ()
    if actions and not {*words[1:2]} & {*actions, "-h", "--help"}:
        words.insert(1, actions[0])
    return _parser(words).parse_args(words)


def _run(words: Sequence[str]) -> int:
    parsed = parse(words)
    try:
        code: int = _module(parsed.subcommand).run(parsed)
    except PhalanxError as error:
        print(f"phalanx {parsed.subcommand}: {error}", file=sys.stderr)
        return 2 if isinstance(error, CallerError) else 1
    return code


def _module(subcommand: str) -> Any:
    return import_module(_ELSEWHERE.get(subcommand, f"{__name__}.{subcommand}"))


def _parser(words: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="phalanx", description="Supervised GPU worker actors.", allow_abbrev=False
    )
    parser.add_argument(
        "--version", action="version", version=f"phalanx {version('phalanx')}", help="print it"
    )
    subparsers = parser.add_subparsers(dest="subcommand", metavar="SUBCOMMAND", required=True)
    chosen = next((word for word in words if not word.startswith("-")), None)
    for name, summary in _SUBCOMMANDS.items():
        subparser = subparsers.add_parser(name, help=summary, description=summary.capitalize())
        if name == chosen:
            _module(name).add_arguments(subparser)
    return parser
