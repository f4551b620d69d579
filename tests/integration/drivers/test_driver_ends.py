"""What becomes of everything when the driver dies, or does what drivers do."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.support import shared_memory
from tests.support.processes import LONG, is_alive, wait_until
from tests.support.programs import run_program, run_python

from phalanx.runtime.linux import procfs

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("seed", range(2))
def test_a_driver_killed_at_any_moment_leaves_nothing(drive: Any, seed: int) -> None:
    memory = shared_memory.names()
    driver = drive("launching_driver", "churn")
    driver.receive()

    # From the first start to well into the third round.
    time.sleep(random.Random(seed).uniform(0.0, 1.5))
    driver.kill()

    driver.assert_gone()
    assert shared_memory.names() <= memory


@pytest.mark.parametrize("victim", ["guardian", "its child"])
def test_a_guardian_killed_in_the_middle_of_a_kill_leaves_nothing_stopped(
    drive: Any, victim: str
) -> None:
    driver = drive("launching_driver", "stay")
    said = driver.receive()
    guardian = said["guardian"]
    children = Path(f"/proc/{guardian}/task/{guardian}/children")

    driver.process.kill()
    deadline = time.monotonic() + LONG
    while (task := procfs.read(said["daemon"])) is not None and task.state not in "TZ":
        assert time.monotonic() < deadline  # no pause: it is stopped for some milliseconds
    targets = [guardian] if victim == "guardian" else map(int, children.read_text().split())
    for pid in targets:
        os.kill(pid, signal.SIGKILL)
    driver.kill()

    driver.assert_gone()


STOPS_AND_DIES = """
import os, sys, time
from phalanx.runtime.linux import process_tree
process_tree._end_all = lambda *_: os._exit(0)
process_tree.kill(process_tree.TreeTarget(sys.argv[1].encode()), time.monotonic() + 60)
"""


def test_what_kills_a_tree_and_dies_when_it_has_stopped_it_leaves_nothing_stopped(
    drive: Any,
) -> None:
    """As a command may that sees its node process die, and is killed itself."""
    driver = drive("launching_driver", "stay")
    daemon = driver.receive()["daemon"]

    assert run_python("-c", STOPS_AND_DIES, driver.mark).returncode == 0
    wait_until(lambda: (task := procfs.read(daemon)) and task.state == "T")
    driver.kill()

    driver.assert_gone()


@pytest.mark.parametrize("one_is_stopped", [False, True])
def test_two_zygotes_end_the_tree_of_a_driver_that_is_killed_with_its_guardian(
    drive: Any, one_is_stopped: bool
) -> None:
    driver = drive("launching_driver", "two_zygotes")
    said = driver.receive()

    if one_is_stopped:
        stopped = said["zygotes"][0]
        os.kill(stopped, signal.SIGSTOP)
        wait_until(lambda: (task := procfs.read(stopped)) and task.state == "T")
    driver.send(signal.SIGSTOP)  # so that it starts no other guardian
    os.kill(said["guardian"], signal.SIGKILL)
    driver.kill()

    driver.assert_gone()


def test_a_zygote_that_imports_ends_with_driver_and_guardian(drive: Any, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    os.mkfifo(begun)
    tmp_path.joinpath("endless.py").write_text(
        f"import ctypes\nopen({str(begun)!r}, 'w').close()\nctypes.PyDLL(None).sleep(600)\n"
    )
    driver = drive("launching_driver", "imports", str(tmp_path))
    guardian = driver.receive()["guardian"]
    begun.read_text()  # it holds the interpreter lock from now on

    driver.send(signal.SIGSTOP)
    os.kill(guardian, signal.SIGKILL)
    driver.kill()

    driver.assert_gone()


BUILD = """
import os, resource
from phalanx import Executor, WorkerActor
from phalanx.supervision import RuntimeFault
class W(WorkerActor):
    pass

{first}
try:
    with Executor(W, 1, launch={'preload': ()}) as ex:
        print("built")
except RuntimeFault as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("first", "told", "prefix"),
    [
        ("resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))", "ulimit -f", ""),
        ("", "/proc shows no processes", "mount -t tmpfs none /proc"),
        ("", "built", "mount -t tmpfs none /tmp; mount -o remount,ro /tmp"),
        ("os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone')", "built", ""),
    ],
    ids=["small files", "no proc", "nowhere to write", "no working directory"],
)
def test_a_driver_with_hostile_surroundings_works_or_says_what_it_lacks(
    tmp_path: Path, first: str, told: str, prefix: str
) -> None:
    if prefix and subprocess.run(["unshare", "-m", "true"], check=False).returncode:
        pytest.skip("making a mount namespace is not permitted here")
    unshare = ["unshare", "-m", "sh", "-c", f'{prefix}; exec "$@"', "sh"] if prefix else []

    done = run_program(
        [*unshare, sys.executable, "-c", BUILD.replace("{first}", first)],
        cwd=ROOT if prefix else tmp_path,
    )

    assert told in done.stdout, done.stderr
    assert done.stderr == ""


def test_a_child_that_holds_every_descriptor_open_deceives_nobody(drive: Any) -> None:
    driver = drive("launching_driver", "held_open")
    said = driver.receive()

    driver.kill()
    driver.assert_gone(said["user"])

    assert is_alive(said["user"])  # the user's own, and none of our business
    os.kill(said["user"], signal.SIGKILL)


