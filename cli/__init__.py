"""The command line: ``phalanx SUBCOMMAND``.

Guarantees:
- Exit codes: 0, success; 1, a check has failed, or the request cannot be met now; 2, the
  command line is invalid, and stderr says how; 130, Ctrl-C.
- Only the module of the subcommand that runs is imported; without a valid one, all are.
- Text that the encoding of stdout lacks is escaped; stdout may be closed early (``| head``).

Each subcommand is a module, of this folder or of another layer, with ``add_arguments(parser)`` and
``run(arguments)``, which returns the exit code. Its docstring is the page that ``--help`` shows; so
is that of the function of an action.
"""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from phalanx.runtime import safe_text
from phalanx.supervision import CallerError, PhalanxError

from .terminal import add_page, reader_may_leave, whatever_the_encoding

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["SUBCOMMANDS", "main", "parse", "parser_of"]

SUBCOMMANDS = (
    *("chaos", "completion", "doctor", "health", "logs", "metrics", "node", "reports", "top"),
    *("torchrun", "web"),
)
_ELSEWHERE = {
    "metrics": "phalanx.integrations.prometheus.command",
    "node": "phalanx.cluster.join.command",
    "torchrun": "phalanx.integrations.torchrun.command",
    "web": "phalanx.integrations.web.command",
}
_ACTIONS = {"chaos": ("run", "shrink"), "reports": ("list", "show")}  # the first, if none is named
_OLD_NAMES = {"report": ("reports", "show"), "version": ("--version",)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line *arguments* (None: those of this process); return the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    code = 1  # where the reader of stdout leaves before the end
    try:
        with whatever_the_encoding(), reader_may_leave():
            code = _run(words)
    except KeyboardInterrupt:
        return 130
    return code


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the parsed command line *arguments*; an invalid one ends the program."""
    words = list(arguments)
    if words and (new := _OLD_NAMES.get(words[0])):
        print(f"phalanx {words[0]} is now: phalanx {' '.join(new)}", file=sys.stderr)
        words[:1] = new
    actions = _ACTIONS.get(words[0], ()) if words else ()
    if actions and not {*words[1:2]} & {*actions, "-h", "--help"}:
        words.insert(1, actions[0])
    chosen = next((word for word in words if not word.startswith("-")), "")
    return parser_of(chosen).parse_args(words)


def _run(words: Sequence[str]) -> int:
    parsed = parse(words)
    try:
        code: int = _module(parsed.subcommand).run(parsed)
    except PhalanxError as error:
        told = f"phalanx {parsed.subcommand}: {error}".splitlines()
        print(*map(safe_text, told), sep="\n", file=sys.stderr)
        return 2 if isinstance(error, CallerError) else 1
    return code


def _module(subcommand: str) -> Any:
    return import_module(_ELSEWHERE.get(subcommand, f"{__name__}.{subcommand}"))


def parser_of(*chosen: str) -> argparse.ArgumentParser:
    """Return the parser of the command line; of the *chosen* subcommands, if there are such."""
    parser = argparse.ArgumentParser(
        prog="phalanx",
        description="Supervised GPU worker actors.",
        epilog="exit codes: 0 success, 1 a check failed, 2 invalid command line, 130 Ctrl-C; "
        "`phalanx SUBCOMMAND --help` says more",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--version", action="version", version=f"phalanx {version('phalanx')}", help="print it"
    )
    subparsers = parser.add_subparsers(dest="subcommand", metavar="SUBCOMMAND", required=True)
    for name in [name for name in chosen if name in SUBCOMMANDS] or SUBCOMMANDS:
        module = _module(name)
        module.add_arguments(add_page(subparsers, name, module))
    return parser
