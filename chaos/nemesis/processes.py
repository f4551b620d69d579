"""The processes of a driver, by role, and of its nodes, and signals to them.

Guarantees: a signal never reaches a process that merely has the same pid as an earlier one.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.runtime import process_tree, procfs

from .catalog import SIGNALS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_CONTINUE = """
import signal, sys, time
seconds = float(sys.argv[1])
for pause in seconds, max(0.0, 1.0 - seconds):  # again: a short stop may have been held up
    time.sleep(pause)
    for pidfd in map(int, sys.argv[2:]):
        try:
            signal.pidfd_send_signal(pidfd, signal.SIGCONT)
        except OSError:
            pass
"""
_STOP = 5.0  # seconds
_LABEL = re.compile(r"([^;/]*)/\d+\.([^;]*);*$")  # a tree, and the name of a process in it
_ROLES = {
    "zygote": re.compile("^zygote$"),
    "logs": re.compile("^collector$"),
    "store": re.compile("/store#"),
    "standby": re.compile(r"/standby#-?\d+$"),
}


@dataclass(frozen=True, slots=True)
class TargetProcess:
    """One process, known by its pid and start time.

    Attributes:
        label: The name under which it was started.
        role: ``zygote``, ``guardian``, ``logs``, ``store`` or ``standby``, if it is a helper.
        rank: The rank and incarnation, if it is a worker.
    """

    pid: int
    ticks: int
    label: str = ""
    role: str = ""
    rank: tuple[int, int] | tuple[None, None] = (None, None)

    @classmethod
    def of(cls, pid: int) -> TargetProcess:
        """Return the process *pid*, which must exist."""
        task = procfs.read(pid)
        assert task is not None
        return cls(*task.key)

    def inject(self, fault: str, seconds: float = 0.0) -> Callable[[], None]:
        """Send it the signal of *fault*; return what ends a stop.

        That ends after *seconds* by itself, also without this process.
        """
        sleepers: list[subprocess.Popen[bytes]] = []
        self.send(SIGNALS[fault], lambda pidfd: sleepers.append(_continue_after(seconds, pidfd)))
        return partial(_resume, [self], sleepers)

    def send(self, number: int, before_stop: Callable[[int], None] | None = None) -> bool:
        """Send it signal *number*, unless it has ended; return False if that is not known.

        *before_stop* is called with its pidfd before it is stopped.
        """
        with contextlib.suppress(OSError):
            task = procfs.read(self.pid)
            if task is None or task.ticks != self.ticks or task.is_dead:
                return True
            if (pidfd := process_tree.open_pidfd(task)) is None:
                return True
            try:
                if number == signal.SIGSTOP and before_stop is not None:
                    before_stop(pidfd)
                signal.pidfd_send_signal(pidfd, number)
            finally:
                os.close(pidfd)
            return True
        return False


def _continue_after(seconds: float, *pidfds: int) -> subprocess.Popen[bytes]:
    """Have a child continue these; a timer would be lost with this process, which may end first."""
    words = [sys.executable, "-S", "-c", _CONTINUE, *map(str, (seconds, *pidfds))]
    child = subprocess.Popen(words, pass_fds=pidfds, env={})
    threading.Thread(target=child.wait, name="chaos-continue", daemon=True).start()
    return child


def helpers_of(driver: int) -> list[TargetProcess]:
    """Return the helper processes that *driver* has started, by pid."""
    found: list[TargetProcess] = []
    for task, _, name in labelled(_children(driver)):
        words = procfs.content(f"/proc/{task.pid}/cmdline") or b""
        is_guardian = process_tree.is_guardian(words)
        roles = ["guardian"] if is_guardian else [r for r in _ROLES if _ROLES[r].search(name)]
        found += [TargetProcess(*task.key, name, role) for role in roles[:1]]
    return sorted(found, key=lambda each: each.pid)


def trees_of(driver: int) -> set[str]:
    """Return the marks of the process trees of *driver*."""
    return {tree for _, tree, _ in labelled(_children(driver)) if tree}


def _children(driver: int) -> list[procfs.Task]:
    return [task for task in procfs.read_all().values() if task.parent == driver]


def labelled(tasks: Iterable[procfs.Task]) -> Iterator[tuple[procfs.Task, str, str]]:
    """Yield those of *tasks* that live, the trees they are of and their names there, if any."""
    for task in tasks:
        if not task.is_dead:
            with contextlib.suppress(OSError):
                environ = Path(f"/proc/{task.pid}/environ").read_text(errors="replace")
                _, _, mark = f"\0{environ}".partition(f"\0{process_tree.VARIABLE}=")
                label = _LABEL.search(mark.partition("\0")[0])
                yield task, "" if label is None else label[1], "" if label is None else label[2]


def tasks_of_node(place: str) -> list[procfs.Task]:
    """Return the living processes of the node at *place* that are on this machine, oldest first."""
    tasks, _ = process_tree.find(process_tree.TreeTarget(f"{place}/".encode()))
    return sorted(tasks.values(), key=lambda task: (task.ticks, task.pid))


def kill_node(place: str) -> None:
    """Kill all processes of the node at *place*."""
    process_tree.kill(process_tree.TreeTarget(f"{place}/".encode()), time.monotonic() + _STOP)


def freeze_node(place: str, seconds: float) -> Callable[[], None]:
    """Stop all processes of the node at *place* for *seconds*; return what continues them."""
    held: dict[tuple[int, int], tuple[int, process_tree.Victim]] = {}
    target = process_tree.TreeTarget(f"{place}/".encode())
    try:
        process_tree.stop_all(target, held, time.monotonic() + _STOP)
        sleeper = _continue_after(seconds, *(pidfd for pidfd, _ in held.values()))
    except BaseException:
        for pidfd, _ in held.values():
            process_tree.send_signal(pidfd, signal.SIGCONT)
        raise
    finally:
        for pidfd, _ in held.values():
            os.close(pidfd)
    return partial(_resume, [TargetProcess(*key) for key in held], [sleeper])


def _resume(stopped: list[TargetProcess], sleepers: list[subprocess.Popen[bytes]]) -> None:
    """Continue *stopped*; end *sleepers*, whose seconds may reach far beyond the end of the run."""
    sent = [each.send(signal.SIGCONT) for each in stopped]
    if all(sent):
        for each in sleepers:
            each.kill()
