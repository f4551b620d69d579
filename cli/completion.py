"""Print a script that completes phalanx's command line in a shell.

Prints to stdout. It completes subcommands, options, their choices and file
names. Needs the extra phalanx[cli].

Exit codes:
  0  printed
  1  the extra is not installed
  2  the command line is invalid

Examples:
  phalanx completion bash > ~/.local/share/bash-completion/completions/phalanx
  phalanx completion zsh > "${fpath[1]}/_phalanx"
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.supervision import require_package

from . import SUBCOMMANDS, parser_of

if TYPE_CHECKING:
    import argparse

_FILES = {"DIR", "FILE", "FILE.html", "FILE|latest", "RUN"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command line of this subcommand."""
    parser.add_argument("shell", choices=("bash", "tcsh", "zsh"), help="the shell")


def run(arguments: argparse.Namespace) -> int:
    """Print the script."""
    require_package("shtab", "cli")
    shtab: Any = import_module("shtab")
    parser = parser_of(*SUBCOMMANDS)
    _mark_files(parser, shtab.FILE)
    print(shtab.complete(parser, arguments.shell))
    return 0


def _mark_files(parser: Any, files: object) -> None:
    """Have what takes the name of a file, in *parser* and its subcommands, completed so."""
    for action in parser._actions:  # noqa: SLF001  # shtab walks it in the same way
        for subparser in getattr(action.choices, "values", tuple)():
            _mark_files(subparser, files)
        if action.type is Path or action.metavar in _FILES or action.dest == "training_script":
            action.complete = files
