"""Picture of a driver at one moment, put together from the state messages of its stream.

- A picture is whole: all of it answers one request. One of which a message was missed is dropped.
- What the driver cannot know is added: the memory of each process, calls per second.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.supervision import RuntimeFault

if TYPE_CHECKING:
    from .find_drivers import DriverStream
    from .stream_observer import Observer

_PATIENCE = 10.0  # seconds for the first picture; a driver that answers takes milliseconds
_EVENTS = 8
_QUIET = ("phalanx.worker_started", "phalanx.worker_ready", "phalanx.report_written")
_ENVELOPE = ("kind", "event", "level", "timestamp", "seq")


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A driver at one moment.

    Attributes:
        groups: As in `GroupStatus`, whole; each rank also has ``rss_bytes`` (None if it has no
            process) and ``calls_per_s`` (None in the first picture).
        trees: As in `TreeStatus`.
        ended: Why groups have ended by themselves that were not built anew since, by name.
        at: When it was whole, in seconds on the monotonic clock.
    """

    groups: list[dict[str, Any]]
    trees: list[dict[str, Any]]
    ended: dict[str, str]
    at: float

    def incomplete(self) -> str:
        """Return which group does not serve with all of its ranks, and why; empty for none."""
        for name, cause in self.ended.items():
            return f"group {name} has ended: {cause}"
        if not self.groups:
            return "there is no group yet"
        for group in self.groups:
            name, down = group["group"], [r for r in group["ranks"] if r["state"] != "up"]
            if group["phase"] != "serving" or down:
                each = ", ".join(f"rank {rank['rank']} is {rank['state']}" for rank in down)
                return f"group {name} is {group['phase']}" + (f": {each}" if each else "")
        return ""


@dataclass(slots=True)
class Sketch:
    """The messages of a picture that is not whole yet.

    Attributes:
        events: The latest events that are worth showing, oldest first.
    """

    events: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_EVENTS))
    _groups: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    _trees: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    _served: dict[tuple[str, int, int], tuple[float, int]] = field(
        default_factory=dict[tuple[str, int, int], tuple[float, int]]
    )

    def take(self, record: dict[str, Any]) -> Picture | None:
        """Return the picture that *record* completes, or None."""
        content = {key: value for key, value in record.items() if key not in _ENVELOPE}
        match record.get("event"):
            case "phalanx.group_state":
                first = content.pop("first")
                known = self._groups.get(content["group"])
                if first and known is not None:
                    known["ranks"] += content["ranks"]
                else:
                    self._groups[content["group"]] = content
            case "phalanx.tree_state":
                self._trees[record["root"]["path"]] = content
            case "phalanx.status_ended":
                return self._finish(int(record["groups"]), record["ended"])
            case event if record.get("kind") == "event" and event not in _QUIET:
                if record.get("level") != "debug":
                    self.events.append(record)
            case _:
                pass
        return None

    def _finish(self, groups: int, ended: dict[str, str]) -> Picture | None:
        """Return the picture of the messages since the last one, unless some were missed."""
        told, self._groups = self._groups, {}
        trees, self._trees = self._trees, {}
        is_whole = len(told) == groups and all(
            len(group["ranks"]) == group["world_size"] for group in told.values()
        )
        if not is_whole:  # it began before we listened, or something was dropped
            return None
        served: dict[tuple[str, int, int], tuple[float, int]] = {}
        for name, group in told.items():
            for rank in group["ranks"]:
                key = (name, rank["rank"], rank["incarnation"])
                served[key] = (group["at"], rank["served"])
                rank["calls_per_s"] = _rate(self._served.get(key), served[key])
                rank["rss_bytes"] = resident_bytes(rank["pid"])
        self._served = served
        return Picture(
            groups=[told[name] for name in sorted(told)],
            trees=[trees[name] for name in sorted(trees)],
            ended=ended,
            at=time.monotonic(),
        )


def first_picture(
    observer: Observer, driver: DriverStream, patience: float | None = None
) -> Picture:
    """Return the first whole picture that *observer* gets within *patience* seconds; None for 10.

    Raises:
        RuntimeFault: the driver has ended, or there was none in time.
    """
    sketch = Sketch()
    patience = _PATIENCE if patience is None else patience
    deadline = time.monotonic() + patience
    while (record := observer.next(deadline)) is not None:
        picture = sketch.take(record)
        if picture is not None:
            return picture
        if observer.is_last(record):
            break
    if observer.has_ended:
        raise RuntimeFault(f"driver {driver.pid} has ended")
    raise RuntimeFault(
        f"driver {driver.pid} did not answer within {patience:g} s: it is stopped, or very busy"
    )


def resident_bytes(pid: int | None) -> int | None:
    """Return how much memory of process *pid*, shared pages included, is in RAM; None without."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:"))
    except (OSError, ValueError, StopIteration):
        return None


def _rate(before: tuple[float, int] | None, now: tuple[float, int]) -> float | None:
    if before is None or now[0] <= before[0]:
        return None
    return (now[1] - before[1]) / (now[0] - before[0])
