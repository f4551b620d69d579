"""The scribe as the runtime starts it: by the launcher, under the guardian's eye."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

from phalanx.runtime import Runtime, WorkerLabels

LONG = 60.0
LABELS = WorkerLabels(child="root/tp/0", group="tp", rank=0)


def test_a_scribe_that_is_killed_is_started_again_by_the_launcher() -> None:
    with Runtime(console=None, stream=False) as runtime:
        output = runtime.scribe.open_worker(LABELS)
        first = runtime.scribe.pid
        assert first is not None

        os.kill(first, signal.SIGKILL)
        os.write(output.stdout, b"meanwhile\n")
        drained = output.drain(time.monotonic() + LONG)

        assert drained
        assert output.tail().stdout == "meanwhile\n"
        assert runtime.scribe.pid != first
        output.close()


def test_closing_the_runtime_ends_the_scribe_and_removes_its_directory() -> None:
    with Runtime(console=None) as runtime:
        pid, directory = runtime.scribe.pid, runtime.scribe.directory
        assert directory is not None
        assert Path(directory).is_dir()

    assert not Path(f"/proc/{pid}").exists()
    assert not Path(directory).exists()


def test_a_driver_killed_outright_leaves_neither_scribe_nor_directory() -> None:
    code = """
from phalanx.runtime import Runtime
runtime = Runtime(console=None)
print(runtime.scribe.pid, runtime.scribe.directory, flush=True)
input()
"""
    driver = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert driver.stdout is not None
    pid, directory = driver.stdout.readline().split()
    death = os.pidfd_open(int(pid))

    driver.kill()
    driver.communicate()

    assert select.select([death], [], [], LONG)[0]
    os.close(death)
    # The guardian removes the directory; it is nobody's child here, so there is no event to await.
    deadline = time.monotonic() + LONG
    while Path(directory).exists() and time.monotonic() < deadline:
        select.select([], [], [], 0.01)
    assert not Path(directory).exists()
