"""What tests do to the ranks of a group, and how they wait for what comes of it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

from tests.support.processes import LONG, wait_until

from phalanx.actors import Executor
from phalanx.runtime.linux import procfs
from phalanx.supervision import Intensity

OFTEN = Intensity(1000, 60.0)  # a group may die as often as a test likes


def kill(ex: Executor[Any], rank: int = 0, number: int = signal.SIGKILL) -> int:
    pid = ex.ranks[rank].pid
    assert pid is not None
    os.kill(pid, number)
    return pid


def wait_stopped(pid: int | None) -> None:
    """Return once that process has stopped, which it does when it is its turn to run."""
    assert pid is not None
    wait_until(lambda: (task := procfs.read(pid)) is not None and task.state == "T")


def wait_for_view(ex: Executor[Any], holds: Callable[[Any], bool]) -> None:
    shared = ex._group
    with shared.changed:
        assert shared.changed.wait_for(lambda: holds(shared.view), LONG), shared.view


def wait_healed(ex: Executor[Any], restarts: int = 1) -> None:
    """Return once the group serves again, after so many restarts since it was built."""
    wait_for_view(ex, lambda view: view.restarts >= restarts and str(view.phase) == "serving")


def telling(told: list[Any], once: threading.Event) -> Callable[[Any], None]:
    """Return what notes what it is *told*, and sets *once*."""

    def tell(what: Any) -> None:
        told.append(what)
        once.set()

    return tell
