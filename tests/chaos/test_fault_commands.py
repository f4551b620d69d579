"""A command is executed once, whichever calls carry it; a stop ends by itself."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from phalanx.chaos.nemesis.schedule import ScheduledFault
from phalanx.chaos.nemesis.worker_faults import FaultCommand
from phalanx.runtime import read_task


@pytest.mark.parametrize("target", ["random", "1", "driver"])
def test_one_victim_has_one_command_in_calls_of_every_shape(target: str) -> None:
    fault = ScheduledFault(number=3, at=0.0, fault="stop", target=target, point="after_reply")

    assert len({FaultCommand(fault, rank).key for rank in (-1, 0, 1)}) == 1


def test_every_rank_of_a_group_has_a_command_of_its_own() -> None:
    fault = ScheduledFault(number=3, at=0.0, fault="stop", target="group", point="after_reply")

    assert len({FaultCommand(fault, rank).key for rank in (0, 1, 2)}) == 3


STOPPER = """
import sys
from phalanx.chaos.nemesis.processes import TargetProcess

TargetProcess(int(sys.argv[1]), int(sys.argv[2])).inject("stop", float(sys.argv[3]))
"""


@pytest.mark.timeout(60)
def test_a_process_that_was_stopped_continues_although_the_one_that_stopped_it_has_ended() -> None:
    with subprocess.Popen(["sleep", "1000"]) as stopped:
        try:
            task = read_task(stopped.pid)
            assert task is not None
            words = [sys.executable, "-c", STOPPER, *map(str, task.key), "1.0"]
            subprocess.run(words, check=True, timeout=60)  # in which its threads end too

            os.waitpid(stopped.pid, os.WUNTRACED)
            _, status = os.waitpid(stopped.pid, os.WCONTINUED)

            assert os.WIFCONTINUED(status)
        finally:
            stopped.kill()
