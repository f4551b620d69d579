"""``python -m benchmarks peers``: where peers are, and ``--install`` to have them."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

from phalanx.supervision import SpecError

from .arguments import add_peer_env
from .tables import table
from .venvs import RECIPES, Environments, folder, install

if TYPE_CHECKING:
    import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command line."""
    parser.add_argument(
        "--install",
        nargs="+",
        default=[],
        metavar="NAME",
        help=f"make environments for {', '.join(RECIPES)}, anew where there are some; uses pip",
    )
    add_peer_env(parser)


def run(arguments: argparse.Namespace) -> int:
    """Install what was asked for, and show what there is."""
    for name in arguments.install:
        if name not in RECIPES:
            raise SpecError("install", name, f"no such peer; there are {', '.join(RECIPES)}")
    for name in arguments.install:
        try:
            install(name)
        except subprocess.CalledProcessError as error:
            print(f"{name}: pip ended with exit code {error.returncode}; see above")
            return 1
    environments = Environments(arguments.peer_env)
    rows = [
        (name, environments.python(name) or "absent", " ".join((*recipe.needs, recipe.bare or "")))
        for name, recipe in RECIPES.items()
    ]
    print(f"looked in {folder()}\n")
    print(table(("peer", "interpreter", "made from"), rows))
    return 0
