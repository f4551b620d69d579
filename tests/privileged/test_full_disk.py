"""A full disk costs what cannot be written while it is full, and nothing else."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.programs import run_program

from phalanx.actors.checkpoint.group_checkpoints import CheckpointManager
from phalanx.runtime import RemoteFailure

ROOT = Path(__file__).parents[2]


def test_a_group_goes_on_while_its_disk_is_full_and_when_there_is_room_again(
    tmp_path: Path,
) -> None:
    # A small disk of its own, in a mount namespace of its own.
    program = "tests.support.full_disk_driver"
    mount = f'mount -t tmpfs -o size=256k none "$1" && exec "$2" -m {program} "$1"'
    command = ["unshare", "--mount", "sh", "-c", mount, "sh", str(tmp_path), sys.executable]

    done = run_program(command, cwd=ROOT)

    if done.returncode and ("unshare" in done.stderr or "mount:" in done.stderr):
        pytest.skip(f"no mount namespace can be made: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "answers": [2, 3, 4, 5, 6],
        "snapshots lost": 10,
        "after a death": [1, 1],
        "reports lost": 1,
        "reports known": 1,
        "no half files": True,
        "with room": [2, 2],
        "after another": [2, 2],
        "reports written": 2,
        "files": 2,
        "still lost": 1,
    }


def test_what_keeps_states_from_being_stored_is_logged_once_for_each_rank() -> None:
    logged: list[Any] = []
    told: list[Any] = []
    group: Any = SimpleNamespace(
        spec=SimpleNamespace(name="group"),
        clock=lambda: 0.0,
        checkpoints=None,
        publish=logged.append,
        deliver=told.append,
        post=lambda call, *args: call(*args),
    )
    manager = CheckpointManager(group)
    full = RemoteFailure.of(OSError(28, "No space left on device"))
    broken = RemoteFailure.of(ValueError("no state"))

    for number in range(100):
        manager.failed(number % 2, number, full)
    manager.failed(0, 100, broken)

    assert [(event.rank, event.error) for event in logged] == [
        (0, "OSError: [Errno 28] No space left on device"),
        (1, "OSError: [Errno 28] No space left on device"),
        (0, "ValueError: no state"),
    ]
    assert len(told) == 98
