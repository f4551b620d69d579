"""A driver is the first process of a container: own namespaces, no capability, little /dev/shm."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.programs import run_program

ROOT = Path(__file__).parents[2]
UNSHARE = ["unshare", "--pid", "--fork", "--mount", "--mount-proc", "--net", "--ipc"]
SETUP = """
ip link set lo up && mount -t tmpfs -o size=64m tmpfs /dev/shm &&
exec setpriv --bounding-set=-all --inh-caps=-all --no-new-privs "$@"
"""
DRIVER = """
import os, signal
import numpy as np
from phalanx import Executor, Runtime
from tests.support.workers import Echo
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
with Runtime(console=None) as runtime:
    with Executor(Echo, 2, launch=dict(preload=()), runtime=runtime) as group:
        sent = np.ones(200 << 20, np.uint8)
        assert all(len(back) == len(sent) for back in group.collective_rpc("echo", args=(sent,)))
        os.kill(group.ranks[0].pid, signal.SIGKILL)
        assert group.collective_rpc("echo", args=(7,), retries=1) == [7, 7]
left = [name for name in os.listdir("/proc") if name.isdigit()]
print(os.getpid(), int(status["CapEff"], 16), left)
"""


def test_the_first_process_of_a_container_without_capabilities_heals_and_leaves_nothing() -> None:
    if subprocess.run([*UNSHARE, "ip", "link"], capture_output=True, check=False).returncode:
        pytest.skip("no namespaces of our own, or no iproute2")

    done = run_program([*UNSHARE, "sh", "-c", SETUP, "sh", sys.executable, "-c", DRIVER], cwd=ROOT)

    assert done.stdout == "1 0 ['1']\n", done.stderr
