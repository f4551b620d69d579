"""A contestant's processes are found and ended, and their memory is counted once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.harness.process_group import MARK, Family
from tests.integration.benchmarks.conftest import ROOT
from tests.support.processes import is_alive, wait_until

DRIVER = """
import sys
from pathlib import Path
from benchmarks.harness.subprocess_driver import Driven, link_package
folder = Path(sys.argv[1])
link_package(folder)
driven = Driven("pipe", sys.executable, folder)
driven.ask("open", ranks=2, variant="")
pids = driven.family.pids()
driven.pause()
print(*pids, flush=True)
sys.stdin.read()
"""

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


def test_contestants_that_are_stopped_end_with_a_driver_that_is_killed(tmp_path: Path) -> None:
    options: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "cwd": ROOT}
    with subprocess.Popen([sys.executable, "-c", DRIVER, str(tmp_path)], **options) as driver:
        assert driver.stdout is not None
        pids = [int(word) for word in driver.stdout.readline().split()]
        driver.kill()

    assert len(pids) > 2
    wait_until(lambda: not any(map(is_alive, pids)))
