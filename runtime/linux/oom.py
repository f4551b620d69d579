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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from . import procfs
from .cgroup import group_folders, nearest

if TYPE_CHECKING:
    from pathlib import Path

_KILLS: Final = re.compile(rb"^oom_kill (\d+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class OomSample:
    """The count at one moment; *counter* is the group's file, None if there is none."""

    counter: Path | None = None
    kills: int = 0


class OomCounter:
    """Counts kills by the out-of-memory killer."""

    def __init__(self) -> None:
        self._spent: dict[Path, int] = {}

    def sample(self) -> OomSample:
        """Return the count as it is now, of the control group that this process is in now."""
        for folder in map(nearest, group_folders("memory")):
            for name in ("memory.events", "memory.oom_control"):
                kills = _count(folder / name)
                if kills is not None:
                    return OomSample(folder / name, kills)
        return OomSample()

    def take(self, since: OomSample) -> str:
        """Return the evidence for one process started after *since* and killed, or empty."""
        if since.counter is None:
            return ""
        now = _count(since.counter) or 0
        before = max(self._spent.get(since.counter, 0), since.kills)
        if now <= before:
            return ""
        self._spent[since.counter] = before + 1
        return f"{since.counter}: oom_kill rose from {since.kills} to {now} while it ran"


def _count(path: Path) -> int | None:
    found = _KILLS.search(procfs.content(str(path)) or b"")
    return None if found is None else int(found[1])
