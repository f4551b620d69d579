from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Generator

import pytest
from tests.support.processes import LONG, Starter, is_alive, soon, wait_until

from phalanx.runtime.linux import process_tree, procfs, syscalls
from phalanx.runtime.linux.process_tree import TreeTag
from phalanx.runtime.process.child_process import Process

LASTING = ("child", "session", "heavy", "bare", "fork", "daemon", "orphan")


@pytest.mark.parametrize(
    "kinds", [LASTING, (*LASTING, "end"), ("lost", "zombie"), ("forker",)], ids=" ".join
)
def test_killing_a_tree_ends_every_kind_of_descendant_also_of_a_process_that_has_ended(
    starter: Starter, kinds: tuple[str, ...]
) -> None:
    bystander = starter.start("stay")
    starter.line.receive()
    process = starter.start("beget", " ".join(kinds))
    pids = starter.line.receive()["pids"]
    ends = "end" in kinds
    if ends:
        assert process.wait(soon())
        assert all(map(is_alive, pids.values()))

    left = process.kill_tree(soon())

    assert left == ()
    assert pids.keys() == {*kinds} - {"end"}
    assert not any(map(is_alive, pids.values()))
    assert process.status is not None
    assert process.status.signal == (None if ends else signal.SIGKILL)
    assert bystander.status is None
    assert process.tree is not None
    assert process_tree.find(process.tree)[0] == {}


def test_what_several_dead_processes_left_behind_is_killed_together(starter: Starter) -> None:
    bystander = starter.start("stay")
    starter.line.receive()
    both = [starter.start("beget", "session daemon orphan end") for _ in range(2)]
    pids = [pid for _ in both for pid in starter.line.receive()["pids"].values()]
    assert all(each.wait(soon()) for each in both)
    assert all(map(is_alive, pids))

    left = both[0].kill_tree(soon(), both[1:])

    assert left == ()
    assert len(pids) == 6
    assert not any(map(is_alive, pids))
    assert bystander.status is None


def test_a_tree_within_a_tree_falls_with_the_outer_one(starter: Starter) -> None:
    process = starter.start("drive")
    said = starter.line.receive()

    left = process.kill_tree(soon())

    assert left == ()
    assert not any(is_alive(pid) for pid in said["pids"])
    assert len(said["pids"]) == 4  # its guardian, its zygote, its worker, the worker's daemon


def test_a_kill_that_cannot_finish_names_what_is_left_at_its_deadline(starter: Starter) -> None:
    process = starter.start("stay")
    starter.line.receive()

    left = process.kill_tree(0.0)

    assert {each.pid for each in left} <= {process.pid}
    assert process.wait(soon())


def test_a_tag_that_any_process_could_carry_is_refused() -> None:
    for tag in (b"", b"\0", b"PATH=", b"PHALANX_TREE=0123456789012345678901"):
        with pytest.raises(ValueError, match="tag="):
            process_tree.TreeTarget(tag)


def test_a_hunt_never_touches_those_it_comes_from() -> None:
    mark = TreeTag.new({}).pattern
    lineage = {os.getpid(), os.getppid(), 1}
    tasks = procfs.read_all()
    everybody = [task.key for pid, task in tasks.items() if pid in lineage]

    found, _ = process_tree.find(process_tree.TreeTarget(mark, roots=everybody, sessions=everybody))

    assert not lineage & set(found)


def test_a_status_that_was_collected_is_asked_of_the_kernel(starter: Starter) -> None:
    process = starter.start("stay")
    starter.line.receive()
    # On the loop's thread, so that its own collecting comes second for certain.
    collected = threading.Event()

    def steal() -> None:
        os.kill(process.pid, signal.SIGTERM)
        os.waitpid(process.pid, 0)
        collected.set()

    starter.launcher.loop.post(steal)

    assert collected.wait(LONG)
    assert process.wait(soon())
    assert process.status is not None
    probe = os.fork()
    if probe == 0:
        os._exit(0)
    pidfd = os.pidfd_open(probe)
    os.waitpid(probe, 0)
    kept = syscalls.exit_status_of(pidfd) is not None
    os.close(pidfd)
    assert process.status.code is None
    assert process.status.signal == (signal.SIGTERM if kept else None)
    assert len(starter.await_exits(1)) == 1


def test_closing_a_handle_lets_go_of_it_and_can_be_done_twice(starter: Starter) -> None:
    process = starter.start("leave", 0)
    assert process.wait(soon())

    process.close()
    process.close()

    assert not process.send_signal(signal.SIGTERM)
    assert process.status is not None
    assert process not in starter.launcher._processes


# Holds a process as a debugger does, and neither continues nor collects it.
TRACER = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
PTRACE_SEIZE = 0x4206
if libc.ptrace(PTRACE_SEIZE, int(sys.argv[1]), None, None):
    print(f"not permitted: errno {ctypes.get_errno()}", flush=True)
print("traced", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def traced(process: Process) -> Generator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-S", "-c", TRACER, str(process.pid)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as tracer:
        assert tracer.stdin is not None
        assert tracer.stdout is not None
        if (said := tracer.stdout.readline()) != "traced\n":
            pytest.skip(said)
        yield tracer


@pytest.mark.parametrize("fatal", [signal.SIGKILL, None])
def test_the_end_of_a_traced_process_is_told_at_once_and_collected_in_the_end(
    starter: Starter, fatal: int | None
) -> None:
    process = starter.start("stay")
    with traced(process) as tracer:
        if fatal is None:
            process.kill_tree(soon())
        else:
            process.send_signal(fatal)
        assert process.wait(soon())
        assert process.status is not None
        assert process.status.signal == signal.SIGKILL
        assert tracer.poll() is None
        process.close()
    wait_until(lambda: procfs.read(process.pid) is None, "its collection")


def test_the_end_of_a_traced_process_is_told_where_no_descriptor_is_free(starter: Starter) -> None:
    process = starter.start("stay")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with traced(process), contextlib.ExitStack() as taken:
        highest = max(procfs.numbers_in("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest, hard))
        taken.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        with contextlib.suppress(OSError):
            while True:
                taken.callback(os.close, os.dup(starter.line.write))

        process.send_signal(signal.SIGKILL)

        assert process.wait(soon())
    assert len(starter.await_exits(1)) == 1
    os.waitpid(process.pid, 0)
