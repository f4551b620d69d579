"""Whether the kernel killed a process for want of memory: what its log and its counters say.

Guarantees: where the log can be read and knows processes by our numbers, it alone decides. Else a
rise of the memory control group's count of kills, between a process's start and its SIGKILL, is
evidence for one death and only one. The count of the whole machine is none: it says that somebody
was killed, anywhere. Without evidence a SIGKILL stays a SIGKILL.

Left to others: kills by a program that watches memory (systemd-oomd, earlyoom): to the kernel those
are ordinary signals. A `MemoryError`, as under ``RLIMIT_AS``, is an exception and no kill.

Source: ``memory.events`` and ``memory.oom_control`` in the kernel's documentation of control
groups.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from .control_group import group_folders, nearest
from .kernel_log import is_kernel_log_told, killed_for_memory

_KILLS = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)
_MACHINE = Path("/proc/vmstat")


@dataclass(frozen=True, slots=True)
class OomSample:
    """The counts at one moment.

    Attributes:
        counter: The file with the count of this process's control group, or None.
        group: That count; None where there is none.
        machine: The count of the whole machine; None where there is none.
    """

    counter: Path | None = None
    group: int | None = None
    machine: int | None = None


class OomEvidence:
    """Counts kills by the out-of-memory killer."""

    def __init__(self) -> None:
        self._spent: dict[Path, int] = {}

    def sample(self) -> OomSample:
        """Return the counts as they are now; of the control group that we are in now."""
        for folder in map(nearest, group_folders("memory")):
            for name in ("memory.events", "memory.oom_control"):
                count = _count(folder / name)
                if count is not None:
                    return OomSample(folder / name, count, _count(_MACHINE))
        return OomSample(machine=_count(_MACHINE))

    def take(self, pid: int, started_at: float, since: OomSample) -> str:
        """Return the evidence for a process that a SIGKILL ended; empty where there is none.

        *since* is the `sample` from before it was started, at *started_at*.
        """
        machine = _count(_MACHINE)
        if machine is not None and machine == since.machine:
            return ""  # nobody was killed so, anywhere: the log need not be read
        line = killed_for_memory(pid, started_at)
        if line == "":
            return ""
        rise = self._rise(since)
        return f"kernel log: {line}" if line is not None else rise

    def _rise(self, since: OomSample) -> str:
        """Return what the count of the control group says, if it says it of no other death."""
        if since.counter is None or since.group is None:
            return ""
        now = _count(since.counter) or 0
        before = max(self._spent.get(since.counter, 0), since.group)
        if now <= before:
            return ""
        self._spent[since.counter] = before + 1
        return f"{since.counter}: oom_kill rose from {since.group} to {now} while it ran"


def oom_sources() -> list[str]:
    """Return what this process can learn of such kills from; empty where nothing tells."""
    found: list[str] = []
    if is_kernel_log_told():
        found.append("the kernel's log")
    counter = OomEvidence().sample().counter
    if counter is not None:
        found.append(f"the count of this control group, {counter}")
    return found


def _count(path: Path) -> int | None:
    found = _KILLS.search("\n".join(_lines(path)))
    return None if found is None else int(found[1])


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
