"""A contestant's processes are found and ended, and their memory is counted once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks.harness.process_group import MARK, Family
from benchmarks.harness.subprocess_driver import ContestantBroke, Driven, link_package
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


# A run of a system that never ends: a web server.
TRAINING = """
import sys
from benchmarks.harness.venvs import Environments
from benchmarks.training.systems import Run, System
words = ("http.server", "--bind", "127.0.0.1", "0", "--directory")
sizes = {"ranks": 1, "width": 4, "layers": 1}
run = Run(System("one", words, "one"), sizes, 60.0, Environments())
print(run._popen.pid, flush=True)
sys.stdin.read()
"""

# A contestant whose helper ends a moment after it.
LINGERING = """
import os, sys, time
if os.fork() == 0:
    sys.stdin.read()
    time.sleep(0.5)
    open(sys.argv[1], "w").close()
    os._exit(0)
sys.stdin.read()
os._exit(0)
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


@pytest.mark.parametrize(("program", "least"), [(DRIVER, 3), (TRAINING, 1)])
def test_what_is_measured_ends_with_a_driver_that_is_killed(
    program: str, least: int, tmp_path: Path
) -> None:
    options: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "cwd": ROOT}
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    words = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(words, env=environment, **options) as driver:
        assert driver.stdout is not None
        pids = [int(word) for word in driver.stdout.readline().split()]
        driver.kill()

    assert len(pids) >= least
    wait_until(lambda: not any(map(is_alive, pids)))


def test_what_ends_by_itself_after_its_contestant_is_not_said_to_be_left(tmp_path: Path) -> None:
    package = tmp_path / "phalanx_peers"
    package.mkdir()
    (package / "__main__.py").write_text(LINGERING)
    ended = tmp_path / "ended"

    left = Driven(str(ended), sys.executable, tmp_path).end()

    assert left == []
    assert ended.exists()


def test_a_contestant_that_cannot_be_started_is_broken(tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_bytes(b"\0")
    broken.chmod(0o755)

    with pytest.raises(ContestantBroke, match="ray: cannot be started: .*Exec format error"):
        Driven("ray", str(broken), tmp_path)


def test_a_copy_stays_within_its_buffers_whatever_the_order_of_sizes(tmp_path: Path) -> None:
    link_package(tmp_path)
    with Driven("memcpy", sys.executable, tmp_path) as driven:
        driven.ask("open", ranks=1)
        for size in (1 << 24, 8, 1 << 24):
            said = driven.ask("call", method="nothing", size=size, times=3, seconds=0.0)
            assert len(said["ns"]) == 3
