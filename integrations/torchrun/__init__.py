"""``phalanx torchrun``: torchrun's command line for an unmodified script, on supervised processes.

Guarantees: options, environment variables, log folders, error files, exit codes and the summary of
the first failure are torchrun's (as of torch 2.13), on one machine. Ranks are forked from a process
that has imported torch; each round has a new store and a new port; nothing is left behind.

The driver does not import torch. Differences from torchrun: ``docs/howto/torchrun.md``.
"""

from __future__ import annotations

from .agent import run
from .options import Options, add_arguments, options_of

__all__ = ["Options", "add_arguments", "options_of", "run"]
