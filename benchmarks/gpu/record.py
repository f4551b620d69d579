"""The figures of one experiment, written to their file whenever one is added."""

from __future__ import annotations

import json
import os
import threading
import time
import traceback
from statistics import median
from typing import TYPE_CHECKING, Any, Self

from benchmarks.harness.machine import describe, installed_version

from .device import find_meter

if TYPE_CHECKING:
    from pathlib import Path

_NCCL = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")


class Record:
    """What an experiment is run with, and what it has found.

    Args:
        path: Rewritten as a whole each time: an experiment that is killed loses nothing.
        rehearsal: Whether there is no GPU: sizes are small, and memory is the host's.

    Attributes:
        meter: Measures the memory of the device.
    """

    def __init__(self, path: Path, name: str, *, rehearsal: bool) -> None:
        self._path = path
        self.rehearsal = rehearsal
        self.device = "cpu" if rehearsal else "cuda:0"
        self.meter = find_meter(rehearsal=rehearsal)
        self._lock = threading.Lock()
        now = time.monotonic()
        self._until = float(os.environ.get("PHALANX_LAB_UNTIL", now + 500.0))
        self._whole = self._until - now
        self._values: dict[str, Any] = {
            "name": name,
            "rehearsal": rehearsal,
            "machine": describe(),
            "code": os.environ.get("PHALANX_LAB_CODE"),  # the commit, where it was carried
            "nccl": next(filter(None, map(installed_version, _NCCL)), None),
            "device": self.meter.describe(),
            "idle_bytes": self.meter.used(),
        }
        self._write()

    def left(self) -> float:
        """Return the seconds until this experiment is cut off, less ten to end in order."""
        return self._until - 10.0 - time.monotonic()

    def has_time(self, seconds: float = 0.0) -> bool:
        """Return whether *seconds* more, at most a fifth of the whole, may be spent.

        In a rehearsal, whether any.
        """
        return self.left() > (0.0 if self.rehearsal else min(seconds, self._whole / 5))

    def wait_idle(self) -> int:
        """Return the bytes in use at the beginning, once no more are; wait at most 15 seconds."""
        idle = int(self._values["idle_bytes"])
        return idle if self.meter.settle(idle, 15.0) is not None else self.meter.used()

    def choose(self, real: Any, small: Any) -> Any:
        """Return *small* in a rehearsal, else *real*."""
        return small if self.rehearsal else real

    def set(self, **values: Any) -> None:
        """Keep single figures."""
        with self._lock:
            self._values |= values
            self._write()

    def add(self, series: str, **row: Any) -> None:
        """Keep one row of a series; from any thread."""
        with self._lock:
            self._values.setdefault(series, []).append(row)
            self._write()

    def rows(self, series: str) -> list[dict[str, Any]]:
        """Return what was added."""
        return list(self._values.get(series, []))

    def summarize(self, series: str, field: str, *by: str) -> None:
        """Keep median, 99th percentile and worst of *field*, for each value of the fields *by*.

        A row without a figure (None) counts as one that is above all others.
        """
        groups: dict[str, list[float]] = {}
        for row in self.rows(series):
            key = " ".join(str(row[each]) for each in by) or "all"
            value = row.get(field)
            groups.setdefault(key, []).append(float("inf") if value is None else value)
        found = {key: quantiles(values) for key, values in groups.items()}
        self.set(**{f"{series}.{field}": found})

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        if kind is not None:
            self.set(error="".join(traceback.format_exception(error))[-4000:])
        settled = self.meter.settle(self._values["idle_bytes"], 10.0)
        self.set(settled_after=settled, bytes_at_end=self.meter.used())

    def _write(self) -> None:
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps(self._values, indent=1, default=str) + "\n")
        new.replace(self._path)


def quantiles(values: list[float]) -> dict[str, Any]:
    """Return number, median, 99th percentile and worst; None for what has no end."""
    ordered = sorted(values)

    def finite(value: float) -> float | None:
        return None if value == float("inf") else round(value, 6)

    p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    found = {"median": median(ordered), "p99": p99, "worst": ordered[-1]}
    return {"n": len(ordered), **{name: finite(value) for name, value in found.items()}}
