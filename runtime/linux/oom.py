"""Evidence that the kernel killed a process because memory ran out: its control group's counter.

- A rise of the group's count of such kills, between a process's start and its SIGKILL, is evidence
  for one death and only one. Without it a SIGKILL stays a SIGKILL.
- Kills by a program that watches memory (systemd-oomd, earlyoom) are ordinary signals. A
  `MemoryError`, as under ``RLIMIT_AS``, is an exception and no kill.

Source: ``memory.events`` and ``memory.oom_control`` in the kernel's documentation of control
groups.
"""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING, Final

from . import procfs
from .cgroup import group_folders, nearest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_KILLS: Final = re.compile(rb"^oom_kill (\d+)$", re.MULTILINE)


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
    for folder in map(nearest, group_folders("memory")):
        for name in ("memory.events", "memory.oom_control"):
            kills = _count(folder / name)
            if kills is not None:
                return folder / name, kills
    return None


def _count(path: Path) -> int | None:
    found = _KILLS.search(procfs.content(str(path)) or b"")
    return None if found is None else int(found[1])
