"""Control groups of this process, of either version, and the CPUs that they and its affinity leave.

The folders need not exist, nor have the files that are looked for.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


MOUNTED = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")


def group_folders(controller: str, groups: Path = MOUNTED, own: Path = OWN) -> Iterator[Path]:
    """Yield where the files of our control group may be.

    Args:
        controller: Whose accounts, as the kernel calls it: "memory", "cpu".
        groups: Where the control groups are mounted.
        own: The file that says which of them this process is in.
    """
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            mounts: tuple[str, ...] = ("", "unified")
        elif controller in controllers.split(","):
            # Controllers that are mounted together share a folder of all their names.
            mounts = tuple(dict.fromkeys((controller, controllers)))
        else:
            continue
        yield from (groups / mount / path.lstrip("/") for mount in mounts)


def nearest(folder: Path, groups: Path = MOUNTED) -> Path:
    """Return *folder*, or where that is not to be seen the nearest around it that is.

    In a container the path may be one of the host's: then the mount is that very group.
    """
    return next((each for each in enclosing(folder, groups) if each.is_dir()), folder)


def enclosing(folder: Path, groups: Path = MOUNTED) -> Iterator[Path]:
    """Yield *folder* and those of the groups around it.

    In a container the path may be one of the host's, of which nothing is to be seen here: then the
    container's own group is the last.
    """
    while folder not in (groups.parent, folder.parent):
        yield folder
        folder = folder.parent


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