def test_a_driver_that_becomes_another_program_leaves_its_tree_behind_dead(drive: Any) -> None:
    driver = drive("launching_driver", "replaced")

    comm = Path(f"/proc/{driver.process.pid}/comm")
    wait_until(lambda: comm.read_text() == "sleep\n")
    driver.assert_gone(driver.process.pid)
    driver.kill()


def test_a_death_during_a_pause_of_the_driver_is_told_after_it(drive: Any) -> None:
    driver = drive("launching_driver", "exits_while_stopped")
    worker = driver.receive()["worker"]

    driver.send(signal.SIGSTOP)
    wait_until(lambda: (task := procfs.read(driver.process.pid)) and task.state == "T")
    os.kill(worker, signal.SIGTERM)
    wait_until(lambda: not is_alive(worker))
    driver.send(signal.SIGCONT)

    assert driver.receive() == {"signal": signal.SIGTERM}
    assert driver.wait() == 0
    driver.assert_gone()


def test_a_forked_child_of_the_driver_can_harm_no_process(drive: Any) -> None:
    driver = drive("launching_driver", "forks")

    assert driver.receive() == {"ok": True}
    assert driver.wait() == 0
    driver.assert_gone()


def test_a_driver_can_be_the_first_process_of_a_container(drive: Any) -> None:
    unshare = ("unshare", "--pid", "--fork", "--mount-proc")
    if (
        shutil.which("unshare") is None
        or subprocess.run([*unshare, "true"], stderr=subprocess.DEVNULL, check=False).returncode
    ):
        pytest.skip("making a PID namespace is not permitted here")
    driver = drive("launching_driver", "first_process", prefix=unshare)

    assert driver.receive() == {"ok": True}
    assert driver.wait() == 0
    driver.assert_gone()


def test_a_sigterm_for_which_there_is_no_thread_leaves_the_next_one_its_effect() -> None:
    done = run_python("-c", WITHOUT_THREADS, timeout=LONG, cwd=ROOT)

    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "goes on\n"), done.stderr


WITHOUT_THREADS = """
import os, signal, threading, time
from phalanx import Executor
from tests.support.workers import Echo
if __name__ == "__main__":
    with Executor(Echo, 1, launch={"preload": ()}):
        threading.stack_size(1 << 46)  # more than any process may map: no thread can be started
        os.kill(os.getpid(), signal.SIGTERM)
        threading.stack_size(0)
        print("goes on", flush=True)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
"""


def test_what_a_program_starts_while_sigterm_is_carried_out_heeds_a_sigterm(gate: Path) -> None:
    done = run_python("-c", STARTS_OTHERS, str(gate), timeout=LONG, cwd=ROOT)

    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "-15 -15\n"), done.stderr


STARTS_OTHERS = """
import os, signal, subprocess, sys, time
from pathlib import Path
from phalanx import Executor
from tests.support.workers import Echo
if __name__ == "__main__":
    with Executor(Echo, 1, launch={"preload": ()}) as ex:
        ex.call("gated", args=(sys.argv[1],), rank=0, non_block=True)
        os.kill(os.getpid(), signal.SIGTERM)  # the call has ten seconds from here on
        with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as other:
            other.terminate()
            status = other.wait()
        child = os.fork()
        if not child:
            signal.alarm(20)
            while True:
                signal.pause()
        os.kill(child, signal.SIGTERM)
        print(status, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        os.kill(os.getpid(), signal.SIGTERM)  # one is enough
        Path(sys.argv[1]).touch()
        time.sleep(60)
"""


WITHOUT_THREADS_AT_THE_END = """
import sys, threading
from phalanx import Executor
from tests.support.workers import Tidy
if __name__ == "__main__":
    open_ones = [
        Executor(Tidy, 1, args=(path,), launch={"preload": ()}) for path in sys.argv[1:]
    ]
    threading.stack_size(1 << 46)
"""


def test_executors_for_whose_end_there_is_no_thread_end_one_after_the_other(
    tmp_path: Path,
) -> None:
    marks = [tmp_path / name for name in "abc"]
    done = run_python("-c", WITHOUT_THREADS_AT_THE_END, *map(str, marks), timeout=LONG, cwd=ROOT)

    assert (done.returncode, done.stderr) == (0, "")
    assert ["stopped shutdown" in mark.read_text() for mark in marks] == [True] * 3


FORKS = """
import os, signal, threading
from phalanx import Executor
from phalanx.errors import ExecutorClosed
from tests.support.workers import Echo
if __name__ == "__main__":
    with Executor(Echo, 1, launch={"preload": ()}) as ex:
        has_lock, go_on = threading.Event(), threading.Event()
        def hold():
            with ex.group.plane.lock.asked():  # as one that makes a call
                has_lock.set()
                go_on.wait()
        thread = threading.Thread(target=hold)
        thread.start()
        has_lock.wait()
        child = os.fork()
        if not child:
            signal.alarm(20)
            ex.request_close()
            ex.kill()
            try:
                ex.wait_closed()
            except ExecutorClosed:
                os._exit(3)
        status = os.waitpid(child, 0)[1]
        go_on.set()
        thread.join()
        print(os.waitstatus_to_exitcode(status), ex.collective_rpc("rank", 30))
"""


def test_a_forked_child_ends_no_executor_of_its_parent_and_waits_for_none() -> None:
    done = run_python("-c", FORKS, timeout=LONG, cwd=ROOT)

    assert done.stdout == "3 [0]\n", done.stderr
