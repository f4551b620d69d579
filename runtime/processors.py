"""How many processors this process may use.

Guarantees: no more than its affinity and the quotas of its control groups allow, those around a
container included. It is a look at one moment: both can be changed at any time.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from .control_group import MOUNTED, OWN, enclosing, group_folders

if TYPE_CHECKING:
    from pathlib import Path


def usable_processors(groups: Path = MOUNTED, own: Path = OWN) -> float:
    """Return how many; with a quota that may be a part of one.

    Args:
        groups: Where the control groups are mounted.
        own: The file that says which of them this process is in.
    """
    return min(len(os.sched_getaffinity(0)), *_quotas(groups, own))


def _quotas(groups: Path, own: Path) -> list[float]:
    """Return what each enclosing control group allows, of either version."""
    found: list[float] = [float("inf")]
    for own_folder in group_folders("cpu", groups, own):
        for folder in enclosing(own_folder, groups):
            # "max", or -1, where there is no quota.
            found += _share(_words(folder / "cpu.max"))
            quota, period = folder / "cpu.cfs_quota_us", folder / "cpu.cfs_period_us"
            found += _share(_words(quota) + _words(period))
    return found


def _share(words: list[str]) -> list[float]:
    """Return the processors that a quota and its period come to; none without a quota."""
    if len(words) == 2 and all(word.isdigit() for word in words) and int(words[1]):
        return [int(words[0]) / int(words[1])]
    return []


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []
