"""Hunts among many processes, by a mark alone."""

from __future__ import annotations

import select
import subprocess
import sys
import uuid
from typing import TYPE_CHECKING

import pytest
from tests.runtime.processes import soon

from phalanx.runtime import tree

if TYPE_CHECKING:
    from collections.abc import Iterator

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


@pytest.fixture
def crowd() -> Iterator[None]:
    with subprocess.Popen(
        [sys.executable, "-S", "-c", CROWD], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as started:
        assert started.stdout is not None
        assert started.stdout.read(1) == b"x"
        yield


@pytest.mark.usefixtures("leak_check", "crowd")
def test_one_that_is_another_process_whenever_it_is_looked_at_is_ended() -> None:
    for _ in range(5):
        mark = uuid.uuid4().hex
        with subprocess.Popen(
            [sys.executable, "-S", "-c", FORKER], env={"MARK": mark}, stdout=subprocess.PIPE
        ) as first:
            assert first.stdout is not None
            assert first.stdout.read(1) == b"x"
            assert first.wait(60) == 0
            quarry = tree.Quarry(mark.encode())

            report = tree.kill(quarry, soon())

            assert report.killed
            assert report.left == ()
            assert tree.find(quarry)[0] == {}
            # Nobody holds the pipe any more: a surer sign than not to find him.
            assert select.select([first.stdout], [], [], 10)[0]
