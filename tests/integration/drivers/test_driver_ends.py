"""What becomes of everything when the driver dies, or does what drivers do."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support import shared_memory
from tests.support.processes import LONG, is_alive, wait_until
from tests.support.programs import run_program

from phalanx.runtime.linux import process_tree, procfs

ROOT = Path(__file__).parents[3]
AT_MOST = 5.0  # seconds after which nothing of a killed driver's tree may live: a contract


class Program:
    """A driver in a process of its own."""

    def __init__(self, scenario: str, argument: str = "", prefix: tuple[str, ...] = ()) -> None:
        self.name = uuid.uuid4().hex
        mark = f"{os.environ['PHALANX_TREE'].rstrip(';')};{self.name}/driver;"
        self.popen = subprocess.Popen(
            [*prefix, sys.executable, "-m", "tests.support.launching_driver", scenario, argument],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PHALANX_TREE": mark},
        )

    def hear(self) -> dict[str, Any]:
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline()
        assert line, f"the driver ended with {self.popen.wait(LONG)}"
        said: dict[str, Any] = json.loads(line)
        return said

    def end(self) -> int:
        code = self.popen.wait(LONG)
        assert self.popen.stdout is not None
        self.popen.stdout.close()
        return code

    def kill(self) -> None:
        self.popen.kill()
        self.end()

    def alive(self) -> dict[int, procfs.Task]:
        return process_tree.find(process_tree.TreeTarget(f"{self.name}/".encode()))[0]


def _name(pid: int) -> str:
    try:
        return f"{pid} {Path(f'/proc/{pid}/cmdline').read_text()!r}"
    except OSError:
        return f"{pid}, gone by now"


def await_nothing(program: Program, *, but: frozenset[int] = frozenset()) -> None:
    """Wait until nothing of *program*'s tree lives, as long as the contract allows."""
    deadline = time.monotonic() + AT_MOST
    while left := set(program.alive()) - but:
        assert time.monotonic() < deadline, f"still alive: {[_name(pid) for pid in left]}"
        time.sleep(0.01)


@pytest.fixture
def run() -> Iterator[Any]:
    programs: list[Program] = []

    def start(scenario: str, argument: str = "", prefix: tuple[str, ...] = ()) -> Program:
        programs.append(Program(scenario, argument, prefix))
        return programs[-1]

    yield start
    for program in programs:
        program.kill()


@pytest.mark.parametrize("seed", range(8))
def test_a_driver_killed_at_any_moment_leaves_nothing(run: Any, seed: int) -> None:
    memory = shared_memory.names()
    program = run("churn")
    program.hear()

    # From the first start to well into the third round.
    time.sleep(random.Random(seed).uniform(0.0, 1.5))
    program.kill()

    await_nothing(program)
    assert shared_memory.names() <= memory


@pytest.mark.parametrize("helper", ["guardian", "zygote"])
def test_one_helper_killed_with_the_driver_is_one_too_few(run: Any, helper: str) -> None:
    program = run("stay")
    said = program.hear()

    os.kill(said[helper], signal.SIGKILL)
    program.kill()

    await_nothing(program)


@pytest.mark.parametrize("victim", ["guardian", "its child"])
def test_a_guardian_killed_in_the_middle_of_a_kill_leaves_nothing_stopped(
    run: Any, victim: str
) -> None:
    program = run("stay")
    said = program.hear()
    guardian = said["guardian"]
    children = Path(f"/proc/{guardian}/task/{guardian}/children")

    program.popen.kill()
    deadline = time.monotonic() + LONG
    while (task := procfs.read(said["daemon"])) is not None and task.state not in "TZ":
        assert time.monotonic() < deadline  # no pause: it is stopped for some milliseconds
    doomed = [guardian] if victim == "guardian" else map(int, children.read_text().split())
    for pid in doomed:
        os.kill(pid, signal.SIGKILL)
    program.kill()

    await_nothing(program)


