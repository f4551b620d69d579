"""Leaks of a run, found by `phalanx.testing.LeakDetector`."""

from __future__ import annotations

import os
import tempfile
import threading
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.chaos.history.events import LeakFound
from phalanx.chaos.history.journal import now
from phalanx.chaos.nemesis.processes import trees_of
from phalanx.testing import LeakDetector

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

WORKERS = ".pids"
"""Files with a line for each process of a rank: its pid and start time, in ticks."""

_SETTLE_TIMEOUT = 10.0  # seconds for what is about to disappear


class RunLeaks:
    """The leaks of the run in *folder*; *own*: whether this process is its driver."""

    def __init__(self, folder: Path, *, own: bool = True) -> None:
        self._folder = folder
        devices = own and Path("/dev/nvidiactl").exists()
        self._detector = LeakDetector(
            patience=_SETTLE_TIMEOUT, own=own, children=False, devices=devices
        )
        self._detector.pids = self._pids = {os.getpid()}
        self._lock = threading.Lock()  # hooks look as well, on any thread

    def look(self, driver: int, places: Iterable[str] = ()) -> None:
        """Note the processes and the shared memory of the run: of *driver*, and of its nodes."""
        with self._lock:
            self._pids.add(driver)
            self._detector.marks |= trees_of(driver) | set(filter(None, places))
            self._detector.look()

    def left(self) -> list[LeakFound]:
        """Return what is left behind; wait some seconds for what is about to disappear."""
        self._pids |= {pid for pid, _ in keys_in(self._folder.glob(f"*{WORKERS}"))}
        leaks = self._detector.wait_gone()
        return [LeakFound(at=now(), what=leak.what, name=leak.name) for leak in leaks]


def name_files() -> Callable[[], None]:
    """Have temporary files without a prefix say which process made them; return what ends that."""
    before, tempfile.template = tempfile.template, f"tmp-{os.getpid()}-"
    return partial(setattr, tempfile, "template", before)


def keys_in(files: Iterable[Path]) -> set[tuple[int, int]]:
    """Return the (pid, ticks) in those of *files* that exist."""
    there = (path for path in files if path.exists())
    lines = [line.split() for path in there for line in path.read_text().splitlines()]
    # The death of its writer may have cut a line short.
    return {(int(words[0]), int(words[1])) for words in lines if len(words) == 2}
