"""What tests do to the ranks of a group, and how they wait for what comes of it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

from phalanx.actors import Executor

LONG = 60.0  # seconds; no test takes them unless something is broken


def kill(ex: Executor[Any], rank: int = 0) -> None:
    pid = ex.ranks[rank].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


def wait_for_view(ex: Executor[Any], holds: Callable[[Any], bool]) -> None:
    shared = ex._core.shared
    with shared.changed:
        assert shared.changed.wait_for(lambda: holds(shared.view), LONG), shared.view


def wait_until(holds: Callable[[], bool]) -> None:
    """Return once *holds* does; for what nobody tells of."""
    deadline = time.monotonic() + LONG
    while not holds():
        assert time.monotonic() < deadline, "it never came about"
        time.sleep(0.005)
