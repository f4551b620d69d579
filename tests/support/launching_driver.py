"""Drivers for the tests that kill them.

Usage: ``python -m tests.support.launching_driver SCENARIO [ARGUMENT]``.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import signal
import sys
from pathlib import Path
from typing import Any

from tests.support.entry_points import wait_for_ever
from tests.support.processes import LONG, Starter, is_alive, soon

from phalanx.runtime import descriptors
from phalanx.runtime.linux import procfs
from phalanx.runtime.process.launcher import Launcher
from phalanx.runtime.threads.event_loop import EventLoop
from phalanx.supervision import RuntimeFault


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


class Driver:
    def __init__(self, preload: tuple[str, ...] = ()) -> None:
        self.loop = EventLoop()
        self.launcher = Launcher(self.loop, preload=preload)
        self.starter = Starter(self.launcher)

    def helpers(self) -> dict[str, int]:
        guardian, zygote = self.launcher._guardian.pid, self.launcher.zygote().pid
        assert guardian is not None
        assert zygote is not None
        return {"guardian": guardian, "zygote": zygote}

    def close(self) -> None:
        self.launcher.close(soon())
        self.loop.close()
        self.starter.line.close()


def churn(_argument: str) -> None:
    """Start workers of all kinds, kill and restart them, until somebody ends this."""
    say(begun=True)
    driver = Driver()
    starter = driver.starter
    while True:
        workers = [
            starter.start("beget", "daemon session fork hold_gil"),
            starter.start("beget", "orphan child bare"),
            starter.start("beget", "daemon", method="exec"),
        ]
        for _ in workers:
            starter.line.receive()
        say(round=True)
        for worker in workers:
            worker.kill_tree(soon())
            worker.close()


def stay(_argument: str) -> None:
    driver = Driver()
    worker = driver.starter.start("beget", "daemon hold_gil")
    daemon = driver.starter.line.receive()["pids"]["daemon"]
    say(worker=worker.pid, daemon=daemon, **driver.helpers())
    wait_for_ever()


def two_zygotes(_argument: str) -> None:
    """Stay, with a worker of each of two zygotes."""
    driver = Driver()
    zygotes: list[int | None] = []
    for preload in ((), ("json",)):
        driver.starter.start("beget", "daemon", preload=preload)
        driver.starter.line.receive()
        zygotes.append(driver.launcher.zygote(preload).pid)
    say(guardian=driver.launcher._guardian.pid, zygotes=zygotes)
    wait_for_ever()


def imports(folder: str) -> None:
    """Stay, while the zygote imports a module of *folder*."""
    sys.path.insert(0, folder)
    driver = Driver(("endless",))
    driver.launcher.warm()
    say(guardian=driver.launcher._guardian.pid)
    wait_for_ever()


def held_open(_argument: str) -> None:
    """Stay, while a child that Python knows nothing of holds every descriptor."""
    driver = Driver()
    worker = driver.starter.start("stay")
    driver.starter.line.receive()
    child = ctypes.CDLL(None).fork()
    if child == 0:
        wait_for_ever()
    say(worker=worker.pid, user=child, **driver.helpers())
    wait_for_ever()


def replaced(_argument: str) -> None:
    """Become another program, as ``os.exec`` does."""
    driver = Driver()
    driver.starter.start("beget", "daemon")
    driver.starter.line.receive()
    os.execv("/bin/sleep", ["sleep", "1000"])


def exits_while_stopped(_argument: str) -> None:
    driver = Driver()
    worker = driver.starter.start("stay")
    driver.starter.line.receive()
    say(worker=worker.pid)
    assert worker.wait(soon())
    assert worker.status is not None
    say(signal=worker.status.signal)
    driver.close()


def _probe(queue: Any, starter: Starter, worker: Any, fds: dict[int, str]) -> None:
    """In a forked child: try everything that could harm the parent's processes."""
    held = {fd: target for fd, target in fds.items() if _targets([fd]) == {fd: target}}
    worker.send_signal(signal.SIGKILL)
    worker.kill_tree(soon())
    worker.close()
    starter.launcher.close(soon())
    try:
        starter.start("stay")
        refused = False
    except RuntimeFault:
        refused = True
    queue.put((held, refused))


def _targets(fds: list[int]) -> dict[int, str]:
    paths = {fd: Path(f"/proc/self/fd/{fd}") for fd in fds}
    return {fd: str(path.readlink()) for fd, path in paths.items() if path.is_symlink()}


def forks(_argument: str) -> None:
    driver = Driver()
    worker = driver.starter.start("stay")
    driver.starter.line.receive()
    owned: set[Any] = set(descriptors._owned)
    fds = _targets([entry if isinstance(entry, int) else entry.fileno() for entry in owned])
    assert len(fds) >= 7, fds  # the loop's two, two for each helper, the worker's one
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=_probe, args=(queue, driver.starter, worker, fds))
    child.start()
    held, refused = queue.get()
    child.join(LONG)
    queue.close()
    assert refused
    assert held == {}, held
    assert child.exitcode == 0
    assert worker.status is None
    assert all(is_alive(pid) for pid in (worker.pid, *driver.helpers().values()))
    assert driver.starter.start("leave", 0).wait(soon())
    driver.close()
    say(ok=True)


def first_process(_argument: str) -> None:
    """Be PID 1 of a namespace: orphans come to us whether we want them or not."""
    assert os.getpid() == 1
    driver = Driver()
    for method in ("zygote", "exec"):
        worker = driver.starter.start("beget", "daemon orphan session", method=method)
        driver.starter.line.receive()
        fell = driver.starter.start("fall", int(signal.SIGTERM), method=method)
        assert fell.wait(soon())
        assert fell.status is not None
        assert fell.status.signal == signal.SIGTERM
        assert worker.kill_tree(soon()) == ()
    driver.close()
    left = [task for task in procfs.read_all().values() if task.pid != 1 and task.parent in (0, 1)]
    assert left == [], left
    say(ok=True)


if __name__ == "__main__":
    sys.exit(globals()[sys.argv[1]](sys.argv[2] if len(sys.argv) > 2 else ""))
