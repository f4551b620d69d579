"""The processes of a driver, by role, and signals to them.

Guarantees: a signal never reaches a process that merely has the same number as an earlier one.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.runtime import process_tree, procfs

from .catalog import SIGNALS

if TYPE_CHECKING:
    from collections.abc import Iterator


_CONTINUE = (
    "import signal, sys, time; time.sleep(float(sys.argv[1])); "
    "signal.pidfd_send_signal(int(sys.argv[2]), signal.SIGCONT)"
)
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

    def inject(self, fault: str, seconds: float = 0.0) -> None:
        """Send it the signal of *fault*; a stop ends after *seconds*, also without this process."""
        self.send(SIGNALS[fault], seconds)

    def send(self, number: int, seconds: float = 0.0) -> None:
        """Send it signal *number*, unless it has ended."""
        with contextlib.suppress(OSError):
            pidfd = os.pidfd_open(self.pid)
            try:
                task = procfs.read(self.pid)
                if task is None or task.ticks != self.ticks or task.state in ("Z", "X"):
                    return
                if number == signal.SIGSTOP:
                    # A timer would be lost with this process, which may be *self* or end first.
                    words = [sys.executable, "-S", "-c", _CONTINUE, str(seconds), str(pidfd)]
                    child = subprocess.Popen(words, pass_fds=(pidfd,), env={})
                    reaper = threading.Thread(target=child.wait, name="chaos-continue", daemon=True)
                    reaper.start()
                signal.pidfd_send_signal(pidfd, number)
            finally:
                os.close(pidfd)


def helpers_of(driver: int) -> list[TargetProcess]:
    """Return the helper processes that *driver* has started, by pid."""
    found: list[TargetProcess] = []
    for task, mark, is_guardian in _children(driver):
        label = _LABEL.search(mark)
        name = "" if label is None else label[2]
        roles = ["guardian"] if is_guardian else [r for r in _ROLES if _ROLES[r].search(name)]
        found += [TargetProcess(*task.key, name, role) for role in roles[:1]]
    return sorted(found, key=lambda each: each.pid)


def trees_of(driver: int) -> set[str]:
    """Return the marks of the process trees of *driver*."""
    labels = (_LABEL.search(mark) for _, mark, _ in _children(driver))
    return {label[1] for label in labels if label is not None}


def _children(driver: int) -> Iterator[tuple[procfs.Task, str, bool]]:
    """Yield the living children of *driver*, their marks, and whether each is a guardian."""
    for task in procfs.read_all().values():
        if task.parent == driver and task.state not in ("Z", "X"):
            with contextlib.suppress(OSError):
                environ = Path(f"/proc/{task.pid}/environ").read_text(errors="replace")
                command = Path(f"/proc/{task.pid}/cmdline").read_text(errors="replace")
                _, _, mark = f"\0{environ}".partition(f"\0{process_tree.VARIABLE}=")
                yield task, mark.partition("\0")[0], "guardian" in command
