"""``phalanx torchrun``: run an unmodified script for torchrun on supervised processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.integrations import torchrun

if TYPE_CHECKING:
    import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command line of this subcommand."""
    torchrun.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the script; return the exit code."""
    return torchrun.run(torchrun.options_of(arguments))
