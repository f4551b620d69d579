"""Hunts among many processes, by a mark alone."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.processes import soon, wait_until
from tests.support.programs import run_python

from phalanx.runtime.linux import process_tree, procfs
from phalanx.runtime.process import interpreter

# So many that to read them all takes longer than a generation of the forker lives.
CROWD = """
import os, sys
for _ in range(150):
    if os.fork() == 0:
        os.read(0, 1)  # nothing, once nobody holds the other end
        os._exit(0)
os.write(1, b"x")
os.read(0, 1)
"""
# Replaced by its own child again and again; ends by itself where nobody can catch it.
FORKER = """
import os, time
os.setsid()
os.write(1, b"x")
end = time.monotonic() + 20
while time.monotonic() < end:
    if os.fork():
        os._exit(0)
    time.sleep(0.0005)
"""


# Its main thread ends, and another goes on.
HEADLESS = """
import ctypes, threading
threading.Thread(target=threading.Event().wait).start()
ctypes.CDLL(None).pthread_exit(None)
"""


def test_a_process_whose_main_thread_has_ended_is_not_dead() -> None:
    with subprocess.Popen([sys.executable, "-S", "-c", HEADLESS]) as started:
        try:
            wait_until(lambda: (task := procfs.read(started.pid)) is not None and task.state == "Z")
            task = procfs.read(started.pid)
            assert task is not None
            assert not task.is_dead
        finally:
            started.kill()

        os.waitid(os.P_PID, started.pid, os.WEXITED | os.WNOWAIT)
        task = procfs.read(started.pid)
        assert task is not None
        assert task.is_dead


@pytest.fixture
def crowd() -> Iterator[None]:
    with subprocess.Popen(
        [sys.executable, "-S", "-c", CROWD], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as started:
        assert started.stdout is not None
        assert started.stdout.read(1) == b"x"
        yield


@pytest.mark.usefixtures("crowd")
def test_one_that_is_another_process_whenever_it_is_looked_at_is_ended() -> None:
    for _ in range(5):
        mark = uuid.uuid4().hex
        with subprocess.Popen(
            [sys.executable, "-S", "-c", FORKER], env={"MARK": mark}, stdout=subprocess.PIPE
        ) as first:
            assert first.stdout is not None
            assert first.stdout.read(1) == b"x"
            assert first.wait(60) == 0
            quarry = process_tree.TreeTarget(mark.encode())

            left = process_tree.kill(quarry, soon())

            assert left == ()
            assert process_tree.find(quarry)[0] == {}
            # Nobody holds the pipe any more: a surer sign than not to find him.
            assert select.select([first.stdout], [], [], 10)[0]


# Has shared memory and a semaphore with names, and so a resource tracker of Python's.
OWNER = """
import os, sys
from multiprocessing import get_context, shared_memory
os.setsid()
memory = shared_memory.SharedMemory(create=True, size=1)
lock = get_context("spawn").Lock()
print(memory.name, f"sem.{lock._semlock.name.strip('/')}", flush=True)
sys.stdin.read()
"""


def test_what_a_resource_tracker_is_to_remove_is_removed() -> None:
    mark = uuid.uuid4().hex
    with subprocess.Popen(
        [sys.executable, "-S", "-c", OWNER],
        env={"MARK": mark},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as owner:
        assert owner.stdout is not None
        named = [Path("/dev/shm", name) for name in owner.stdout.readline().split()]
        assert [each.exists() for each in named] == [True, True]

        left = process_tree.kill(process_tree.TreeTarget(mark.encode()), soon())

    assert left == ()
    assert [each.exists() for each in named] == [False, False]


# Has as many descriptors free as it was told, at first and at most, and must end forty processes.
SHORT = """
import contextlib, os, resource, subprocess, sys, time, uuid
from phalanx.runtime.linux import process_tree, procfs

mark = uuid.uuid4().hex
code = "import os; os.setsid(); os.write(1, b'x'); os.read(0, 1)"
crowd = [
    subprocess.Popen(
        [sys.executable, "-S", "-c", code],
        env={"MARK": mark}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )
    for _ in range(40)
]
for each in crowd:
    assert each.stdout.read(1) == b"x"
highest = max(map(int, os.listdir("/proc/self/fd")))  # the listing's own
soft, hard = (highest + int(free) for free in sys.argv[1:3])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
if sys.argv[1] == "0":
    with contextlib.suppress(OSError):
        while True:
            os.dup(0)
pid = crowd[0].pid
roots = [(pid, procfs.read(pid).ticks)] if sys.argv[1] != "0" else [(pid, 1)]
quarry = process_tree.TreeTarget(mark.encode(), roots)
left = process_tree.kill(quarry, time.monotonic() + float(sys.argv[3]))
print(sum(each.poll() is not None for each in crowd), [one.pid == pid for one in left])
for each in crowd:
    each.stdin.close()
    each.wait()
"""


@pytest.mark.parametrize(
    ("free", "most", "seconds", "says"),
    [("3", "3", "60", "40 []"), ("0", "0", "0.1", "0 [True]"), ("0", "100", "60", "40 []")],
    ids=["few", "none", "none before the soft limit is raised"],
)
def test_a_kill_that_is_short_of_descriptors_ends_all_or_says_that_it_has_not(
    free: str, most: str, seconds: str, says: str
) -> None:
    done = run_python("-c", SHORT, free, most, seconds)

    assert (done.stdout.strip(), done.stderr) == (says, "")


def test_a_guardian_is_known_as_one_before_it_has_its_title() -> None:
    with subprocess.Popen(interpreter.bare_command("guardian_main")) as process:
        process.send_signal(signal.SIGSTOP)  # its interpreter is still starting
        try:
            wait_until(lambda: procfs.command(process.pid))  # its program is there
            assert process_tree.is_guardian(process_tree._words(process.pid))
            assert not process_tree.is_guardian(process_tree._words(os.getpid()))
        finally:
            process.kill()
