"""Journals: append-only files of events, one for each writer, that outlive their writers.

Guarantees: an event is in the file when `Journal.write` returns, even if its writer is killed in
the next instant. A line that was truncated by a kill or a full disk is the last of its file and is
ignored. Writing raises nothing, since a journal is used inside the code it observes: see `problem`.
"""

from __future__ import annotations

import os
import time
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from phalanx.supervision import RuntimeFault

from .events import DriverStarted, Event, event_of
from .history import History

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

SUFFIX = ".jsonl"
now = time.monotonic
"""The time of events in files: one clock for all processes of the machine."""


class Journal:
    """The file of one writer in the folder of a run.

    Attributes:
        problem: Why something could not be written; None if everything was.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._path = folder / f"{name}{SUFFIX}"
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._fd = os.open(self._path, flags, 0o600)
        self.problem: OSError | None = None

    def write(self, event: Event) -> None:
        """Append *event*."""
        line = f"{event.to_json()}\n".encode()
        try:
            if os.write(self._fd, line) != len(line):
                self.problem = OSError(f"{self._path}: the disk is full")
        except OSError as error:
            self.problem = error

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


@contextmanager
def recording(folder: Path) -> Generator[None]:
    """Report an error of this block as a fault of the record; user code runs outside of it.

    Raises:
        RuntimeFault: the record could not be written to *folder*, or a line of it is no event.
    """
    try:
        yield
    except (OSError, ValueError) as error:
        msg = f"the record of the run could not be written to {folder}: {error}"
        raise RuntimeFault(msg) from error


def read_history(folder: Path, *, seed: int | None = None) -> History:
    """Return the history in *folder*, with times since its first driver started.

    Raises:
        ValueError: a line in the middle of a file is no event.
    """
    events = [event for path in sorted(folder.rglob(f"*{SUFFIX}")) for event in _read(path)]
    start = min((event.at for event in events if isinstance(event, DriverStarted)), default=0.0)
    return History.of((replace(event, at=event.at - start) for event in events), seed=seed)


def _read(path: Path) -> list[Event]:
    *lines, last = path.read_text().split("\n")
    events: list[Event] = []
    for number, line in enumerate(lines, 1):
        try:
            events.append(event_of(line))
        except ValueError as error:
            if number == len(lines) and not last:
                break  # cut short by a full disk, and ended by the next attempt
            raise ValueError(f"{path}, line {number}: {error}") from error
    return events
