"""Finds, stops and kills process trees, by parent, session and a mark in the environment.

A worker's whole process tree: finding it and ending it, whatever it did to hide.

Guarantees: `kill` ends every process that carries the mark, sits in the session, or descends from
one that does, and returns when each of them is gone or the deadline has passed. Everything is
stopped before anything is killed, so that nobody forks while being hunted; who forks and ends
while being looked for is found in his child; no signal ever goes to a process that merely got the
number of one that is gone.

Left to others: collecting the exit status of the caller's own children. A process that has left
the session, cleared its environment and lost its parent is out of reach.

Imports nothing but the standard library: the guardian uses it.

How every process of a tree is known again: a mark in its environment.

Guarantees: each worker's mark is unique among all that were ever started by this driver, lies
within the mark of its tree, and is inherited by whatever the worker starts, daemons too. A tree
inside a worker of another tree carries both marks, so ending the outer one finds the inner one's
strays.

Left to others: reading the marks (`tree`). What clears its environment *and* leaves its session
cannot be found by its mark.

Imports nothing but the standard library: the guardian uses it.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from . import descriptor_limit

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping


VARIABLE = "PHALANX_TREE"
_LABEL_BYTES = 160  # what a label may take; longer ones are cut, the number keeps them apart
_FILL = ";"


@dataclass(frozen=True, slots=True)
class TreeMark:
    """The mark of one driver's tree.

    Attributes:
        outer: The marks of the trees around it, as found in this process's own environment.
        tree: Its name, never used twice.
    """

    outer: str
    tree: str

    @classmethod
    def new(cls, environ: dict[str, str]) -> TreeMark:
        """Return a mark for a new tree in a process that has *environ*."""
        outer = environ.get(VARIABLE, "").rstrip(_FILL)
        return cls(outer + _FILL if outer else "", uuid.uuid4().hex)

    @property
    def needle(self) -> bytes:
        """What the environment of each process of the tree contains."""
        return f"{self.tree}/".encode()

    def of(self, number: int, label: str) -> WorkerMark:
        """Return the mark of the process with this *number*, unique in the tree."""
        clean = "".join(c if c.isascii() and c.isprintable() and c != ";" else "_" for c in label)
        return WorkerMark(self, f"{self.tree}/{number}.{clean[:_LABEL_BYTES]}{_FILL}")


@dataclass(frozen=True, slots=True)
class WorkerMark:
    """The mark of one process and of all that comes from it."""

    tree: TreeMark
    own: str

    @property
    def needle(self) -> bytes:
        """What the environment of the process, and of all that comes from it, contains."""
        return self.own.encode()

    @property
    def value(self) -> str:
        """The variable's value: always of one length in one tree, so one can replace another."""
        width = len(self.tree.outer) + len(self.tree.tree) + _LABEL_BYTES + 24
        return (self.tree.outer + self.own).ljust(width, _FILL)


_KERNEL_THREAD = 0x00200000  # PF_KTHREAD in linux/sched.h
_SHORTEST_NEEDLE = 32  # the hexadecimal name of a tree
_DEAD = ("Z", "X", "x")
_AGAIN = 0.002  # seconds before looking again at a process that has no environment yet
_SHORT = 0.02  # seconds until a descriptor may have become free
_LISTINGS = 100  # of the processes in one look; mostly it takes one or two
_CLOSED = b"?"


