"""Output of a rank on a node, written again here for the driver's output collector.

Nothing waits: if the collector has no room, output is dropped, and a line says how much.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from phalanx.cluster import Output
    from phalanx.runtime import WorkerOutput


class RemoteOutput:
    """The output of one incarnation; *output* are its ends here, which no process has."""

    def __init__(self, output: WorkerOutput) -> None:
        self._lock = threading.Lock()
        self._ends = {"stdout": output.stdout, "stderr": output.stderr, "log": output.log}
        for fd in self._ends.values():
            os.set_blocking(fd, False)
        self._record = b""  # what there is of a log record whose rest is under way
        self._dropped = 0

    def write(self, message: Output) -> None:
        """Write the output in *message*; does nothing once it is closed."""
        data = message.text.encode("utf-8", "surrogateescape")
        with self._lock:
            fd = self._ends.get(message.stream)
            if fd is None:
                return
            self._dropped += message.dropped
            if message.stream == "log":
                *records, self._record = (self._record + data).split(b"\n")
                for record in records:
                    self._put(fd, record)
                return
            if self._dropped:
                data = b"[phalanx: %d bytes were dropped]\n" % self._dropped + data
                self._dropped = 0
            self._put(fd, data)

    def close(self) -> None:
        """Write nothing any longer: the ends are about to be closed."""
        with self._lock:
            self._ends.clear()

    def _put(self, fd: int, data: bytes) -> None:
        try:
            written = os.write(fd, data)
        except OSError:  # there is no room, or the collector is being replaced
            written = 0
        self._dropped += len(data) - written
