"""What a driver looks like, put together from what it tells in parts.

Guarantees: a picture is whole: all of it was told in answer to one look. What the driver cannot
know is added here, where it costs the driver nothing: the memory of each process, calls per second.

Left to others: how it is drawn (`drawing`), and listening (`top`).
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_EVENTS = 8
_QUIET = ("phalanx.worker_started", "phalanx.worker_ready", "phalanx.report_written")


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A driver at one moment.

    Attributes:
        groups: As in `GroupGlance`, whole; each rank also has ``rss_bytes`` (None where it has no
            process) and ``calls_per_s`` (None in the first picture).
        trees: As in `TreeGlance`.
        at: When it was whole, in seconds on the monotonic clock.
    """

    groups: list[dict[str, Any]]
    trees: list[dict[str, Any]]
    at: float

    def as_json(self) -> dict[str, Any]:
        """Return it for programs."""
        return {"groups": self.groups, "trees": self.trees}


@dataclass(slots=True)
class Sketch:
    """Takes in what a driver tells; yields a picture whenever one is whole.

    Attributes:
        events: The latest events that say something, oldest first.
    """

    events: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_EVENTS))
    _groups: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    _trees: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    _served: dict[tuple[str, int, int], tuple[float, int]] = field(
        default_factory=dict[tuple[str, int, int], tuple[float, int]]
    )

    def take(self, record: dict[str, Any]) -> Picture | None:
        """Return the picture that *record* completes, or None."""
        match record.get("event"):
            case "phalanx.group_state":
                self._take_group(record)
            case "phalanx.tree_state":
                self._trees[record["root"]["path"]] = _without_envelope(record)
            case "phalanx.glance_ended":
                return self._finished(int(record["groups"]))
            case event if record.get("kind") == "event" and event not in _QUIET:
                if record.get("level") != "debug":
                    self.events.append(record)
            case _:
                pass
        return None

    def _take_group(self, record: dict[str, Any]) -> None:
        part = _without_envelope(record)
        first = part.pop("first")
        known = self._groups.get(part["group"])
        if first and known is not None:
            known["ranks"] += part["ranks"]
        else:
            self._groups[part["group"]] = part

    def _finished(self, groups: int) -> Picture | None:
        """Return what has been told since the last time, unless part of it was missed."""
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
        groups_by_name = [told[name] for name in sorted(told)]
        return Picture(
            groups=groups_by_name, trees=[trees[n] for n in sorted(trees)], at=time.monotonic()
        )


def resident_bytes(pid: int | None) -> int | None:
    """Return how much memory of its own and of others *pid* has in RAM, None without a process."""
    if pid is None:
        return None
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return None


def _rate(before: tuple[float, int] | None, now: tuple[float, int]) -> float | None:
    if before is None or now[0] <= before[0]:
        return None
    return (now[1] - before[1]) / (now[0] - before[0])


def _without_envelope(record: dict[str, Any]) -> dict[str, Any]:
    envelope = ("kind", "event", "level", "timestamp", "seq")
    return {key: value for key, value in record.items() if key not in envelope}
