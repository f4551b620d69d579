"""A contestant's processes are found and ended, and their memory is counted once."""

from __future__ import annotations

import os
import subprocess
import sys

from benchmarks.harness.process_group import MARK, Family
from tests.support.processes import is_alive, wait_until

# A worker that maps shared memory, and a daemon that has left its parent and its session.
PARENT = """
import mmap, os, subprocess, sys, time
fd = os.memfd_create("shared")
os.truncate(fd, 1 << 22)
memory = mmap.mmap(fd, 1 << 22)
memory[: 1 << 20] = bytes(1 << 20)
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
    print(os.getpid(), flush=True)
time.sleep(60)
"""


def test_a_family_has_its_daemons_counts_shared_memory_once_and_ends() -> None:
    mark = "mark-of-test-family"
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, env={**os.environ, MARK: mark}
    ) as parent:
        assert parent.stdout is not None
        daemon = int(parent.stdout.readline())
        family = Family(parent.pid, mark)

        pids = family.pids()
        shared = family.shared(pids)
        memory = family.pss(pids)
        spent = family.cpu_ns(pids)
        left = family.end()

    assert set(pids) >= {parent.pid, daemon}
    assert shared == 1 << 20
    assert memory > shared
    assert spent[parent.pid] > 0
    assert left == []
    wait_until(lambda: not is_alive(daemon))
