"""Where records go: append-only files that outlive whoever wrote them.

Guarantees: a record is in the file when `Journal.write` returns, also if its writer is killed in
the next instant; each writer has a file of its own; a line that was cut short by the death of its
writer, or by a full disk, is the last of its file and is left out. Writing raises nothing: a
journal stands in the middle of what it watches. What went wrong is in `problem`.

Left to others: what a run folder holds beside them (`run_record`).
"""

from __future__ import annotations

import os
import time
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from phalanx.supervision import RuntimeFault

from .history import History
from .records import record_of
from .referee_records import LifeBegan

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

    from .record import Record

SUFFIX = ".jsonl"


class Journal:
    """One writer's file in the folder of a run.

    Attributes:
        problem: Why something could not be written; None while all was.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._path = folder / f"{name}{SUFFIX}"
        self._fd = self._open()
        self.problem: OSError | None = None

    def write(self, record: Record) -> None:
        """Append *record*."""
        line = f"{record.to_json()}\n".encode()
        try:
            try:
                written = os.write(self._fd, line)
            except OSError:  # somebody closed what was not theirs: that is a fault too
                self._fd = self._open()
                written = os.write(self._fd, line)
            if written != len(line):
                self.problem = OSError(f"{self._path}: the disk is full")
        except OSError as error:
            self.problem = error

    def close(self) -> None:
        """Let go of the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _open(self) -> int:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        return os.open(self._path, flags, 0o600)


@contextmanager
def recording(folder: Path) -> Generator[None]:
    """Report an OSError of this block as the record's; code of the user runs outside of it.

    Raises:
        RuntimeFault: the record could not be written to *folder*.
    """
    try:
        yield
    except OSError as error:
        msg = f"the record of the run could not be written to {folder}: {error}"
        raise RuntimeFault(msg) from error


def now() -> float:
    """Return the time that records carry in files: one clock for all processes of the machine."""
    return time.monotonic()


def read_history(folder: Path, *, seed: int | None = None, target: str = "") -> History:
    """Return the history whose files lie in *folder*, with times since its first driver began.

    Raises:
        ValueError: a line in the middle of a file is no record.
    """
    records: list[Record] = []
    for path in sorted(folder.rglob(f"*{SUFFIX}")):
        records += _read(path)
    start = min((record.at for record in records if isinstance(record, LifeBegan)), default=0.0)
    return History.of(
        (replace(record, at=record.at - start) for record in records), seed=seed, target=target
    )


def _read(path: Path) -> list[Record]:
    *lines, last = path.read_text().split("\n")
    records: list[Record] = []
    for number, line in enumerate(lines):
        try:
            records.append(record_of(line))
        except ValueError as error:
            if number == len(lines) - 1 and not last:
                break  # cut short by a full disk, and ended by the next attempt
            msg = f"{path}, line {number + 1}: {error}"
            raise ValueError(msg) from error
    return records
