"""Output collectors, plain child processes that write, and a terminal that tests read."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, cast

from tests.support.processes import Lines, soon

from phalanx.runtime.observe.events import WorkerLabels
from phalanx.runtime.output.collector_client import WorkerOutput

LONG = 60.0  # seconds; no test takes them unless something is broken

_WORKER = """
import os, sys
from phalanx.runtime.observe.events import WorkerLabels
from phalanx.runtime.observe.log_channel import worker_logger
labels = WorkerLabels(**{labels!r})
log, faults = {fds!r}
{code}
"""


class Worker:
    """A child that runs *code*, with ``log`` and ``faults`` as descriptors and its ``labels``."""

    def __init__(self, output: WorkerOutput, code: str) -> None:
        fds = list(output.child_fds().values())
        labels = asdict(output.labels)
        self._popen = subprocess.Popen(
            [sys.executable, "-c", _WORKER.format(labels=labels, fds=fds, code=code)],
            stdin=subprocess.PIPE,
            stdout=output.stdout,
            stderr=output.stderr,
            pass_fds=fds,
            start_new_session=True,
        )
        self.pid = self._popen.pid
        output.label(pid=self.pid)
        output.close_child_ends()

    def go(self) -> None:
        """Let a worker that waits in ``input()`` go on."""
        assert self._popen.stdin is not None
        self._popen.stdin.write(b"\n")
        self._popen.stdin.flush()

    def wait(self) -> int:
        code = self._popen.wait(LONG)
        if self._popen.stdin is not None:
            self._popen.stdin.close()
        return code

    def is_running(self) -> bool:
        return self._popen.poll() is None

    def kill(self, sig: int = signal.SIGKILL) -> int:
        os.kill(self.pid, sig)
        return self.wait()


class Console:
    """Stands for the driver's terminal: a pipe, read only when a test says so."""

    def __init__(self) -> None:
        self._reader, self.fd = os.pipe()
        self._lines = Lines(self._reader)
        self.lines: list[str] = []

    def until(self, wanted: Callable[[str], bool]) -> str:
        """Return the first line from here on that is *wanted*; earlier ones stay in `lines`."""
        deadline = soon()
        while True:
            self.lines.append(self._lines.next(deadline, lambda: self.lines[-5:]).decode())
            if wanted(self.lines[-1]):
                return self.lines[-1]

    def record(self, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The same for a console of JSON."""
        return cast("dict[str, Any]", json.loads(self.until(lambda line: wanted(json.loads(line)))))

    def close(self) -> None:
        os.close(self._reader)
        os.close(self.fd)


def labels_of(rank: int, **more: Any) -> WorkerLabels:
    return WorkerLabels(child=f"root/tp/{rank}", group="tp", rank=rank, **more)
