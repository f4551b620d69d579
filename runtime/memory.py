"""How much memory a message may take: what is left of the machine's, the group's, the limits'.

Guarantees: an answer that errs on the side of the kernel's own accounting; memory that could be
reclaimed (caches) counts as free. It is a look at one moment and no reservation.
"""

from __future__ import annotations

import resource
from pathlib import Path

_SMALL = 16 * 1024 * 1024  # bytes below which looking costs more than it tells


def writable_bytes(wanted: int) -> int:
    """Return how many bytes a memory file of this process may have now.

    A small *wanted* is not worth looking for: the kernel refuses it if it must.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    room = wanted if soft == resource.RLIM_INFINITY or soft > wanted else soft
    if wanted < _SMALL:
        return room
    known = [*_machine(), *_control_group()]
    if soft != resource.RLIM_INFINITY:
        known.append(soft)
    return min(known, default=room)


def _machine() -> list[int]:
    """Return what the machine has left, swap included."""
    found = _numbers(Path("/proc/meminfo"), ("MemAvailable:", "SwapFree:"))
    return [sum(found) * 1024] if found else []


def _control_group() -> list[int]:
    """Return what each enclosing control group (version 2) leaves us."""
    rooms: list[int] = []
    for line in _lines(Path("/proc/self/cgroup")):
        number, _, path = line.split(":", 2)
        if number != "0":
            continue
        root = Path("/sys/fs/cgroup")
        folder = root / path.lstrip("/")
        while folder != root.parent:
            most = _lines(folder / "memory.max")
            now = _lines(folder / "memory.current")
            if most and now and most[0].isdigit():
                caches = sum(_numbers(folder / "memory.stat", ("inactive_file", "active_file")))
                rooms.append(max(0, int(most[0]) - int(now[0]) + caches))
            folder = folder.parent
    return rooms


def _numbers(path: Path, names: tuple[str, ...]) -> list[int]:
    fields = (line.split() for line in _lines(path))
    return [int(field[1]) for field in fields if len(field) > 1 and field[0] in names]


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
