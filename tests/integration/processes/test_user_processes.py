"""What goes on in the driver beside its workers: daemons, children of the user's, closing."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time

import pytest
from tests.support.processes import LONG, Starter, is_alive, soon, start_thread, wait_until
from tests.support.programs import run_python

from phalanx.runtime.linux import procfs
from phalanx.runtime.process import orphan_reaper
from phalanx.runtime.process.launcher import Launcher
from phalanx.runtime.threads.event_loop import EventLoop
from phalanx.supervision import RuntimeFault

from .test_launcher import zygote_pid


def test_nobody_is_adopted_while_nothing_is_being_started(starter: Starter) -> None:
    process = starter.start("stay")
    starter.line.receive()
    shell = "setsid sleep 1000 >/dev/null 2>&1 & echo $!"
    out = subprocess.run(["sh", "-c", shell], stdout=subprocess.PIPE, check=True).stdout

    task = procfs.read(int(out))
    os.kill(int(out), signal.SIGKILL)

    assert task is not None
    assert task.parent != os.getpid()
    assert process.status is None


BORN_BEFORE = "setsid sleep 1000 >/dev/null 2>&1 & echo $!; read go"
# `setsid --wait` forks and waits: only the grandchild is orphaned, in a session not its own.
BORN_DURING = "read go; setsid --fork --wait sh -c 'sleep 1000 >/dev/null 2>&1 & echo $!'"


@pytest.mark.parametrize("shell", [BORN_BEFORE, BORN_DURING], ids=["before", "during"])
def test_a_daemon_adopted_during_a_start_is_reaped_and_not_waited_for(
    starter: Starter, shell: str
) -> None:
    starter.start("leave", 0).wait(soon())
    zygote = zygote_pid(starter.launcher)
    user = subprocess.Popen(
        ["sh", "-c", shell], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert user.stdin is not None
    assert user.stdout is not None
    daemon = int(user.stdout.readline()) if shell == BORN_BEFORE else 0
    if daemon:  # the kernel dates processes by the hundredth of a second
        born = procfs.read(daemon)
        assert born is not None
        wait_until(lambda: time.clock_gettime(time.CLOCK_BOOTTIME) * 100 > born.ticks + 1)
    os.kill(zygote, signal.SIGSTOP)
    thread = start_thread(starter.start, "stay")
    wait_until(lambda: orphan_reaper._open)
    user.stdin.write("\n")
    user.stdin.close()
    daemon = daemon or int(user.stdout.readline())
    user.stdout.close()
    assert user.wait(LONG) == 0
    wait_until(lambda: (task := procfs.read(daemon)) and task.parent == os.getpid(), "adoption")

    os.kill(zygote, signal.SIGCONT)
    thread.join(LONG)
    assert not thread.is_alive()
    os.kill(daemon, signal.SIGKILL)

    wait_until(lambda: procfs.read(daemon) is None, "the reaping")


SETSID = """
import os, subprocess, time
from phalanx.runtime.threads.event_loop import EventLoop
from phalanx.runtime.process.child_main import LaunchSpec
from phalanx.runtime.process.launcher import Launcher

mine = subprocess.Popen(["sh", "-c", "read x; exit 5"], stdin=subprocess.PIPE)
os.setsid()
loop = EventLoop()
launcher = Launcher(loop, preload=())
for _ in range(2):
    spec = LaunchSpec(entry="tests.support.entry_points:leave", payload=b"0", label="one")
    [process] = launcher.launch(spec, on_exit=lambda _: None, deadline=time.monotonic() + 30)
    assert process.wait(time.monotonic() + 30)
    mine.stdin.close()
    os.waitid(os.P_PID, mine.pid, os.WEXITED | os.WNOWAIT)
launcher.close(time.monotonic() + 30)
print(mine.wait())
"""


def test_a_driver_that_leads_a_new_session_keeps_the_children_it_had() -> None:
    done = run_python("-c", SETSID)

    assert (done.stdout, done.stderr) == ("5\n", "")


IS_SUBREAPER = """
import os, signal, subprocess, time
from pathlib import Path
from phalanx.runtime.linux import procfs, syscalls
from phalanx.runtime.process.launcher import Launcher
from phalanx.runtime.threads.event_loop import EventLoop
from tests.support.processes import Starter, wait_until, soon

syscalls.set_subreaper(on=True)
mine = [subprocess.Popen(["sh", "-c", "exit 5"], start_new_session=new) for new in (True, False)]
loop = EventLoop()
launcher = Launcher(loop, preload=())
starter = Starter(launcher)
worker = starter.start("beget", "zombie lost child fork")
pids = starter.line.receive()["pids"]
wait_until(lambda: procfs.read(pids["lost"]).state == "Z")
os.kill(worker.pid, signal.SIGKILL)
assert worker.wait(soon())
worker.kill_tree(soon())
worker.close()
wait_until(lambda: not any(map(procfs.read, pids.values())), "the collection of all of them")
launcher.close(soon())
loop.close()
print(Path("/proc/self/task", str(os.getpid()), "children").read_text().split() ==
    [str(one.pid) for one in mine], [one.wait() for one in mine])
"""


def test_a_driver_that_is_a_subreaper_collects_what_workers_left_and_nothing_of_the_users() -> None:
    done = run_python("-c", IS_SUBREAPER)

    assert (done.stdout, done.stderr) == ("True [5, 5]\n", "")


def test_closing_ends_workers_and_helpers_and_the_next_close_what_was_not_ended_in_time(
    loop: EventLoop,
) -> None:
    launcher = Launcher(loop, preload=())
    starter = Starter(launcher)
    process = starter.start("beget", "daemon heavy")
    begotten = starter.line.receive()["pids"].values()
    helpers = [zygote_pid(launcher), launcher._guardian.pid or 0]

    with contextlib.suppress(RuntimeFault):  # unless all of them are that quick
        launcher.close(time.monotonic() - 1)
    launcher.close(soon())

    assert process.status is not None
    assert not any(map(is_alive, begotten))
    assert [procfs.read(pid) for pid in (process.pid, *helpers)] == [None, None, None]
    with pytest.raises(RuntimeFault, match="closed"):
        starter.start("stay")
    starter.line.close()
