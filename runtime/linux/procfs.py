"""Readers of ``/proc``: state, parents, environment, memory and descriptors of processes.

A process that does not exist, or may not be read, is None or empty. If no descriptor is free
for reading, `OSError` is raised: that says nothing about the process.

Imports the standard library only: the guardian uses it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from . import descriptor_limit

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

_KERNEL_THREAD = 0x00200000  # PF_KTHREAD in linux/sched.h


@dataclass(frozen=True, slots=True)
class Task:
    """One process.

    Attributes:
        state: The letter of ``/proc/*/stat``: R, S, D, T (stopped), t (traced), Z.
        ticks: When it was started, in clock ticks since boot; with the pid its identity.
    """

    pid: int
    parent: int
    session: int
    state: str
    ticks: int
    is_kernel_thread: bool = False
    threads: int = 1

    @property
    def key(self) -> tuple[int, int]:
        """Its identity, also after its number has been given to another."""
        return self.pid, self.ticks

    @property
    def is_dead(self) -> bool:
        """Whether it has ended and is yet to be collected; not where only its main thread has."""
        return self.state in ("Z", "X", "x") and self.threads <= 1


def read(pid: int) -> Task | None:
    """Return the process *pid*."""
    fields = stat_fields(f"/proc/{pid}")
    if not fields:
        return None
    state, parent, _, session, _, _, flags = fields[:7]
    is_kernel_thread = bool(int(flags) & _KERNEL_THREAD)
    ticks, threads = int(fields[19]), int(fields[17])
    return Task(pid, int(parent), int(session), state.decode(), ticks, is_kernel_thread, threads)


def read_all() -> dict[int, Task]:
    """Return every process there is."""
    return {pid: task for pid in numbers_in("/proc") if (task := read(pid)) is not None}


def is_same(task: Task) -> bool:
    """Whether *task* is still there, and has not left its number to another."""
    now = read(task.pid)
    return now is not None and now.key == task.key


def descendants(tasks: Mapping[int, Task], roots: Iterable[int]) -> dict[int, Task]:
    """Return those of *tasks* that descend from the processes *roots*, these not included."""
    children: dict[int, list[Task]] = {}
    for task in tasks.values():
        children.setdefault(task.parent, []).append(task)
    queue = [*roots]
    seen = {*queue}
    found: dict[int, Task] = {}
    while queue:
        for task in children.get(queue.pop(), ()):
            if task.pid not in seen:
                seen.add(task.pid)
                queue.append(task.pid)
                found[task.pid] = task
    return found


def ancestors(pid: int) -> Iterator[int]:
    """Yield *pid*, its parent, and so on up."""
    while pid:
        yield pid
        task = read(pid)
        pid = 0 if task is None else task.parent


def exit_status(pid: int, ticks: int) -> int | None:
    """Return the wait status of a process that has ended and is not collected; None for none."""
    fields = stat_fields(f"/proc/{pid}")
    return int(fields[49]) if fields and fields[0] == b"Z" and int(fields[19]) == ticks else None


def tracer(pid: int) -> int:
    """Return the process that traces *pid*; 0 for none."""
    status = content(f"/proc/{pid}/status")
    return int(status.partition(b"TracerPid:")[2].split()[0]) if status else 0


def command(pid: int) -> str:
    """Return the command line of *pid*, shortened."""
    words = (content(f"/proc/{pid}/cmdline") or b"").rstrip(b"\0").split(b"\0")
    return b" ".join(words).decode(errors="replace")[:200]


def stat_fields(folder: str) -> list[bytes]:
    """Return the fields of *folder*'s ``stat`` from the state on, which is the first."""
    stat = content(f"{folder}/stat") or b")"
    # The name is in brackets and may itself hold blanks and brackets.
    return stat[stat.rindex(b")") + 2 :].split()


def numbers_in(folder: str) -> list[int]:
    """Return the entries of *folder* that are numbers: processes, threads or descriptors.

    Of this process's descriptors one is the listing's own, and closed by now.
    """
    names = os.listdir(folder)  # noqa: PTH208  # hundreds of names, and no use for Path objects
    return [int(name) for name in names if name.isdigit()]


def content(path: str, denied: bytes | None = None) -> bytes | None:
    """Return what the file *path* holds; None if there is none, *denied* if it may not be read."""
    try:
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123  # a Path takes twice as long
            return file.read()
    except PermissionError:
        return denied
    except OSError as error:
        if descriptor_limit.is_shortage(error):
            raise
        return None
