"""Drivers end in every way there is: nothing of their tree is left, and exit statuses are kept."""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support import shared_memory
from tests.support.drivers import Driver

from phalanx.runtime import find_drivers
from phalanx.runtime.linux import procfs

LONG = 60.0


def traces() -> set[str]:
    """What a tree could leave in shared memory and the temporary folder.

    Other programs of the machine make semaphores too, and remove them.
    """
    return shared_memory.names() | {
        str(path) for path in Path(tempfile.gettempdir()).glob("*phalanx*")
    }


def assert_ended_by_sigterm(driver: Driver) -> None:
    assert driver.wait() == -signal.SIGTERM
    assert "Traceback" not in driver.stderr


def test_classes_and_values_of_main_keep_their_identity(drive: Any) -> None:
    driver = drive("dying_driver", "values")

    assert driver.expect("type_is_ours") is True
    assert driver.said[-1]["x"] == 42
    assert driver.said[-1]["lam"] == 1
    assert driver.wait() == 0


@pytest.mark.parametrize(
    "mode",
    [
        "forgets",  # to close its executor
        "thread_ends",  # the one that built the executor
        "ignores_sigchld",
    ],
)
def test_what_a_program_does_leaves_its_workers_usable_and_nothing_behind(
    drive: Any, mode: str
) -> None:
    driver = drive("dying_driver", mode)

    assert driver.expect("ranks") == [0, 1]
    assert driver.wait() == 0
    assert "Traceback" not in driver.stderr


def test_a_program_that_ends_by_an_exception_keeps_its_exit_code(drive: Any) -> None:
    driver = drive("dying_driver", "raises")

    assert driver.wait() == 3


def test_sigterm_to_every_process_at_once_loses_no_call(drive: Any, gate: Path) -> None:
    driver = drive("dying_driver", "calls", str(gate))
    driver.expect("calling")

    for pid in sorted(driver.left(), reverse=True):  # the driver, which is the oldest, last
        os.kill(pid, signal.SIGTERM)
    time.sleep(1.5)  # longer than workers hold one off whose driver lives on
    gate.touch()

    assert driver.expect("answer") == ["released", "released"]
    assert_ended_by_sigterm(driver)
    assert "crashed" not in driver.stderr


def test_a_close_says_what_it_waits_for_and_a_second_ctrl_c_hurries_it(
    drive: Any, tmp_path: Path
) -> None:
    driver = drive("dying_driver", "closes_slowly", str(tmp_path / "gate"))
    driver.expect("calling")

    driver.send(signal.SIGINT)
    told = ""
    while "close_waits" not in told or "hold, for" not in told:
        assert select.select([driver.process.stderr], [], [], LONG)[0]
        told += os.read(driver.process.stderr.fileno(), 65536).decode()
    driver.send(signal.SIGINT)

    assert driver.wait() != 0  # long before the two minutes are over


def test_sigterm_lets_the_call_in_flight_end_and_those_that_wait_for_their_turn(
    drive: Any, gate: Path
) -> None:
    driver = drive("dying_driver", "calls_in_a_row", str(gate))
    assert driver.expect("waiting") == 1

    driver.send(signal.SIGTERM)
    time.sleep(0.2)
    gate.touch()

    assert driver.expect("answers") == [["released", "released"], [0, 1]]
    assert_ended_by_sigterm(driver)


@pytest.mark.parametrize(
    "words",
    [
        ("loops_with_restarts",),  # and calls for ever
        ("calls", "/nonexistent", "0.5"),  # one that takes longer than its policy allows
    ],
)
def test_sigterm_ends_a_program_without_a_traceback(drive: Any, words: tuple[str, ...]) -> None:
    driver = drive("dying_driver", *words)
    driver.expect("calling")

    driver.send(signal.SIGTERM)

    assert_ended_by_sigterm(driver)
    assert not any("answer" in said for said in driver.said)


