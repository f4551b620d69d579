"""Output of one incarnation of a worker: the ends that it writes to, and its tail.

- The driver has a duplicate of every end that is read: what was written outlives the collector.
- The tail outlives the worker, and is read without asking another process.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from phalanx.runtime.linux import descriptors
from phalanx.runtime.observe.diagnostics import create_crash_output, read_crash_output

from .tail_buffer import Tail

if TYPE_CHECKING:
    from phalanx.runtime.observe.events import WorkerLabels

    from .collector import OutputCollector

_PIPE_BYTES: Final = 1 << 18  # room for a burst while the collector is busy, or being replaced
_LOG_LINES: Final = 50  # of a crash report


@dataclass(frozen=True, slots=True, kw_only=True)
class LastOutput:
    """The last output of one incarnation, for its crash report; as in `CrashReport`."""

    stdout: str
    stderr: str
    logs: tuple[str, ...]
    last_words: str


class WorkerOutput:
    """The ends of one incarnation of a worker.

    Attributes:
        stdout: The child's end, for its descriptor 1.
        stderr: The same for 2.
        log: The child's end of the log channel, for `LogChannel`.
        faults: A memfd, for `install_crash_output`.
        ends: What the collector is given: the tail, and its ends of stdout, stderr and log.
    """

    def __init__(
        self, collector: OutputCollector, key: int, labels: WorkerLabels, tail_bytes: int
    ) -> None:
        """Open every end; `OutputCollector.open_worker` has them read."""
        self.labels = labels
        self.key = key
        self._collector = collector
        with contextlib.ExitStack() as made:  # none is left open where one cannot be made
            out_r, self.stdout = _pipe(made)
            err_r, self.stderr = _pipe(made)
            log_r, self.log = (descriptors.own(end, made) for end in log_pair())
            self.faults = descriptors.own(create_crash_output(), made)
            self._tail = descriptors.own(Tail.create(tail_bytes), made)
            made.pop_all()
        self.ends = (self._tail.fd, out_r, err_r, log_r)
        self._child_ends = [self.stdout, self.stderr, self.log]
        self._closed = False

    def child_fds(self) -> dict[str, int]:
        """Return what a worker is started with beside its stdout and stderr, by name."""
        return {"log": self.log, "faults": self.faults}

    def close_child_ends(self) -> None:
        """Close the writing ends here, once the child has them: else there is no end of file."""
        while self._child_ends:
            descriptors.close(self._child_ends.pop())

    def label(self, labels: WorkerLabels | None = None, *, pid: int | None = None) -> None:
        """Have its lines carry these labels, or this pid, from now on."""
        labels = self.labels if labels is None else labels
        self.labels = labels if pid is None else replace(labels, pid=pid)
        self._collector.relabel(self)

    def drain(self, deadline: float) -> bool:
        """Wait until what it has written so far is in the tail; False at *deadline* (monotonic)."""
        return self._collector.drain(self, deadline)

    def tail(self) -> LastOutput:
        """Return its last output, as far as it has been read. Never waits."""
        return LastOutput(
            stdout=self._tail.text("stdout"),
            stderr=self._tail.text("stderr"),
            logs=tuple(self._tail.text("log").splitlines()[-_LOG_LINES:]),
            last_words=read_crash_output(self.faults),
        )

    def close(self) -> None:
        """Have the collector read what is there, and free the tail."""
        if self._closed or self._collector.is_inherited:
            return
        self._closed = True
        self._collector.remove(self)
        self.close_child_ends()
        for entry in (*self.ends[1:], self.faults, self._tail):
            descriptors.close(entry)


def _pipe(made: contextlib.ExitStack) -> tuple[int, int]:
    reader, writer = (descriptors.own(end, made) for end in os.pipe2(os.O_CLOEXEC))
    os.set_blocking(reader, False)  # the writer's end is another open file and stays as it is
    with contextlib.suppress(OSError):  # past the user's limit for pipes; 64 KiB then
        fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    return reader, writer


def log_pair() -> tuple[int, int]:
    """Return both ends of a log channel, ours first."""
    reader, writer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return reader.detach(), writer.detach()
