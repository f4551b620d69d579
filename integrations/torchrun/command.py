"""``phalanx torchrun``: run an unmodified script for torchrun on supervised processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .agent import run as run_job
from .options import add_arguments, options_of

if TYPE_CHECKING:
    import argparse

__all__ = ["add_arguments", "run"]


def run(arguments: argparse.Namespace) -> int:
    """Run the script; return the exit code."""
    return run_job(options_of(arguments))
