"""`Launch(stdio="inherit")`: workers have the driver's own standard streams."""

from __future__ import annotations

import pytest
from tests.support.programs import run_python

from phalanx.actors import Launch
from phalanx.supervision import SpecError

DRIVER = """
import os, sys
from phalanx import Executor, WorkerActor
class Worker(WorkerActor):
    def streams(self):
        os.write(1, b"out " + os.read(0, 100))
        os.write(2, b"err\\n")
        return [os.fstat(fd).st_ino for fd in range(3)]
with Executor(Worker, 1, launch={"stdio": "inherit", "preload": (), "method": sys.argv[1]}) as ex:
    assert ex.collective_rpc("streams") == [[os.fstat(fd).st_ino for fd in range(3)]]
"""


@pytest.mark.parametrize("method", ["zygote", "exec"])
def test_a_worker_reads_and_writes_the_drivers_streams_as_they_are(method: str) -> None:
    done = run_python("-c", DRIVER, method, input="line\n")

    assert (done.returncode, done.stdout, done.stderr) == (0, "out line\n", "err\n")


def test_streams_cannot_be_inherited_over_a_network() -> None:
    with pytest.raises(SpecError, match=r"launch\.stdio='inherit'"):
        Launch(stdio="inherit", transport="zmq")