@dataclass(frozen=True, slots=True)
class Task:
    """One process as ``/proc`` shows it.

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

    @property
    def key(self) -> tuple[int, int]:
        """Its identity, also after its number has been given to another."""
        return self.pid, self.ticks


@dataclass(frozen=True, slots=True)
class Hunted:
    """A process that was killed, or that withstood it."""

    pid: int
    command: str


@dataclass(frozen=True, slots=True)
class TreeReport:
    """What `kill` did.

    Attributes:
        killed: The processes that are gone, the worker included where it still lived.
        left: Those that were still there at the deadline, mostly in uninterruptible sleep, and
            those for which no descriptor was free; then *command* says so.
    """

    killed: tuple[Hunted, ...] = ()
    left: tuple[Hunted, ...] = ()


@dataclass(frozen=True, slots=True)
class Quarry:
    """What belongs to a tree.

    Attributes:
        needle: Found in the environment of each of its processes.
        roots: Processes (pid, ticks) that belong to it whatever their environment says.
        sessions: The leaders (pid, ticks) of its sessions, dead ones included.
        spare: Pids that are never touched.

    The needle must be long: a short one would be found in everybody's environment, and the hunt
    would end with every process of the machine.
    """

    needle: bytes
    roots: Collection[tuple[int, int]] = ()
    sessions: Collection[tuple[int, int]] = ()
    spare: Collection[int] = ()

    def __post_init__(self) -> None:
        if len(self.needle) < _SHORTEST_NEEDLE or not self.needle[:_SHORTEST_NEEDLE].isalnum():
            msg = f"needle={self.needle!r}: pass a mark of a tree, which begins with a long name"
            raise ValueError(msg)


def tracer(pid: int) -> int:
    """Return the process that traces *pid*; 0 for none, and where it cannot be seen."""
    try:
        status = Path(f"/proc/{pid}/status").read_bytes()
    except OSError:
        return 0
    return int(status.partition(b"TracerPid:")[2].split()[0])


def read(pid: int) -> Task | None:
    """Return the process *pid*, or None where there is none.

    Raises:
        OSError: there is no descriptor free to look.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError as error:
        if descriptor_limit.is_shortage(error):
            raise
        return None
    # The name is in brackets and may itself hold blanks and brackets.
    fields = stat[stat.rindex(b")") + 2 :].split()
    return Task(
        pid=pid,
        parent=int(fields[1]),
        session=int(fields[3]),
        state=fields[0].decode(),
        ticks=int(fields[19]),
        is_kernel_thread=bool(int(fields[6]) & _KERNEL_THREAD),
    )


