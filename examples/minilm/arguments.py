"""The command line that all three pipelines share."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


BOTH = "both"
"""The way of recovering that is each of them in turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What was asked for on the command line.

    Attributes:
        recover: How the group comes back from a death, or `BOTH`; empty where there is one way.
    """

    ranks: int
    kills: int
    seed: int
    passages: int
    batch: int
    device: str
    query: str
    json: bool
    recover: str = ""


def parse(
    name: str,
    about: str,
    most_ranks: int,
    argv: Sequence[str] | None,
    ways: Mapping[str, str] | None = None,
) -> Options:
    """Return the options that were given; end the program where they make no sense.

    Args:
        name: The program's name.
        about: What it does; the text of ``--help``.
        most_ranks: How many ranks the model can be split over.
        argv: What was given; None for the process's own arguments.
        ways: The ways in which its group can recover, and what they mean; None for one only.
    """
    parser = argparse.ArgumentParser(
        prog=name, description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    ranks = f"worker processes, at most {most_ranks} (default 4)"
    add("--ranks", type=_between(1, most_ranks), default=4, metavar="N", help=ranks)
    add("--kills", type=_between(0), default=0, metavar="N", help="SIGKILL N ranks (default 0)")
    add("--seed", type=int, default=0, metavar="S", help="for when and whom (default 0)")
    count = "passages to embed (default 5000)"
    add("--passages", type=_between(1), default=5000, metavar="N", help=count)
    add("--batch", type=_between(1), default=32, metavar="N", help="passages a call (default 32)")
    where = "cpu, or cuda with one GPU for each rank (default cpu)"
    add("--device", choices=("cpu", "cuda"), default="cpu", help=where)
    add("--query", default="how do I open a file", metavar="TEXT", help="what to look for")
    add("--json", action="store_true", help="print the result as one JSON object")
    if ways:
        meant = [f"{way}: {meaning}" for way, meaning in ways.items()]
        told = "; ".join([*meant, f"{BOTH}: for half of the work each (default {BOTH})"])
        add("--recover", choices=(*ways, BOTH), default=BOTH, help=told)
    return Options(**vars(parser.parse_args(argv)))


def _between(least: int, most: int | None = None) -> Callable[[str], int]:
    def number(text: str) -> int:
        value = int(text)
        if value < least or (most is not None and value > most):
            limits = f"at least {least}" if most is None else f"from {least} to {most}"
            raise argparse.ArgumentTypeError(f"{value} is not {limits}")
        return value

    return number
