"""Evidence that the kernel killed a process because memory ran out.

Whether the kernel killed a process for want of memory: what its log and its counters say.

Guarantees: where the log can be read and knows processes by our numbers, it alone decides. Else a
rise of the memory control group's count of kills, between a process's start and its SIGKILL, is
evidence for one death and only one. The count of the whole machine is none: it says that somebody
was killed, anywhere. Without evidence a SIGKILL stays a SIGKILL.

Left to others: kills by a program that watches memory (systemd-oomd, earlyoom): to the kernel those
are ordinary signals. A `MemoryError`, as under ``RLIMIT_AS``, is an exception and no kill.

Source: ``memory.events`` and ``memory.oom_control`` in the kernel's documentation of control
groups.

What the kernel's log says about a process that was killed for want of memory.

Guarantees: an answer names that very process, by a number that means the same to the kernel and to
us; where it cannot be had (no right to read the log, a namespace of numbers of our own) the answer
is None, which says nothing either way.

Left to others: what else speaks for it (`evidence`).

Source: ``/dev/kmsg`` in the kernel's ABI documentation; ``__oom_kill_process`` in its
``mm/oom_kill.c``, which says one line for every process that it kills.
"""

from __future__ import annotations

import errno
import os
import re
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from .cgroup import group_folders, nearest

if TYPE_CHECKING:
    from collections.abc import Iterator


_LOG: Final = "/dev/kmsg"
_FIRST_NAMESPACE: Final = "pid:[4026531836]"  # a constant of the kernel's interface
_LONGEST: Final = 8192  # bytes; no record is longer
_KILLED: Final = re.compile(r"Killed process (\d+)\b")


def killed_for_memory(pid: int, since: float) -> str | None:
    """Return the log's line on the kill of *pid*; empty where there is none.

    *since* is when the process was started, in seconds on the monotonic clock: a line from before
    is about another one of that number. None where the log cannot tell.
    """
    if not _names_our_processes():
        return None
    found = ""
    earliest = since - _drift()
    try:
        for at, text in _records():
            victim = _KILLED.search(text)
            if victim is not None and int(victim[1]) == pid and at >= earliest:
                found = text
    except OSError:
        return None
    return found


def is_kernel_log_told() -> bool:
    """Whether the log can be read, and means our processes."""
    return _names_our_processes() and os.access(_LOG, os.R_OK)


def _names_our_processes() -> bool:
    """Whether we know processes by the numbers that the kernel logs."""
    with suppress(OSError):
        return os.readlink("/proc/self/ns/pid") == _FIRST_NAMESPACE  # noqa: PTH115 -- no path at all
    return False


def _drift() -> float:
    """Return how far the log's clock, which nobody corrects, may be from ours, in seconds."""
    return 5.0 + time.monotonic() * 0.001


def _records() -> Iterator[tuple[float, str]]:
    """Yield every record that the kernel still has: seconds since boot, and its text."""
    log = os.open(_LOG, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        while True:
            try:
                record = os.read(log, _LONGEST)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno == errno.EPIPE:  # overwritten as we read; the next one is there
                    continue
                raise
            head, _, rest = record.decode("utf-8", "replace").partition(";")
            stamp = head.split(",")[2:3]
            if stamp and stamp[0].isdigit():
                yield int(stamp[0]) / 1e6, rest.partition("\n")[0]
    finally:
        os.close(log)


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
