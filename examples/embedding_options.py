"""The command line of the programs that embed, and its checks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence


def parse(
    parser: argparse.ArgumentParser,
    words: Sequence[str] | None,
    *,
    ranks: int,
    kills: int,
    most: int,
) -> argparse.Namespace:
    """Return the options of *words* (None: the command line); *ranks* and *kills* by default."""
    add = parser.add_argument
    add("--ranks", type=int, default=ranks, help=f"worker processes; at most {most}")
    add("--kills", type=int, default=kills, help="ranks to kill while they work")
    add("--seed", type=int, default=0, help="of the moments and ranks of the kills")
    add("--passages", type=int, default=2000, help="passages to embed, 32 to a call")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: one GPU per rank")
    options = parser.parse_args(words)
    calls = len(range(0, options.passages + 1, 32))
    for name, least, limit in (("ranks", 1, most), ("passages", 1, 2500), ("kills", 0, calls - 1)):
        if not least <= (value := getattr(options, name)) <= limit:
            parser.error(f"--{name} {value}: give {least} to {limit}")
    if options.device == "cuda" and (gpus := torch.cuda.device_count()) < options.ranks:
        parser.error(f"--device cuda: {options.ranks} ranks need a GPU each, and {gpus} are here")
    return options
