"""Processor use of a rank and its descendants: the sign that it does not hang."""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING, Final

from phalanx.runtime import Vitals, procfs

if TYPE_CHECKING:
    from collections.abc import Callable

_LOOKS: Final = 8  # in the time after which a rank counts as hung
_LEAST: Final = 0.005  # of one processor; a thread that polls ten times a second takes less
_TICK: Final = 1 / os.sysconf("SC_CLK_TCK")


class Activity:
    """Calls *report* while this process, or a descendant, uses the processor; from a daemon thread.

    Args:
        seconds: After which a rank counts as hung.
        report: Called several times in that time, unless nothing is done.
    """

    def __init__(self, seconds: float, report: Callable[[], object]) -> None:
        self._interval = seconds / _LOOKS
        self._report = report
        threading.Thread(target=self._run, name="torchrun-activity", daemon=True).start()

    def _run(self) -> None:
        pid, before = os.getpid(), 0.0
        while True:
            time.sleep(self._interval)
            try:
                tasks = procfs.descendants(procfs.read_all(), [pid])
            except OSError:  # no descriptor is free, which says nothing
                self._report()
                continue
            waits = (Vitals.of(each) for each in tasks)
            children = [each for each in waits if each.state]
            # Without this thread's own.
            own = time.process_time() - time.thread_time()
            used = own + sum(each.ticks for each in children) * _TICK
            on_disk = any(each.state == "D" for each in (Vitals.of(pid), *children))
            # It falls where a child has ended.
            if on_disk or abs(used - before) > _LEAST * self._interval:
                self._report()
            before = used