def exit_status(pid: int, ticks: int) -> int | None:
    """Return the wait status of a process that has ended and is not collected; None for none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    fields = stat[stat.rindex(b")") + 2 :].split()
    return int(fields[49]) if fields[0] == b"Z" and int(fields[19]) == ticks else None


def numbers_in(folder: str) -> list[int]:
    """Return the entries of *folder* that are numbers: processes, threads or descriptors.

    With descriptor_limit, one of them is the listing's own and closed by now.
    """
    names = os.listdir(folder)  # noqa: PTH208  # hundreds of names, and no use for Path objects
    return [int(name) for name in names if name.isdigit()]


def read_all() -> dict[int, Task]:
    """Return every process there is."""
    tasks = (read(pid) for pid in numbers_in("/proc"))
    return {task.pid: task for task in tasks if task is not None}


def find(quarry: Quarry) -> tuple[dict[int, Task], bool]:
    """Return the living processes of *quarry*, and whether the answer is sure.

    It is not where some process was between two programs and had no environment to read. Whoever
    ends between being listed and being read may have forked before, and his child not be in that
    listing: so they are listed again until all that are new have lived to be read.
    """
    # Whatever else is wrong: never init, never ourselves, never those we come from.
    spare = {1, *_lineage(os.getpid()), *quarry.spare}
    sessions = {pid for pid, ticks in quarry.sessions if _is_free_or(pid, ticks)}
    roots = set(quarry.roots)
    found: dict[int, Task] = {}
    children: dict[int, list[Task]] = {}
    listed: set[int] = set()
    sure = True
    for _ in range(_LISTINGS):
        new = set(numbers_in("/proc")) - listed
        listed |= new
        lived = True
        for pid in new:
            task = read(pid)
            if task is None:
                lived = False
                listed.discard(pid)  # the number may come again
                continue
            lived = lived and task.state not in _DEAD
            children.setdefault(task.parent, []).append(task)
            if task.is_kernel_thread or pid in spare:
                continue
            if task.key in roots or task.session in sessions:
                found[pid] = task
            elif task.state not in _DEAD:
                environ = _environ(pid)
                if environ is None:
                    lived = False
                elif quarry.needle in environ:
                    found[pid] = task
                elif not environ:
                    lived = sure = False
        if lived:
            break
    else:
        sure = False
    queue = list(found.values())
    while queue:
        for task in children.get(queue.pop().pid, ()):
            if task.pid not in found and task.pid not in spare:
                found[task.pid] = task
                queue.append(task)
    return {pid: task for pid, task in found.items() if task.state not in _DEAD}, sure


def kill(quarry: Quarry, deadline: float) -> TreeReport:
    """End every process of *quarry*; return by *deadline* (monotonic).

    Where descriptors are short it holds as many as it can, kills those, and looks again. What it
    could not hold, or could not even look for, is `TreeReport.left`.
    """
    killed: list[Hunted] = []
    doubts = 3  # a process with a truly empty environment stays in doubt for ever
    while True:
        held: dict[tuple[int, int], tuple[int, Hunted]] = {}
        short: OSError | None = None
        try:
            _stop_all(quarry, held, deadline, doubts)
        except OSError as error:
            if not descriptor_limit.is_shortage(error):
                raise
            short = error
        finally:
            left = _end_all(quarry, held, killed, deadline)
        late = time.monotonic() >= deadline
        if short is not None and late:
            left += [Hunted(pid, str(short)) for pid, _ in quarry.roots or ((0, 0),)]
        if late or not (held or short):
            return TreeReport(tuple(killed), tuple(left))
        if short is not None and not descriptor_limit.make_room(len(held) or 1) and not held:
            time.sleep(_SHORT)
        doubts = 0  # one that was between two programs has become one of them


def _end_all(
    quarry: Quarry,
    held: Mapping[tuple[int, int], tuple[int, Hunted]],
    killed: list[Hunted],
    deadline: float,
) -> list[Hunted]:
    """Kill and let go of *held*; add those that are gone to *killed*, and return the others."""
    left: list[Hunted] = []
    for pidfd, _ in held.values():
        _signal(pidfd, signal.SIGKILL)
    _wait_all([pidfd for pidfd, _ in held.values()], deadline)
    for key, (pidfd, hunted) in held.items():
        (killed if is_gone(pidfd) else left).append(hunted)
        if key not in quarry.roots:
            _collect(pidfd)
        os.close(pidfd)
    return left


def _collect(pidfd: int) -> None:
    """Collect the status of a stray that became our child, as all orphans do where we are PID 1.

    The roots are left alone: whoever started them wants their status.
    """
    with contextlib.suppress(OSError):
        os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG)


def is_gone(pidfd: int) -> bool:
    """Whether the process of *pidfd* has ended, collected or not."""
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(0))


def _lineage(pid: int) -> Iterator[int]:
    """Yield *pid*, its parent, and so on up."""
    while pid:
        yield pid
        task = read(pid)
        pid = 0 if task is None else task.parent


def _is_free_or(pid: int, ticks: int) -> bool:
    """Whether nobody else lives under the number of a session's leader.

    Where somebody does, number and session are his now.
    """
    task = read(pid)
    return task is None or task.ticks == ticks


def _stop_all(
    quarry: Quarry,
    held: dict[tuple[int, int], tuple[int, Hunted]],
    deadline: float,
    doubts: int,
) -> None:
    """Stop and hold processes until no new one is found: then none is left that could fork.

    Raises:
        OSError: there was no descriptor for one of them.
    """
    while True:
        found, sure = find(quarry)
        new = [task for task in found.values() if task.key not in held]
        for task in new:
            hold = _hold(task)
            if hold is not None:
                held[task.key] = hold
                _signal(hold[0], signal.SIGSTOP)
        if time.monotonic() >= deadline:
            return
        if not new:
            if sure or not doubts:
                return
            doubts -= 1
            time.sleep(_AGAIN)


def _hold(task: Task) -> tuple[int, Hunted] | None:
    try:
        pidfd = os.pidfd_open(task.pid)
    except ProcessLookupError:
        return None
    try:
        if is_same(task):
            return pidfd, Hunted(task.pid, _command(task.pid))
    except BaseException:
        os.close(pidfd)
        raise
    os.close(pidfd)
    return None


def is_same(task: Task) -> bool:
    """Whether *task* is still there, and has not left its number to another."""
    now = read(task.pid)
    return now is not None and now.key == task.key


def _signal(pidfd: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        signal.pidfd_send_signal(pidfd, number)


def _wait_all(pidfds: Iterable[int], deadline: float) -> None:
    poller = select.poll()
    waiting = set(pidfds)
    for pidfd in waiting:
        poller.register(pidfd, select.POLLIN)
    while waiting and (left := deadline - time.monotonic()) > 0:
        for pidfd, _ in poller.poll(left * 1000):
            poller.unregister(pidfd)
            waiting.discard(pidfd)


def _environ(pid: int) -> bytes | None:
    """Return the environment of *pid*, None where it is gone, no mark where it is closed to us."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except PermissionError:
        return _CLOSED
    except OSError as error:
        if descriptor_limit.is_shortage(error):
            raise
        return None


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
        return b" ".join(words).decode(errors="replace")[:200]
    return ""
