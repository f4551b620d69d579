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


def group_folders(controller: str) -> Iterator[Path]:
    """Yield where the files of our control group may be for *controller*, "memory" or "cpu"."""
    try:
        lines = OWN.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        mounts: tuple[str, ...] = ()
        if not controllers:
            mounts = ("", "unified")
        elif controller in controllers.split(","):
            # Controllers that are mounted together share a folder of all their names.
            mounts = tuple(dict.fromkeys((controller, controllers)))
        yield from (MOUNTED / mount / path.lstrip("/") for mount in mounts)


def nearest(folder: Path) -> Path:
    """Return *folder*, or if it cannot be seen the nearest group around it that can."""
    return next((each for each in enclosing(folder) if each.is_dir()), folder)


def enclosing(folder: Path) -> Iterator[Path]:
    """Yield *folder* and the groups around it.

    In a container the path may be one of the host's, of which nothing can be seen here: then the
    mount, the last of them, is the container's own group.
    """
    while folder not in (MOUNTED.parent, folder.parent):
        yield folder
        folder = folder.parent


def usable_processors() -> float:
    """Return how many; with a quota that may be a part of one."""
    least = float(len(os.sched_getaffinity(0)))
    for own in group_folders("cpu"):
        for folder in enclosing(own):
            for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
                words = [word for name in names for word in _words(folder / name)]
                # "max", or -1, where there is no quota.
                if len(words) == 2 and all(word.isdigit() for word in words) and int(words[1]):
                    least = min(least, int(words[0]) / int(words[1]))
    return least


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []
