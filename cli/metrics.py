"""``phalanx metrics``: serve metrics and health routes of a running driver for Prometheus."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.integrations.prometheus import command

if TYPE_CHECKING:
    import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command line of this subcommand."""
    command.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Serve; return the exit code."""
    return command.run(arguments)
