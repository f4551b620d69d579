"""The sign that a rank does not hang."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import contextlib, os, resource, threading
from phalanx.integrations.torchrun.activity import Activity

told = threading.Semaphore(0)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
with contextlib.suppress(OSError):
    while True:
        os.open("/dev/null", os.O_RDONLY)
Activity(0.1, told.release)
os._exit(0 if told.acquire(timeout=60) and told.acquire(timeout=60) else 1)
"""


def test_a_rank_without_a_free_descriptor_does_not_count_as_hung() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=False
    )

    assert (done.returncode, done.stderr) == (0, "")
