"""What the processes run that the tests of starting and ending start."""

from __future__ import annotations

import ctypes
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from tests.support.processes import Starter

from phalanx.runtime.linux import procfs
from phalanx.runtime.process.launcher import Launcher
from phalanx.runtime.threads.event_loop import EventLoop


def say(fds: Mapping[str, int], **what: Any) -> None:
    os.write(fds["out"], json.dumps(what).encode() + b"\n")


def wait_for_ever() -> None:
    while True:
        signal.pause()


def leave(payload: bytes, fds: Mapping[str, int]) -> int:
    """Exit with the code in *payload*."""
    return int(payload)


def fall(payload: bytes, fds: Mapping[str, int]) -> None:
    """Die of the signal in *payload*."""
    os.kill(os.getpid(), int(payload))
    wait_for_ever()


def tell(payload: bytes, fds: Mapping[str, int]) -> None:
    """Say what this process is, then stay."""
    say(
        fds,
        pid=os.getpid(),
        ppid=os.getppid(),
        session=os.getsid(0),
        cwd=str(Path.cwd()),
        env=dict(os.environ),
        sys_path=sys.path,
        payload=payload.decode(),
        ignored=[n for n in (1, 2, 15, 17) if signal.getsignal(n) == signal.SIG_IGN],
        blocked=[int(n) for n in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
        descriptors=sorted(str(fd) for fd in procfs.numbers_in("/proc/self/fd")),
        names=dict(fds),
        modules=sorted(sys.modules),
        random=random.random(),
        hash=hash("phalanx"),
        torch=sys.modules["torch"].initial_seed() if "torch" in sys.modules else None,
        temporary=tempfile.gettempdir(),
    )
    print("to stdout", flush=True)
    print("to stderr", file=sys.stderr, flush=True)
    wait_for_ever()


def stay(payload: bytes, fds: Mapping[str, int]) -> None:
    """Say the pid, then stay."""
    say(fds, pid=os.getpid())
    wait_for_ever()


def beget(payload: bytes, fds: Mapping[str, int]) -> None:
    """Start the kinds of descendant named in *payload*, say their pids, then stay or end."""
    pids: dict[str, int] = {}
    kinds = payload.decode().split()
    for kind in kinds:
        if kind in DESCENDANTS:
            pids[kind] = DESCENDANTS[kind]()
    say(fds, pid=os.getpid(), pids=pids)
    if "hold_gil" in kinds:
        ctypes.PyDLL(None).sleep(1000)  # PyDLL keeps the lock
    if "end" not in kinds:
        wait_for_ever()


def drive(payload: bytes, fds: Mapping[str, int]) -> None:
    """Be a driver: start a worker with a daemon, say the pids of everything, then stay."""
    loop = EventLoop()
    launcher = Launcher(loop, preload=())
    starter = Starter(launcher)
    worker = starter.start("beget", "daemon")
    daemon = starter.line.receive()["pids"]["daemon"]
    helpers = [launcher._guardian.pid, launcher.zygote().pid]
    say(fds, pid=os.getpid(), pids=[*helpers, worker.pid, daemon])
    if b"end" not in payload:
        wait_for_ever()


def _sleep(**options: Any) -> int:
    return subprocess.Popen(["/bin/sleep", "1000"], **options).pid


def _heavy() -> int:
    """Start a process in a session of its own that takes a while to end: it holds memory."""
    hold = "memory = b'x' * (1 << 29); print(flush=True); import time; time.sleep(1000)"
    command = [sys.executable, "-S", "-c", hold]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    assert child.stdout is not None
    assert child.stdout.readline()
    return child.pid


def _fork() -> int:
    pid = os.fork()
    if pid == 0:
        wait_for_ever()
    return pid


def _daemon() -> int:
    """Fork twice and leave the session, as daemons do; no exec, so only memory holds the mark."""
    read, write = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if (pid := os.fork()) == 0:
            wait_for_ever()
        os.write(write, str(pid).encode())
        os._exit(0)
    pid = int(os.read(read, 20))
    os.close(read)
    os.close(write)
    os.wait()
    return pid


def _orphan() -> int:
    """An exec'ed daemon."""
    shell = "setsid sleep 1000 >/dev/null 2>&1 & echo $!"
    return int(subprocess.run(["sh", "-c", shell], stdout=subprocess.PIPE, check=True).stdout)


def _zombie() -> int:
    """One that has ended, and that this process never collects."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    return pid


def _lost() -> int:
    """One whose parent has ended, and that has ended itself since."""
    read, write = os.pipe()
    if os.fork() == 0:
        parent = os.getpid()
        if (pid := os.fork()) == 0:
            while os.getppid() == parent:
                time.sleep(0.001)
            os._exit(0)
        os.write(write, str(pid).encode())
        os._exit(0)
    os.wait()
    pid = int(os.read(read, 20))
    os.close(read)
    os.close(write)
    return pid


def _forker() -> int:
    """A process that is replaced by its own child again and again."""
    pid = os.fork()
    if pid == 0:
        os.setsid()
        while True:
            if os.fork() != 0:
                os._exit(0)
            time.sleep(0.001)
    return pid


DESCENDANTS: dict[str, Callable[[], int]] = {
    "child": _sleep,
    "session": partial(_sleep, start_new_session=True),
    "heavy": _heavy,
    "bare": partial(_sleep, env={}),
    "fork": _fork,
    "daemon": _daemon,
    "orphan": _orphan,
    "forker": _forker,
    "zombie": _zombie,
    "lost": _lost,
}
