"""Which process of a driver is what: found by the marks that all of them carry.

Guarantees: only processes of the driver asked about are found, with what makes them known again
(`Part.key`), so that a signal never goes to one that merely got the number of another.
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

from phalanx.runtime import MARK, read_task, read_tasks

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from phalanx.runtime import Task

_CONTINUE = (
    "import signal, sys, time; time.sleep(float(sys.argv[1])); "
    "signal.pidfd_send_signal(int(sys.argv[2]), signal.SIGCONT)"
)
_LABEL = re.compile(r"/\d+\.([^;]*);*$")


@dataclass(frozen=True, slots=True)
class Part:
    """One process of a driver.

    Attributes:
        role: ``zygote``, ``logs``, ``store``, ``standby``, ``rank`` or ``other``.
        label: What it was started as.
    """

    pid: int
    ticks: int
    role: str
    label: str

    @contextlib.contextmanager
    def pidfd(self) -> Generator[int | None]:
        """Hold a pidfd of it; None if it has ended."""
        try:
            pidfd = os.pidfd_open(self.pid)
        except OSError:
            yield None
            return
        try:
            task = read_task(self.pid)
            ended = task is None or task.ticks != self.ticks or task.state in ("Z", "X")
            yield None if ended else pidfd
        finally:
            os.close(pidfd)

    def send(self, number: int) -> bool:
        """Send it signal *number*; False if it has ended."""
        with self.pidfd() as pidfd:
            if pidfd is None:
                return False
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, number)
                return True
            return False

    def stop(self, seconds: float) -> None:
        """Stop it; a process of its own continues it after *seconds*.

        A timer of the caller would be lost with the caller, which may be *self* or die first.
        """
        with self.pidfd() as pidfd:
            if pidfd is None:
                return
            words = [sys.executable, "-S", "-c", _CONTINUE, str(seconds), str(pidfd)]
            child = subprocess.Popen(words, pass_fds=(pidfd,))
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGSTOP)
        threading.Thread(target=child.wait, name="chaos-continue", daemon=True).start()


def parts_of(driver: int) -> list[Part]:
    """Return the processes that *driver* has started, by pid."""
    found: list[Part] = []
    for task, mark in _marked(driver):
        label = _LABEL.search(mark.rstrip(";") + ";")
        if label is not None:
            name = label.group(1)
            found.append(Part(task.pid, task.ticks, _role(name), name))
    return sorted(found, key=lambda part: part.pid)


def trees_of(driver: int) -> set[str]:
    """Return the marks of the trees that *driver* has processes of."""
    found: set[str] = set()
    for _, mark in _marked(driver):
        trees = [each for each in mark.split(";") if "/" in each]
        found.update(each.partition("/")[0] for each in trees[-1:])
    return found


def _marked(driver: int) -> Iterator[tuple[Task, str]]:
    """The living children of *driver* that carry a mark, and the mark."""
    for task in read_tasks().values():
        if task.parent != driver or task.state in ("Z", "X"):
            continue
        try:
            environ = Path(f"/proc/{task.pid}/environ").read_bytes()
        except OSError:
            continue
        for entry in environ.split(b"\0"):
            name, _, value = entry.decode(errors="replace").partition("=")
            if name == MARK:
                yield task, value


def _role(label: str) -> str:
    if label == "zygote":
        return "zygote"
    if label == "scribe":
        return "logs"
    if "/store#" in label:
        return "store"
    if re.search(r"/standby#-?\d+$", label):  # and not what stands beside one
        return "standby"
    return "rank" if re.search(r"/\d+#\d+$", label) else "other"
