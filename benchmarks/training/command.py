"""``python -m benchmarks training``: what training through kills costs, and whether it stays exact.

torch is imported when it runs, so that no other measurement has it.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from benchmarks.harness.arguments import (
    add_json,
    add_peer_env,
    check_writable,
    count,
    give,
    several,
    span,
)
from benchmarks.harness.machine import describe, sentence
from benchmarks.harness.venvs import Environments
from phalanx.supervision import SpecError

from .ranks.notes import BLOCK

if TYPE_CHECKING:
    import argparse

_SCRIPT = "phalanx torchrun"  # goes on from a checkpoint of the script's
_EXACT = ("DDP, survivors kept", "DDP, all anew", "FSDP2, survivors kept", f"{_SCRIPT}, memory")
OURS = (*_EXACT, _SCRIPT)
FORMS = (*OURS, "torchrun", "NVRx in-process", "torchft")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Take what is measured, and how long."""
    add = parser.add_argument
    add("--ranks", type=several(count), default=[2, 4], help="one after the other (default 2,4)")
    add("--seconds", type=span, default=600.0, help="of each run with kills (default 600)")
    add("--cadence", type=count, default=15, help="seconds from kill to kill (default 15)")
    add("--calm", type=span, default=20.0, help="seconds before those (default 20)")
    add("--rounds", type=int, default=30, help="of the steady cost; 0 for none (default 30)")
    text = (
        f"steps of one; no fewer than from one state in the buffers to the next (default {BLOCK})"
    )
    add("--block", type=count, default=BLOCK, help=text)
    add("--width", type=count, default=256, help="of the model, a multiple of 4 (default 256)")
    add("--layers", type=count, default=4, help="of the model (default 4: 3.3 M parameters)")
    add("--form", choices=FORMS, action="append", help="only these; may be given again")
    add("--seed", type=int, default=1, help="of the kills")
    add("--every", type=count, help="steps between buffers, for ours (default: as Training has it)")
    add("--reserves", type=count, default=4, help="ranks that wait, for NVRx (default 4)")
    add("--patience", type=span, default=150.0, help="seconds without a step (default 150)")
    add_peer_env(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; return 0 if every hash that is to be equal is, 130 after Ctrl-C."""
    from .measure import Measurement  # noqa: PLC0415  # imports torch
    from .table import render  # noqa: PLC0415

    check_writable("json", arguments.json)
    if arguments.width % 4:
        raise SpecError("width", arguments.width, "the model has 4 heads: give a multiple of 4")
    environments = Environments(arguments.peer_env)
    machine, code = describe(), 0
    runs = [Measurement(ranks, arguments, environments) for ranks in arguments.ranks]
    try:
        for each in runs:
            each.run()
    except KeyboardInterrupt:
        print("\nended by Ctrl-C; this is what there was", file=sys.stderr)
        code = 130
    found = [one for each in runs for one in each.found]
    values = {"machine": machine, "runs": [asdict(each) for each in found]}
    give(arguments, values, f"{sentence(machine)}\n\n{render(found, arguments)}")
    return code or int(not all(each.equal for each in found if each.system in _EXACT))