@pytest.mark.parametrize("one_is_stopped", [False, True])
def test_two_zygotes_end_the_tree_of_a_driver_that_is_killed_with_its_guardian(
    run: Any, one_is_stopped: bool
) -> None:
    program = run("two_zygotes")
    said = program.hear()

    if one_is_stopped:
        stopped = said["zygotes"][0]
        os.kill(stopped, signal.SIGSTOP)
        wait_until(lambda: (task := procfs.read(stopped)) and task.state == "T")
    program.popen.send_signal(signal.SIGSTOP)  # so that it starts no other guardian
    os.kill(said["guardian"], signal.SIGKILL)
    program.kill()

    await_nothing(program)


def test_a_zygote_that_imports_ends_with_driver_and_guardian(run: Any, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    os.mkfifo(begun)
    tmp_path.joinpath("endless.py").write_text(
        f"import ctypes\nopen({str(begun)!r}, 'w').close()\nctypes.PyDLL(None).sleep(600)\n"
    )
    program = run("imports", str(tmp_path))
    guardian = program.hear()["guardian"]
    begun.read_text()  # it holds the interpreter lock from now on

    program.popen.send_signal(signal.SIGSTOP)
    os.kill(guardian, signal.SIGKILL)
    program.kill()

    await_nothing(program)


BUILD = """
import os, resource
from phalanx import Executor, WorkerActor
from phalanx.supervision import RuntimeFault
class W(WorkerActor):
    def hi(self):
        return 1

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


def test_a_child_that_holds_every_descriptor_open_deceives_nobody(run: Any) -> None:
    program = run("held_open")
    said = program.hear()

    program.kill()
    await_nothing(program, but=frozenset({said["user"]}))

    assert is_alive(said["user"])  # the user's own, and none of our business
    os.kill(said["user"], signal.SIGKILL)


def test_a_program_that_ends_without_closing_keeps_its_exit_code_and_leaves_nothing(
    run: Any,
) -> None:
    program = run("no_close")

    assert program.end() == 3
    await_nothing(program)


def test_a_driver_that_becomes_another_program_leaves_its_tree_behind_dead(run: Any) -> None:
    program = run("replaced")

    comm = Path(f"/proc/{program.popen.pid}/comm")
    wait_until(lambda: comm.read_text() == "sleep\n")
    await_nothing(program, but=frozenset({program.popen.pid}))
    program.kill()


def test_a_death_during_a_pause_of_the_driver_is_told_after_it(run: Any) -> None:
    program = run("exits_while_stopped")
    worker = program.hear()["worker"]

    program.popen.send_signal(signal.SIGSTOP)
    wait_until(lambda: (task := procfs.read(program.popen.pid)) and task.state == "T")
    os.kill(worker, signal.SIGTERM)
    wait_until(lambda: not is_alive(worker))
    program.popen.send_signal(signal.SIGCONT)

    assert program.hear() == {"signal": signal.SIGTERM}
    assert program.end() == 0
    await_nothing(program)


@pytest.mark.parametrize("scenario", ["sigchld_ignored", "waits_for_any", "forks", "users_own"])
def test_what_the_user_does_with_processes_disturbs_nobody(run: Any, scenario: str) -> None:
    program = run(scenario)

    assert program.hear() == {"ok": True}
    assert program.end() == 0
    await_nothing(program)


def test_a_driver_can_be_the_first_process_of_a_container(run: Any) -> None:
    unshare = ("unshare", "--pid", "--fork", "--mount-proc")
    if (
        shutil.which("unshare") is None
        or subprocess.run([*unshare, "true"], stderr=subprocess.DEVNULL, check=False).returncode
    ):
        pytest.skip("making a PID namespace is not permitted here")
    program = run("first_process", prefix=unshare)

    assert program.hear() == {"ok": True}
    assert program.end() == 0
    await_nothing(program)
