"""`Bare`: a process equal to a rank with nothing around it, killed and awaited by its pidfd.

What knowing of a death costs at least. A process that has imported torch forks a child for each
death, as a zygote does a rank.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from importlib import import_module
from typing import Self


class Bare:
    """The process that forks, on a line of input."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.kill()  # returns when torch is there

    def kill(self) -> float:
        """Return the seconds from a child's SIGKILL to the news of it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(file=self._process.stdin, flush=True)
        return float(self._process.stdout.readline())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()


def death() -> float:
    """Fork a child, kill it, and return how long the news took."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(writer, b".")
        time.sleep(600)
        os._exit(0)
    os.read(reader, 1)  # it is up, as a rank is
    os.close(reader)
    os.close(writer)
    pidfd = os.pidfd_open(pid)
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    began = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    poller.poll()
    took = time.monotonic() - began
    os.close(pidfd)
    os.waitpid(pid, 0)
    return took


if __name__ == "__main__":
    import_module("torch")
    for _ in sys.stdin:
        print(death(), flush=True)
