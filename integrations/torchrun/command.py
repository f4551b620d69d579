"""Run a script for torchrun on ranks that are restarted at once, as --max-restarts allows.

Takes torchrun's command line and environment variables (PET_*), on one machine.
Options that have no use here are accepted, with a note. Needs the extra
phalanx[torch]. Guide: docs/howto/torchrun.md.

Exit codes:
  0  every rank has succeeded
  1  the run has failed, or a signal has ended it
  2  the command line is invalid

Examples:
  phalanx torchrun --standalone --nproc-per-node 4 --max-restarts 3 train.py --epochs 3
"""

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
