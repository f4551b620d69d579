"""``python -m benchmarks training``: what training through kills costs, and whether it stays exact.

torch is imported when it runs, so that no other measurement has it.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from benchmarks.harness.arguments import add_json, check_writable, count, give, several
from benchmarks.harness.machine import describe, sentence

if TYPE_CHECKING:
    import argparse

FORMS = ("DDP, survivors kept", "DDP, all anew", "FSDP2, survivors kept")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Take what is measured, and how long."""
    add = parser.add_argument
    add("--ranks", type=several(count), default=[2, 4], help="one after the other (default 2,4)")
    add("--seconds", type=float, default=600.0, help="of each run with kills (default 600)")
    add("--cadence", type=float, default=15.0, help="seconds from kill to kill (default 15)")
    add("--rounds", type=count, default=30, help="steps with and without protection (default 30)")
    add("--width", type=count, default=256, help="of the model, a multiple of 4 (default 256)")
    add("--layers", type=count, default=4, help="of the model (default 4: 3.3 M parameters)")
    add("--form", choices=FORMS, action="append", help="only these")
    add("--seed", type=int, default=1, help="of the kills")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; return 0 if every hash is equal."""
    from .kills import measure, render  # noqa: PLC0415  # imports torch

    check_writable("--json", arguments.json)
    machine = describe()
    found = [
        measure(form, ranks, arguments)
        for ranks in arguments.ranks
        for form in arguments.form or FORMS
    ]
    values = {"machine": machine, "runs": [asdict(each) for each in found]}
    give(arguments, values, f"{sentence(machine)}\n\n{render(found)}")
    return 0 if all(each.equal for each in found) else 1
