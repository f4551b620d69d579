from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from phalanx.runtime.process import reaper
from phalanx.runtime.process.reaper import Reapings
from phalanx.runtime.threads.event_loop import Hub

LONG = 30.0


def start() -> tuple[int, int]:
    """Return the pid and a pidfd of a child that ends at once."""
    pid = os.posix_spawn("/bin/true", ["true"], {})
    pidfd = os.pidfd_open(pid)
    os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT)
    return pid, pidfd


def wait_round(hub: Hub) -> None:
    """Wait until the hub's thread has come round twice."""
    for _ in range(2):
        came = threading.Event()
        hub.post(came.set)
        assert came.wait(LONG)


def wait_let_go(reapings: Reapings) -> None:
    deadline = time.monotonic() + LONG
    while reapings._open:
        assert time.monotonic() < deadline, "still held"
        time.sleep(0.01)


@pytest.mark.usefixtures("leak_check")
def test_a_dead_child_is_collected_and_let_go(hub: Hub) -> None:
    pid, pidfd = start()
    reapings = Reapings(hub)

    reapings.take(pidfd, pid, kill=False)
    wait_let_go(reapings)

    with pytest.raises(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


@pytest.mark.usefixtures("leak_check")
def test_one_that_somebody_else_has_collected_is_let_go_at_once(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reaper, "_PATIENCE", 10 * LONG)
    pid, pidfd = start()
    os.waitpid(pid, 0)
    reapings = Reapings(hub)

    reapings.take(pidfd, pid, kill=False)

    wait_let_go(reapings)


@pytest.mark.usefixtures("leak_check")
def test_one_that_is_not_our_child_yet_is_waited_for(hub: Hub) -> None:
    # Its parent has not collected it, and so it does not come to us.
    ours, theirs = os.pipe()
    parent = os.fork()
    if parent == 0:
        os.close(ours)
        try:
            child = os.posix_spawn("/bin/true", ["true"], {})
            os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
            os.write(theirs, child.to_bytes(4, "little"))
            os.close(theirs)
            signal.pause()
        finally:
            os._exit(1)
    os.close(theirs)
    pid = int.from_bytes(os.read(ours, 4), "little")
    os.close(ours)
    reapings = Reapings(hub)
    try:
        reapings.take(os.pidfd_open(pid), pid, kill=False)
        wait_round(hub)

        assert list(reapings._open) == [pid]
    finally:
        reapings.close()
        os.kill(parent, signal.SIGKILL)
        os.waitpid(parent, 0)