def test_a_program_that_has_ended_within_its_grace_ends_by_sigterm_all_the_same(
    drive: Any, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    driver = drive("dying_driver", "ends_before_its_call", str(gate))
    driver.expect("calling")

    driver.send(signal.SIGTERM)
    time.sleep(0.2)
    gate.touch()

    assert_ended_by_sigterm(driver)


def test_no_tree_restarts_an_executor_of_a_program_that_ends_by_sigterm(
    drive: Any, tmp_path: Path
) -> None:
    driver = drive("dying_driver", "supervised", str(tmp_path / "gate"))
    driver.expect("calling")

    driver.send(signal.SIGTERM)

    assert driver.expect("again") is None
    assert_ended_by_sigterm(driver)


def test_a_handler_of_the_programs_own_for_sigterm_stays(drive: Any) -> None:
    driver = drive("dying_driver", "handles_sigterm")
    driver.expect("ready")

    driver.send(signal.SIGTERM)

    assert driver.expect("ranks") == [0, 1]
    assert driver.wait() == 0


def test_a_program_without_standard_descriptors_works(drive: Any, tmp_path: Path) -> None:
    driver = drive("dying_driver", "bare", str(tmp_path / "result"))

    assert driver.wait() == 0
    assert json.loads((tmp_path / "result").read_text()) == [0, 1]


def test_ctrl_c_in_a_drain_lets_calls_go_on(drive: Any, tmp_path: Path) -> None:
    driver = drive("dying_driver", "drains", str(tmp_path / "gate"))
    driver.expect("draining")
    time.sleep(0.2)

    driver.send(signal.SIGINT)

    assert driver.expect("ranks") == [0, 1]
    assert driver.wait() == 0


def test_ctrl_c_in_a_call_withdraws_it_and_the_group_goes_on(drive: Any, tmp_path: Path) -> None:
    driver = drive("dying_driver", "interrupted", str(tmp_path / "gate"))
    driver.expect("calling")
    time.sleep(0.2)

    driver.send(signal.SIGINT)

    assert driver.expect("in_flight") == 0
    assert driver.expect("ranks") == [0, 1]
    assert driver.expect("closed") is True
    assert driver.wait() == 0
    assert "Traceback" not in driver.stderr


@pytest.mark.parametrize(("number", "tracebacks"), [(signal.SIGINT, 1), (signal.SIGTERM, 0)])
def test_a_signal_during_start_up_leaves_nothing(
    drive: Any, number: signal.Signals, tracebacks: int
) -> None:
    driver = drive("dying_driver", "starts")
    driver.expect("starting")
    time.sleep(0.7)

    driver.send(number)

    assert driver.wait() == -number
    assert driver.stderr.count("Traceback") == tracebacks  # Python's own, for a KeyboardInterrupt


def test_a_forked_child_of_the_driver_touches_nothing(drive: Any) -> None:
    driver = drive("dying_driver", "forks")

    assert driver.expect("child") == "ExecutorClosed"
    assert driver.expect("ranks") == [0, 1]
    assert driver.said[-1]["status"] == 0
    assert driver.wait() == 0


def test_a_child_forked_in_the_middle_of_a_call_takes_nothing_from_its_parent(
    drive: Any, tmp_path: Path
) -> None:
    driver = drive("dying_driver", "forks_in_a_call", str(tmp_path / "gate"))

    assert driver.expect("died") == "WorkerDied"
    assert driver.said[-1]["again"] == ["released", "released"]
    assert driver.said[-1]["ranks"] == [0, 1]
    assert {"child": "ExecutorClosed"} in driver.said
    assert driver.wait() == 0


def test_the_programs_own_children_are_left_to_it(drive: Any) -> None:
    driver = drive("dying_driver", "children")

    assert driver.expect("subprocess") == 5
    assert driver.said[-1] == {"subprocess": 5, "waited": True, "status": 7, "ranks": [0, 1]}
    assert driver.wait() == 0


MOMENTS = ["start", "import", "call", "restart", "close", "gil"]
MANNERS = ["alone", "stopped", "with the guardian", "with the zygote", "with everything of ours"]
STRAY = "time.sleep(600)"  # what workers start


def kin(driver: Driver) -> dict[int, str]:
    """Return the driver's tree: pids and commands."""
    children = (task for task in procfs.read_all().values() if task.parent == driver.process.pid)
    pids = {*driver.left(), *(task.pid for task in children)}
    return {pid: procfs.command(pid) for pid in pids}


def end_strays(driver: Driver) -> None:
    """Kill what workers had started, a child included that was between fork and exec."""
    deadline = time.monotonic() + 5.0
    while (left := driver.left()) and time.monotonic() < deadline:
        for pid, task in left.items():
            if STRAY in procfs.command(pid) and procfs.read(pid) == task:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def kill_driver(drive: Any, moment: str, manner: str, seed: int) -> None:
    """Kill a driver at a seeded moment; nothing of its tree may be there 5 seconds later."""
    before = traces()
    rng = random.Random(f"{moment}{manner}{seed}")
    driver = drive("dying_driver", "chaos", moment)
    if moment in ("start", "import"):
        time.sleep(rng.uniform(0.0, 3.0))
    else:
        driver.expect("working")
        time.sleep(rng.uniform(0.0, 0.6))

    if manner == "stopped":
        driver.send(signal.SIGSTOP)
        time.sleep(rng.uniform(0.0, 0.3))
    words = {"with the guardian": "guardian", "with the zygote": "zygote"}
    ours = kin(driver)
    targets = [pid for pid, name in ours.items() if words.get(manner, "nothing") in name]
    if manner == "with everything of ours":
        targets = [pid for pid, name in ours.items() if STRAY not in name]
    targets = [driver.process.pid, *(pid for pid in targets if pid != driver.process.pid)]
    rng.shuffle(targets)
    streams = [one.address for one in find_drivers() if one.pid == driver.process.pid]
    for pid in targets:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    driver.process.wait(LONG)

    if manner == "with everything of ours":  # nothing is left that could end what workers started
        end_strays(driver)
    driver.assert_gone(5.0)
    deadline = time.monotonic() + 5.0
    while left := [*filter(procfs.read, ours), *(traces() - before)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.02)
    sockets = Path("/proc/net/unix").read_text()
    assert not [address for address in streams if address in sockets]
    assert not [pid for pid in ours if f"@phalanx-link-{pid}-" in sockets]


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_killed_driver_leaves_nothing(drive: Any, moment: str) -> None:
    kill_driver(drive, moment, "alone", 0)


@pytest.mark.parametrize("manner", MANNERS[1:])
def test_a_driver_that_is_killed_with_others_leaves_nothing(drive: Any, manner: str) -> None:
    kill_driver(drive, "call", manner, 0)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_two_hundred_killed_drivers_leave_nothing(
    drive: Any, times: Callable[[int], int], seed: int
) -> None:
    """``pytest tests/chaos/test_drivers.py -m soak --faults 200 --seed 1``."""
    ways = [(moment, manner) for moment in MOMENTS for manner in MANNERS]
    failed: dict[str, str] = {}
    for number in range(times(200)):
        moment, manner = ways[number % len(ways)]
        try:
            kill_driver(drive, moment, manner, seed * 1_000_000 + number)
        except AssertionError as error:
            failed[f"{number}: {moment}, {manner}"] = str(error)

    assert not failed
