from __future__ import annotations

import os
import signal
import subprocess
from functools import partial

import pytest
from tests.support.processes import LONG, soon, start_thread, wait_until

from phalanx.runtime.process import orphan_reaper
from phalanx.runtime.process.orphan_reaper import Reaper
from phalanx.runtime.threads.event_loop import EventLoop


@pytest.mark.parametrize("by_others", [False, True])
def test_a_dead_child_is_collected_and_let_go_at_once_where_others_have_collected_it(
    loop: EventLoop, monkeypatch: pytest.MonkeyPatch, by_others: bool
) -> None:
    monkeypatch.setattr(orphan_reaper, "_REAP_TIMEOUT", 10 * LONG)
    pid = os.posix_spawn("/bin/true", ["true"], {})
    pidfd = os.pidfd_open(pid)
    os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT)
    if by_others:
        os.waitpid(pid, 0)
    orphans = Reaper(loop)

    orphans.take(pidfd, pid, kill=False)

    wait_until(lambda: not orphans._orphans)
    with pytest.raises(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def test_one_that_is_not_our_child_yet_is_waited_for_also_at_the_end(loop: EventLoop) -> None:
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
    orphans = Reaper(loop)
    orphan_reaper.open_window()
    try:
        orphans.take(os.pidfd_open(pid), pid, kill=False)
        for _ in range(2):  # until its thread has come round
            loop.call(lambda: None)

        assert list(orphans._orphans) == [pid]
    finally:
        closing = start_thread(partial(orphans.close, soon()))
        os.kill(parent, signal.SIGKILL)
        os.waitpid(parent, 0)
        closing.join(LONG)
        orphan_reaper.close_window()
    with pytest.raises(ChildProcessError):  # it has been collected
        os.waitpid(pid, os.WNOHANG)


def test_the_end_waits_for_no_process_that_is_left_alone(loop: EventLoop) -> None:
    with subprocess.Popen(["sleep", "1000"]) as unrelated:
        orphans = Reaper(loop)
        orphans.take(os.pidfd_open(unrelated.pid), unrelated.pid, kill=False)

        orphans.close(soon())

        assert unrelated.poll() is None
        unrelated.kill()
