"""Whether the kernel ran out of memory: the counters, before and after a death.

Guarantees: a rise of the counter of out-of-memory kills is attributed to one SIGKILL and only one;
what rose before the process was started is nobody's evidence.

Left to others: saying what it means. The counter is the control group's where there is one, else
the machine's, and both count other people's processes too: it is evidence, not proof.
"""

from __future__ import annotations

import re
from pathlib import Path

_KILLS = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


class OutOfMemoryCounter:
    """Counts kills by the out-of-memory killer, in this process's control group if it can."""

    def __init__(self) -> None:
        self._path, self._where = _source()
        self._spent = 0

    def sample(self) -> int:
        """Return the counter as it is now."""
        return self._read()

    def take(self, since: int) -> str:
        """Return the evidence for a process that was killed; empty where there is none.

        *since* is the `sample` from before it was started.
        """
        now = self._read()
        if now <= max(self._spent, since):
            return ""
        self._spent = max(self._spent, since) + 1
        return f"out of memory: oom_kill of {self._where} rose to {now}"

    def _read(self) -> int:
        try:
            found = _KILLS.search(self._path.read_text())
        except OSError:
            return 0
        return int(found[1]) if found else 0


def _source() -> tuple[Path, str]:
    for line in _lines(Path("/proc/self/cgroup")):
        _, controllers, path = line.split(":", 2)
        mounts = {"": ("", "unified"), "memory": ("memory",)}.get(controllers, ())
        for mount in mounts:
            folder = Path("/sys/fs/cgroup") / mount / path.lstrip("/")
            for name in ("memory.events", "memory.oom_control"):
                if any(_KILLS.match(entry) for entry in _lines(folder / name)):
                    return folder / name, f"cgroup {path}"
    return Path("/proc/vmstat"), "the machine"


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
