"""Process trees: the tag that identifies the processes of a tree, and the kill of a whole tree.

- Each process that the driver starts has a unique tag in its environment, which contains the tag of
  its tree and is inherited by its descendants. A tree inside a worker of another tree carries
  both tags.
- `kill` ends every process that carries the tag, is in one of the sessions, or descends from such
  a process. All are stopped (SIGSTOP) before any is killed, so that none forks meanwhile; a
  process that forks and exits during the search is found through its child. No signal goes to a
  process that merely got the pid of another.
- Guardians are not stopped, and go behind the processes that they guard: if what kills dies
  meanwhile, they end what it has stopped.
- Python's resource trackers go last: once all others have ended, each removes the shared memory and
  semaphores that these have left, and ends by itself.
- A process that has left the session, cleared its environment and lost its parent is not found.

Imports the standard library only: the guardian uses it.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
import uuid
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from . import descriptor_limit, procfs

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from .procfs import Task

VARIABLE = "PHALANX_TREE"
_LABEL_BYTES = 160  # of a label; longer ones are cut, the number keeps them apart
_FILL = ";"
_SHORTEST_TAG = 32  # the hexadecimal name of a tree
_AGAIN = 0.002  # seconds before looking again at a process that has no environment yet
_SHORT = 0.02  # seconds until a descriptor may have become free
_TRACKER = b"from multiprocessing.resource_tracker import main"
_GUARDIAN, _GUARDIAN_BEFORE = b"phalanx: guardian", b"phalanx_bare.guardian_main"  # its title
_TIDY = 2.0  # seconds for a tracker to do its work
_LISTINGS = 100  # of the processes in one look; mostly it takes one or two


@dataclass(frozen=True, slots=True)
class TreeTag:
    """The tag of one driver's tree.

    Attributes:
        outer: The tags of the trees around it, as found in this process's own environment.
        tree: Its name, never used twice.
    """

    outer: str
    tree: str

    @classmethod
    def new(cls, environ: Mapping[str, str]) -> TreeTag:
        """Return a tag for a new tree in a process that has *environ*."""
        outer = environ.get(VARIABLE, "").rstrip(_FILL)
        return cls(outer + _FILL if outer else "", uuid.uuid4().hex)

    @property
    def pattern(self) -> bytes:
        """The text that the environment of each process of the tree contains."""
        return f"{self.tree}/".encode()

    def of(self, number: int, label: str) -> ProcessTag:
        """Return the tag of the process with this *number*, unique in the tree."""
        own = f"{self.tree}/{number}.{clean_label(label)}{_FILL}"
        # Of one length in one tree, so that one tag can overwrite another.
        width = len(self.outer) + len(self.tree) + _LABEL_BYTES + 24
        return ProcessTag(own.encode(), (self.outer + own).ljust(width, _FILL))


def clean_label(label: str) -> str:
    """Return what a tag shows of *label*."""
    clean = (c if c.isascii() and c.isprintable() and c != _FILL else "_" for c in label)
    return "".join(clean)[:_LABEL_BYTES]


class ProcessTag(NamedTuple):
    """The tag of one process and of all that comes from it."""

    pattern: bytes
    value: str


class Victim(NamedTuple):
    """A process that was held in order to be killed.

    Attributes:
        ticks: With *pid* what names it for good.
    """

    pid: int
    ticks: int
    command: str


@dataclass(frozen=True, slots=True)
class TreeTarget:
    """The processes that belong to a tree.

    Attributes:
        tag: Found in the environment of each of its processes.
        roots: Processes (pid, ticks) that belong to it whatever their environment says.
        sessions: The leaders (pid, ticks) of its sessions, dead ones included.
        killed: Processes (pid, ticks) of it that were killed before and may be ending still: those
            have no environment left.
        spare: Pids that are never touched.
        others: Trees that are looked for in the same look: each lists all processes there are.
        since: When the oldest of its processes was started, in clock ticks since boot: most of a
            large machine's are older, and are not looked at. 0 if that is not known.

    The tag must be long: a short one would be found in the environment of every process.
    """

    tag: bytes
    roots: Collection[tuple[int, int]] = ()
    sessions: Collection[tuple[int, int]] = ()
    killed: Collection[tuple[int, int]] = ()
    spare: Collection[int] = ()
    others: Collection[TreeTarget] = ()
    since: int = 0

    def __post_init__(self) -> None:
        if len(self.tag) < _SHORTEST_TAG or not self.tag[:_SHORTEST_TAG].isalnum():
            raise ValueError(
                f"tag={self.tag!r}: pass the tag of a tree, which begins with a long name"
            )


def find(target: TreeTarget) -> tuple[dict[int, Task], bool]:
    """Return the living processes of *target*, and whether the answer is complete.

    It is not if a process was between two programs and had no environment to read. A process that
    ends between being listed and being read may have forked before, and its child not be in that
    listing: so they are listed again until all that are new have lived to be read.
    """
    # In any case: never init, never this process, never its ancestors.
    targets = (target, *target.others)
    spare = {1, *procfs.ancestors(os.getpid()), *(pid for each in targets for pid in each.spare)}
    leaders = {key for each in targets for key in each.sessions}
    sessions = {pid for pid, ticks in leaders if _is_free_or(pid, ticks)}
    known = {key for each in targets for key in (*each.roots, *each.killed)}
    tags = [each.tag for each in targets]
    since = min(each.since for each in targets)
    older = _older_processes(os.getpid())
    skips = since >= older.born > 0
    found: dict[int, Task] = {}
    tasks: dict[int, Task] = {}
    complete = True
    for _ in range(_LISTINGS):
        lived = True
        for pid in set(procfs.numbers_in("/proc")) - tasks.keys():
            if skips and older.has(pid):
                continue
            task = procfs.read(pid)
            if task is None:
                lived = False
                continue
            if skips:
                older.note(task)
            tasks[pid] = task
            lived = lived and not task.is_dead
            if task.is_kernel_thread or pid in spare:
                continue
            if task.key in known or task.session in sessions:
                found[pid] = task
            elif not task.is_dead and task.ticks >= since:
                # Of one that may not be read: no tag.
                environ = procfs.content(f"/proc/{pid}/environ", denied=b"?")
                if environ is None:
                    lived = False
                elif any(tag in environ for tag in tags):
                    found[pid] = task
                elif not environ:
                    lived = complete = False
        if lived:
            break
    else:
        complete = False
    below = procfs.descendants({k: v for k, v in tasks.items() if k not in spare}, found)
    return {k: v for k, v in (found | below).items() if not v.is_dead}, complete


class _OlderProcesses:
    """Processes that are older than *mine*, which need to be read but once.

    Each is known by the inode of its folder: another process of that number has another one.
    """

    def __init__(self, mine: int) -> None:
        task = procfs.read(mine)
        self.born = 0 if task is None else task.ticks
        self._inodes: dict[int, int] = {}

    def has(self, pid: int) -> bool:
        """Whether *pid* is known to be one."""
        inode = self._inodes.get(pid)
        return inode is not None and inode == _inode(pid)

    def note(self, task: Task) -> None:
        """Keep *task* if it is one."""
        inode = _inode(task.pid) if task.ticks < self.born else None
        if inode is not None and procfs.is_same(task):  # so the inode was not another's
            self._inodes[task.pid] = inode


def _inode(pid: int) -> int | None:
    try:
        return os.stat(f"/proc/{pid}").st_ino  # noqa: PTH116  # a Path takes longer
    except OSError:
        return None


@lru_cache(maxsize=1)
def _older_processes(mine: int) -> _OlderProcesses:
    """Return those of this process, whose number is *mine*; a fork has others."""
    return _OlderProcesses(mine)


def kill(target: TreeTarget, deadline: float) -> tuple[Victim, ...]:
    """End every process of *target*; return by *deadline* (monotonic) what is still there.

    That is mostly in uninterruptible sleep. Where descriptors are short it holds as many as it can,
    kills those, and looks again; what it could not hold by the deadline, or could not even look
    for, is returned too, and *command* says so.
    """
    retries = 3  # a process with a truly empty environment stays in doubt for ever
    while True:
        held: dict[tuple[int, int], tuple[int, Victim]] = {}  # by key, with the pidfd
        short: OSError | None = None
        try:
            stop_all(target, held, deadline, retries, guardians=False)
        except OSError as error:
            if not descriptor_limit.is_shortage(error):
                raise
            short = error
        finally:
            left = _end_all(target, held, deadline)
        late = time.monotonic() >= deadline
        if short is not None and late:
            left += [Victim(*root, str(short)) for root in target.roots or ((0, 0),)]
        if late or not (held or short):
            return tuple(left)
        if short is not None and not descriptor_limit.make_room(len(held) or 1) and not held:
            time.sleep(_SHORT)
        retries = 0  # one that was between two programs has become one of them


def stop_all(
    target: TreeTarget,
    held: dict[tuple[int, int], tuple[int, Victim]],
    deadline: float,
    retries: int = 3,
    *,
    guardians: bool = True,
) -> None:
    """Stop and hold processes until no new one is found: then none is left that could fork.

    Args:
        held: Those that are stopped are added, by key, each with a pidfd that is the caller's.
        retries: How often to look again because of a process without an environment.
        guardians: Whether they are stopped, too; they fork nothing but another one.

    Raises:
        OSError: there was no descriptor for one of them.
    """
    while True:
        found, is_complete = find(target)
        new = [task for task in found.values() if task.key not in held]
        for task in new:
            victim = Victim(*task.key, procfs.command(task.pid))
            pidfd = open_pidfd(task)
            if pidfd is not None:
                held[task.key] = pidfd, victim
                if guardians or not is_guardian(_words(task.pid)):
                    send_signal(pidfd, signal.SIGSTOP)
        if time.monotonic() >= deadline:
            return
        if not new:
            if is_complete or not retries:
                return
            retries -= 1
            time.sleep(_AGAIN)


def _end_all(
    target: TreeTarget, held: Mapping[tuple[int, int], tuple[int, Victim]], deadline: float
) -> list[Victim]:
    """Kill and release *held*; return those that still exist at *deadline*."""
    left: list[Victim] = []
    trackers: list[int] = []
    guardians: list[int] = []
    others: list[int] = []
    for pidfd, victim in held.values():
        words = b""
        with contextlib.suppress(OSError):  # another thread has taken the last descriptor
            words = _words(victim.pid)
        kind = trackers if _TRACKER in words else guardians if is_guardian(words) else others
        kind.append(pidfd)
    for pidfds in (others, guardians):
        for pidfd in pidfds:
            send_signal(pidfd, signal.SIGKILL)
        wait_all(pidfds, deadline)
    for number, until in ((signal.SIGCONT, time.monotonic() + _TIDY), (signal.SIGKILL, deadline)):
        for pidfd in trackers:
            send_signal(pidfd, number)
        wait_all(trackers, min(until, deadline))
    for key, (pidfd, victim) in held.items():
        if not is_gone(pidfd):
            left.append(victim)
        # A stray may be our child, as all orphans are if we are PID 1. The status of a root is left
        # to its owner.
        if not any(key in each.roots for each in (target, *target.others)):
            collect(pidfd)
        os.close(pidfd)
    return left


def _words(pid: int) -> bytes:
    """Return the whole command line of *pid*, which is held."""
    return procfs.content(f"/proc/{pid}/cmdline") or b""


def is_guardian(words: bytes) -> bool:
    """Whether a process with that command line is the guardian of a driver."""
    return words.rstrip(b"\0") == _GUARDIAN or _GUARDIAN_BEFORE in words


def open_pidfd(task: Task) -> int | None:
    """Return a descriptor for *task*; None if it is gone, though its number may be another's.

    Raises:
        OSError: no descriptor is free.
    """
    try:
        pidfd = os.pidfd_open(task.pid)
    except ProcessLookupError:
        return None
    try:
        if procfs.is_same(task):
            return pidfd
    except BaseException:
        os.close(pidfd)
        raise
    os.close(pidfd)
    return None


def send_signal(pidfd: int, number: int) -> None:
    """Send the signal *number*, unless the process is gone or another user's."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        signal.pidfd_send_signal(pidfd, number)


def collect(pidfd: int) -> None:
    """Collect the status of a process that has ended, if it is our child."""
    with contextlib.suppress(OSError):
        os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG)


def is_gone(pidfd: int) -> bool:
    """Whether the process of *pidfd* has ended, collected or not."""
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(0))


def wait_all(pidfds: Iterable[int], deadline: float) -> None:
    """Return once the processes of all *pidfds* have ended, or at *deadline* (monotonic)."""
    poller = select.poll()
    waiting = set(pidfds)
    for pidfd in waiting:
        poller.register(pidfd, select.POLLIN)
    while waiting and (left := deadline - time.monotonic()) > 0:
        for pidfd, _ in poller.poll(left * 1000):
            poller.unregister(pidfd)
            waiting.discard(pidfd)


def _is_free_or(pid: int, ticks: int) -> bool:
    """Whether the number of a session's leader is free or still that leader's.

    Otherwise number and session belong to another process.
    """
    task = procfs.read(pid)
    return task is None or task.ticks == ticks
