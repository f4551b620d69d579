"""Memory budget: how many bytes a message may take of the machine, the control groups, the limits.

Reclaimable memory (caches) counts as free. Control groups of both versions are read: the kernel
kills in a full one, where it refuses elsewhere.
"""

from __future__ import annotations

import os
import resource
from pathlib import Path

from phalanx.runtime.linux.cgroup import content, enclosing, group_folders
from phalanx.supervision import MessageTooLarge

_SMALL = 1 << 20  # bytes below which the kernel decides
_STRIDE = 8 << 20  # bytes reserved between two checks
_HEADROOM = 32 << 20  # bytes left to a group's processes, at most an eighth of its limit


def writable_bytes(wanted: int) -> int:
    """Return how many bytes a memory file of this process may have now; *wanted* if it is small."""
    soft, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    room = wanted if soft == resource.RLIM_INFINITY or soft > wanted else soft
    if wanted < _SMALL:
        return room
    # The free memory of the machine, swap included.
    machine = _numbers(Path("/proc/meminfo"), ("MemAvailable:", "SwapFree:"))
    known = [*([sum(machine) * 1024] if machine else []), *_control_group()]
    if soft != resource.RLIM_INFINITY:
        known.append(soft)
    return min(known, default=room)


def reserve(file: int, start: int, size: int, *, missing: int) -> None:
    """Back that part of *file* with memory, of which some bytes are *missing*.

    The budget is checked first and again on the way, for other processes allocate too. What has
    been reserved when an error is raised stays.

    Raises:
        MessageTooLarge: there is not enough.
        OSError: the kernel refuses.
    """
    for done in range(0, size, _STRIDE):
        wanted = min(missing, size - done)
        room = writable_bytes(wanted)
        if room < wanted:
            raise MessageTooLarge(size, size - wanted + room)
        os.posix_fallocate(file, start + done, min(_STRIDE, size - done))


def _control_group() -> list[int]:
    """Return the bytes that each control group around this process has left."""
    rooms: list[int] = []
    for folder in group_folders("memory"):
        for group in enclosing(folder):
            rooms += _room(group, "memory.max", "memory.current", "")
            rooms += _room(group, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
    return rooms


def _room(group: Path, most: str, now: str, prefix: str) -> list[int]:
    """Return the bytes left in one *group*, whose files have these names; none without a limit."""
    limits, uses = content(group / most).strip(), content(group / now)
    if not uses or not limits.isdigit():
        return []
    limit, used = int(limits), int(uses)
    used -= sum(_numbers(group / "memory.stat", (f"{prefix}inactive_file", f"{prefix}active_file")))
    # Forked workers copy pages as they run and end: within 10 MiB of the limit the kernel killed
    # the driver while it closed.
    return [max(0, limit - used - min(_HEADROOM, limit // 8))]


def _numbers(path: Path, names: tuple[str, ...]) -> list[int]:
    fields = (line.split() for line in content(path).splitlines())
    return [int(field[1]) for field in fields if len(field) > 1 and field[0] in names]
