"""Makes and reaps tiny real processes: one helper that forks, so that a start costs milliseconds.

Guarantees: `Nursery.start` returns when the process has said that it is ready, and raises when it
ended before. Every end is reported once, with its wait status, before anything that asked for it
returns. Closing the nursery kills what is left.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

from phalanx.supervision import ExitKind, ExitReason

DEADLINE = 30.0

# Exit codes with which a process says that it stopped in an orderly manner.
SHUTDOWN_CODE, SHUTDOWN_TERM_CODE, IGNORE_CODE = 40, 41, 42

MEANINGS = {
    0: ExitReason(ExitKind.NORMAL, code=0),
    SHUTDOWN_CODE: ExitReason(ExitKind.SHUTDOWN),
    SHUTDOWN_TERM_CODE: ExitReason(ExitKind.SHUTDOWN, "term"),
}

# The helper: single-threaded, so that forking is safe. It reads lines "start ID DO ON_SHUTDOWN"
# and "signal ID NUMBER"; it writes "ready ID", "ended ID STATUS".
_HELPER = f"""
import os, select, signal, sys
commands = os.fdopen(0, "r", buffering=1)
wake_r, wake_w = os.pipe()
os.set_blocking(wake_w, False); os.set_blocking(wake_r, False)
signal.signal(signal.SIGCHLD, lambda *_: None)
signal.set_wakeup_fd(wake_w)
CODES = [0, {SHUTDOWN_CODE}, {SHUTDOWN_TERM_CODE}]
ENDS = {{signal.SIGRTMIN + n: code for n, code in enumerate(CODES)}}
TERM = {{"clean": {SHUTDOWN_CODE}, "normal": 0}}
HELD = [signal.SIGTERM, *ENDS]

def child(do):
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if do == "error":
        os._exit(3)
    if do == "crash":
        os.abort()
    if do == "ignore":
        os._exit({IGNORE_CODE})

def live(on_shutdown):
    # Waited for and not handled: Python sleeps through a signal that comes as its sleep begins.
    while True:
        number = signal.sigwait(HELD)
        if number in ENDS:
            os._exit(ENDS[number])
        if on_shutdown == "crash":
            os.abort()
        if on_shutdown != "hang":
            os._exit(TERM[on_shutdown])

pids, ids = {{}}, {{}}
def say(line):
    os.write(1, (line + "\\n").encode())
def reap():
    while pids:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        say(f"ended {{ids.pop(pid)}} {{status}}")
        pids.pop(next(i for i, p in pids.items() if p == pid))

while True:
    ready = select.select([0, wake_r], [], [])[0]
    if wake_r in ready:
        os.read(wake_r, 4096)
        reap()
    if 0 not in ready:
        continue
    line = os.read(0, 512).decode()
    if not line:
        break
    word, name, *rest = line.split()
    if word == "signal":
        if name in pids:
            os.kill(pids[name], int(rest[0]))
        continue
    signal.pthread_sigmask(signal.SIG_BLOCK, HELD)
    up_r, up_w = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(0); os.close(1); os.close(up_r); os.close(wake_r); os.close(wake_w)
        do, on_shutdown = rest
        child(do)
        os.write(up_w, b"R")
        os.close(up_w)
        live(on_shutdown)
    os.close(up_w)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD)
    pids[name], ids[pid] = pid, name
    if os.read(up_r, 1):
        say(f"ready {{name}}")
    os.close(up_r)
for pid in ids:
    os.kill(pid, signal.SIGKILL)
while ids:
    ids.pop(os.wait()[0])
"""

ENDINGS = {
    "normal": signal.SIGRTMIN,
    "shutdown": signal.SIGRTMIN + 1,
    "shutdown_term": signal.SIGRTMIN + 2,
    "crash": signal.SIGABRT,
    "kill": signal.SIGKILL,
}


class StartRefusedError(RuntimeError):
    """The process ended before it was ready."""


def exit_reason(status: int) -> ExitReason:
    """Return why a process with this wait status ended."""
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return MEANINGS.get(code, ExitReason(ExitKind.CRASH, code=code))
    kind = ExitKind.KILLED if -code == signal.SIGKILL else ExitKind.CRASH
    return ExitReason(kind, signal=-code)


@dataclass
class Process:
    """One process of the nursery."""

    name: str
    on_end: Callable[[ExitReason], None]
    settled: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)
    is_up: bool = False
    status: int = 0


class Nursery:
    """The helper and the thread that reads what it says."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._commands = ours
        self._helper = subprocess.Popen(
            [sys.executable, "-S", "-E", "-c", _HELPER],
            stdin=theirs.fileno(),
            stdout=subprocess.PIPE,
            text=True,
        )
        theirs.close()
        self._lock = threading.Lock()
        self._processes: dict[str, Process] = {}
        self._count = 0
        self._reader = threading.Thread(target=self._read, name="nursery", daemon=True)
        self._reader.start()

    def start(
        self, do: str, on_shutdown: str, on_end: Callable[[ExitReason], None]
    ) -> Process | None:
        """Start a process; return it when it is ready, None where it had nothing to do."""
        with self._lock:
            self._count += 1
            process = Process(str(self._count), on_end)
            self._processes[process.name] = process
            self._commands.send(f"start {process.name} {do} {on_shutdown}".encode())
        if not process.settled.wait(DEADLINE):
            raise AssertionError("the nursery does not answer")
        if process.is_up:
            return process
        if os.waitstatus_to_exitcode(process.status) == IGNORE_CODE:
            return None
        raise StartRefusedError(f"ended in its start: {exit_reason(process.status)}")

    def signal(self, process: Process, number: int) -> None:
        """Send a signal, if the process has not been reaped."""
        with self._lock:
            self._commands.send(f"signal {process.name} {number}".encode())

    def _read(self) -> None:
        assert self._helper.stdout is not None
        for line in self._helper.stdout:
            word, name, *rest = line.split()
            process = self._processes[name]
            if word == "ready":
                process.is_up = True
                process.settled.set()
                continue
            del self._processes[name]
            process.status = int(rest[0])
            if process.is_up:
                process.on_end(exit_reason(process.status))
            process.ended.set()
            process.settled.set()

    def close(self) -> None:
        """Kill what is left, and wait for it."""
        self._commands.close()
        self._helper.wait(DEADLINE)
        self._reader.join(DEADLINE)
        assert self._helper.stdout is not None
        self._helper.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
