"""The processes of an engine's ranks, found from outside, and what is done to them.

Guarantees: found by the titles that both executors give their workers, among the descendants of one
process; nothing else is ever sent a signal.
"""

from __future__ import annotations

import os
import re
import signal
import time
from contextlib import suppress
from pathlib import Path

from phalanx.runtime import procfs

_TITLE = re.compile(r"^(?:phalanx: vllm-\S+ rank (\d+)/|VLLM::Worker_[TP]P(\d+))")


def find_ranks(root: int) -> dict[int, int]:
    """Return the process of each rank below the process *root*."""
    found: dict[int, int] = {}
    for pid in below(root):
        with suppress(OSError):
            match = _TITLE.match(Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " "))
            if match:
                found[int(match[1] or match[2])] = pid
    return found


def below(root: int) -> list[int]:
    """Return the processes that descend from *root*, but for those that have ended."""
    found = procfs.descendants(procfs.read_all(), [root])
    return [pid for pid, task in found.items() if not task.is_dead]


def strike(
    root: int, ranks: tuple[int, ...], number: signal.Signals = signal.SIGKILL
) -> float | None:
    """Send *ranks* the signal; return when, on the monotonic clock; None if there was none."""
    found, at = find_ranks(root), None
    for rank in ranks:
        if rank in found:
            with suppress(ProcessLookupError):
                os.kill(found[rank], number)
                at = time.monotonic()
    return at


def wait_new_ranks(root: int, old: dict[int, int], deadline: float) -> dict[int, int]:
    """Return the first processes of ranks that are none of *old*."""
    while time.monotonic() < deadline:
        new = {rank: pid for rank, pid in find_ranks(root).items() if old.get(rank) != pid}
        if new:
            return new
        time.sleep(0.005)  # there is no event for the birth of a stranger's child
    msg = "no rank was started again"
    raise TimeoutError(msg)
