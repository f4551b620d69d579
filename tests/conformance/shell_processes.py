"""Tiny real processes: each is a shell that ends as it is told, so that a start costs milliseconds.

Guarantees: `ShellProcesses.start` returns when the process has said that it is ready, and raises
when it ended before. Every end is reported once, before anything that asked for it returns. Closing
the object kills what is left.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import threading
from collections.abc import Callable
from typing import Self

from phalanx.supervision import ExitKind, ExitReason

DEADLINE = 30.0

# By what the start is to do: what the shell does.
SCRIPTS = {
    "ok": 'echo; read -r code; exit "$code"',
    "error": "exit 3",
    "crash": "kill -ABRT $$",
    "ignore": "exit 42",
}
IGNORED = 42

# Exit codes with which a process says that it stopped in an orderly manner, and other ends.
CODES = {"normal": 0, "clean": 40, "shutdown": 40, "shutdown_term": 41}
SIGNALS = {"crash": signal.SIGABRT, "kill": signal.SIGKILL}
MEANINGS = {
    0: ExitReason(ExitKind.NORMAL, code=0),
    40: ExitReason(ExitKind.SHUTDOWN),
    41: ExitReason(ExitKind.SHUTDOWN, "term"),
}


class StartRefusedError(RuntimeError):
    """The process ended before it was ready."""


def exit_reason(code: int) -> ExitReason:
    """Return why a process with this return code ended."""
    if code >= 0:
        return MEANINGS.get(code, ExitReason(ExitKind.CRASH, code=code))
    kind = ExitKind.KILLED if -code == signal.SIGKILL else ExitKind.CRASH
    return ExitReason(kind, signal=-code)


class Process:
    """One process of `ShellProcesses`."""

    def __init__(self, do: str) -> None:
        pipe = subprocess.PIPE
        words = ["/bin/sh", "-c", SCRIPTS[do]]
        self.popen = subprocess.Popen(words, bufsize=0, stdin=pipe, stdout=pipe)
        assert self.popen.stdin is not None
        assert self.popen.stdout is not None
        self.stdin, self.stdout = self.popen.stdin, self.popen.stdout
        self.ended = threading.Event()
        self._lock = threading.Lock()

    def end(self, how: str) -> None:
        """Have it end so, unless it is ending."""
        with self._lock, contextlib.suppress(BrokenPipeError):  # it has ended just now
            if self.stdin.closed:
                return
            if how in SIGNALS:
                self.popen.send_signal(SIGNALS[how])
            else:
                self.stdin.write(f"{CODES[how]}\n".encode())

    def wait(self) -> ExitReason:
        """Return why it has ended, once it has."""
        code = self.popen.wait()
        with self._lock:
            self.stdin.close()
            self.stdout.close()
        return exit_reason(code)


class ShellProcesses:
    """Starts the processes, and tells of their ends one at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._living: set[Process] = set()

    def start(self, do: str, on_end: Callable[[ExitReason], None]) -> Process | None:
        """Start a process; return it when it is ready, None where it had nothing to do."""
        process = Process(do)
        if not process.stdout.read(1):
            reason = process.wait()
            if reason.code == IGNORED:
                return None
            raise StartRefusedError(f"ended in its start: {reason}")
        self._living.add(process)
        threading.Thread(target=self._watch, args=(process, on_end), daemon=True).start()
        return process

    def _watch(self, process: Process, on_end: Callable[[ExitReason], None]) -> None:
        reason = process.wait()
        with self._lock:
            on_end(reason)
        self._living.discard(process)
        process.ended.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in list(self._living):
            process.end("kill")
            process.ended.wait(DEADLINE)
