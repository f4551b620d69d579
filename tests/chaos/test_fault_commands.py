"""An order is carried out once; a stop ends by itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.chaos.nemesis.processes import TargetProcess
from phalanx.chaos.nemesis.schedule import ScheduledFault
from phalanx.chaos.nemesis.worker_faults import ANY_RANK, Moment, Orders, withdraw
from phalanx.runtime import procfs


def test_an_order_is_taken_once_by_its_rank_and_at_its_moment(tmp_path: Path) -> None:
    orders = Orders(tmp_path)
    names = ("hang", "hang", "raise", "kill@after_reply", "start_raise")
    for number, name in enumerate(names, 1):
        fault, _, point = name.partition("@")
        orders.give(ScheduledFault(number=number, at=0.0, fault=fault, point=point), "g/a", 1, None)
    anyone = ScheduledFault(number=9, at=0.0, fault="stop", target="driver", point="running")
    orders.give(anyone, "g/a", ANY_RANK, TargetProcess.of(os.getpid()))
    withdrawn = orders.give(ScheduledFault(number=7, at=0.0, fault="hang"), "g/a", 1, None)

    def taken(rank: int, *moments: Moment) -> list[int | None]:
        found = [orders.take("g/a", rank, moment) for moment in moments]
        return [None if each is None else each[0].number for each in found]

    assert withdraw(withdrawn)
    assert taken(11, "begin", "begin") == [9, None]
    assert taken(1, "begin", "begin", "begin", "end", "end") == [1, 2, None, 3, None]
    assert taken(1, "reply", "start", "start") == [4, 5, None]
    assert not withdraw(withdrawn)


STOPPER = """
import sys
from phalanx.chaos.nemesis.processes import TargetProcess

TargetProcess(int(sys.argv[1]), int(sys.argv[2])).inject("stop", float(sys.argv[3]))
"""


@pytest.mark.timeout(60)
def test_a_process_that_was_stopped_continues_although_the_one_that_stopped_it_has_ended() -> None:
    with subprocess.Popen(["sleep", "1000"]) as stopped:
        try:
            task = procfs.read(stopped.pid)
            assert task is not None
            words = [sys.executable, "-c", STOPPER, *map(str, task.key), "1.0"]
            subprocess.run(words, check=True, timeout=60)  # in which its threads end too

            status = 0
            while not os.WIFCONTINUED(status):  # that it was stopped is not told once it continues
                _, status = os.waitpid(stopped.pid, os.WUNTRACED | os.WCONTINUED)
                assert not os.WIFSIGNALED(status)
        finally:
            stopped.kill()
