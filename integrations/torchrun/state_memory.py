"""The memory in which scripts keep their state from round to round; the launcher holds it."""

from __future__ import annotations

import os

from phalanx.runtime import make_shared_file

VARIABLE = "PHALANX_STATE_MEMORY"
_PAGE = 4096  # bytes that a file has before it is used
_RANKS = 64  # of the table, for each page


def make_state_memory(world_size: int) -> str:
    """Return the value of `VARIABLE` for all ranks: the paths of two files of each, and a table."""
    names = [f"rank-{rank}.{each}" for rank in range(world_size) for each in "ab"]
    size = _PAGE * (1 + world_size // _RANKS)
    return ":".join(make_shared_file(f"phalanx-{name}", size)[0] for name in (*names, "table"))


def find_state_memory() -> tuple[tuple[tuple[str, str], ...], str] | None:
    """Return the two paths of each rank, and the table's; None if nothing is kept."""
    if not (value := os.environ.get(VARIABLE)):
        return None
    *slots, table = value.split(":")
    return tuple(zip(slots[::2], slots[1::2], strict=True)), table
