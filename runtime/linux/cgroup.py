"""Control groups of this process, of either version: processors that they leave, kills for memory.

- The folders need not exist, nor have the expected files.
- A rise of a group's count of kills for lack of memory, between a process's start and its SIGKILL,
  is evidence for one death and only one. Without it a SIGKILL stays a SIGKILL.
- Kills by a program that monitors memory (systemd-oomd, earlyoom) are ordinary signals. A
  `MemoryError`, as under ``RLIMIT_AS``, is an exception and no kill.

Source: ``memory.events`` and ``memory.oom_control`` in the kernel's documentation of control
groups.
"""

from __future__ import annotations

import os
import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


MOUNTED = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
_KILLS: Final = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


def content(path: Path) -> str:
    """Return what the file *path* holds; empty if it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""


def group_folders(controller: str) -> Iterator[Path]:
    """Yield where the files of our control group may be for *controller*, "memory" or "cpu"."""
    for line in content(OWN).splitlines():
        _, controllers, path = line.split(":", 2)
        mounts: tuple[str, ...] = ()
        if not controllers:
            mounts = ("", "unified")
        elif controller in controllers.split(","):
            # Controllers that are mounted together share a folder of all their names.
            mounts = tuple(dict.fromkeys((controller, controllers)))
        yield from (MOUNTED / mount / path.lstrip("/") for mount in mounts)


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
                # "max", or -1, where there is no quota.
                words = " ".join(content(folder / name) for name in names).split()
                if len(words) == 2 and all(word.isdigit() for word in words) and int(words[1]):
                    least = min(least, int(words[0]) / int(words[1]))
    return least


class OomCounter:
    """Counts kills by the out-of-memory killer."""

    def __init__(self) -> None:
        self._spent: dict[Path, int] = {}

    def watch(self) -> Callable[[], str]:
        """Return what gives the evidence that a process which is started now was killed so."""
        found = oom_count()
        return (lambda: "") if found is None else partial(self._take, *found)

    def _take(self, counter: Path, kills: int) -> str:
        now = _count(counter) or 0
        before = max(self._spent.get(counter, 0), kills)
        if now <= before:
            return ""
        self._spent[counter] = before + 1
        return f"{counter}: oom_kill rose from {kills} to {now} while it ran"


def oom_count() -> tuple[Path, int] | None:
    """Return the file that counts the kills in the control group of this process, and the count."""
    for own in group_folders("memory"):
        # The nearest group around it that can be seen.
        folder = next((each for each in enclosing(own) if each.is_dir()), own)
        for name in ("memory.events", "memory.oom_control"):
            kills = _count(folder / name)
            if kills is not None:
                return folder / name, kills
    return None


def _count(path: Path) -> int | None:
    found = _KILLS.search(content(path))
    return None if found is None else int(found[1])
