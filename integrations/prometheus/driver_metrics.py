"""Metrics of one driver: sums over its event stream. No effects: time is an argument.

- Counters continue when a group restarts, or its supervisor builds it anew under the same name.
- The current state of a group is that of the last whole picture, and is dropped with the driver.
- Times of recoveries and of service come from events, to the microsecond; after a planned
  restart of a group, from the pictures, which are one second apart.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

from phalanx.integrations.follower.follower import silence
from phalanx.runtime import Picture, Sketch

RECOVERY_SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
PHASES = ("detect", "gate", "launch", "start", "restore", "reform", "total")
_GROUP_EVENTS = frozenset(
    f"phalanx.{name}"
    for name in (
        *("worker_crashed", "worker_started", "worker_ready", "checkpoint_restored"),
        *("group_down", "group_up", "group_ended"),
    )
)
_MOST_GROUPS = 256  # that have ended and are kept, for their counters
_JITTER = 0.05  # seconds by which the beginning of a call may seem to move


class Distribution:
    """Counts of values by class, for a histogram with *limits*."""

    def __init__(self, limits: tuple[float, ...]) -> None:
        self.limits = limits
        self.counts = [0] * (len(limits) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        """Count *value*."""
        self.counts[bisect_left(self.limits, value)] += 1
        self.sum += value


@dataclass(slots=True)
class Recovery:
    """The recovery of a group that is under way; all times on the driver's monotonic clock."""

    down: float
    launching: float = 0.0
    existing: float = 0.0
    ready: float = 0.0
    restoring: float = 0.0  # seconds

    def phases(self, up: float) -> dict[str, float]:
        """Return the seconds of each phase, now that the group is *up*."""
        launching = max(self.down, self.launching)
        existing = max(launching, self.existing)
        ready = max(existing, self.ready)
        spent = {
            "gate": launching - self.down,
            "launch": existing - launching,
            "start": max(0.0, ready - existing - self.restoring),
            "reform": max(0.0, up - ready),
            "total": up - self.down,
        }
        return spent | ({"restore": self.restoring} if self.restoring else {})


@dataclass(slots=True)
class GroupMetrics:
    """One group.

    Attributes:
        now: It as in the last picture (`GroupStatus`); None if it was not in it.
        deaths: How many of each rank and reason.
        hung: Seconds that each rank had run a call for which it was ended.
        recoveries: Seconds by phase.
        serving: Seconds in which it served.
        down: Seconds after its first service in which it did not.
        progressed_at: When one of its ranks last began or ended a call, seconds since 1970.
        ended: Why it has ended by itself; empty if it has not.
    """

    now: dict[str, Any] | None = None
    deaths: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    hung: dict[str, float] = field(default_factory=lambda: defaultdict[str, float](float))
    recoveries: dict[str, Distribution] = field(
        default_factory=lambda: {phase: Distribution(RECOVERY_SECONDS) for phase in PHASES}
    )
    serving: float = 0.0
    down: float = 0.0
    progressed_at: float | None = None
    ended: str = ""
    _recovery: Recovery | None = None
    _serves: bool | None = None  # None before its first service, and without a driver
    _since: float = 0.0
    _doing: dict[tuple[int, int], tuple[int, float]] = field(
        default_factory=dict[tuple[int, int], tuple[int, float]]
    )

    def on_event(self, event: dict[str, Any]) -> None:
        """Add what *event*, which is about this group, says."""
        at, rank = float(event["at"]), event.get("rank")
        match event["event"]:
            case "phalanx.worker_crashed":
                self._died(event["report"])
            case "phalanx.group_down":
                self._recovery = self._recovery or Recovery(at)
                self.pass_time(at, serves=False)
            case "phalanx.worker_started" if self._recovery is not None and rank is not None:
                own = self._recovery
                own.launching = max(own.launching, at)
                own.existing = max(own.existing, at + float(event["took"]))
            case "phalanx.worker_ready" if self._recovery is not None and rank is not None:
                self._recovery.ready = max(self._recovery.ready, at)
            case "phalanx.checkpoint_restored" if self._recovery is not None:
                self._recovery.restoring = max(self._recovery.restoring, float(event["took"]))
            case "phalanx.group_up":
                if self._recovery is not None:
                    for phase, seconds in self._recovery.phases(at).items():
                        self.recoveries[phase].add(seconds)
                self._recovery, self.ended = None, ""
                self.pass_time(at, serves=True)
            case "phalanx.group_ended":
                self._recovery, self.ended = None, str(event["cause"])
                self.pass_time(at, serves=False if self.ended else None)
            case _:
                pass

    def show(self, now: dict[str, Any], wall: float) -> None:
        """Take over what the group is like *now*; *wall* is the time since 1970."""
        answered = now["calls"].get("ok", 0)
        has_answered = answered > (0 if self.now is None else self.now["calls"].get("ok", 0))
        self.now = now
        serves = now["phase"] == "serving"
        self.ended = "" if serves else self.ended
        self.pass_time(now["at"], serves=serves)
        doing: dict[tuple[int, int], tuple[int, float]] = {
            (rank["rank"], rank["incarnation"]): (
                rank["served"],
                now["at"] - rank["running_for"] if rank["running_for"] else 0.0,
            )
            for rank in now["ranks"]
        }
        before, self._doing = self._doing, doing
        if has_answered or any(
            _has_moved(before.get(key, (0, 0.0)), done) for key, done in doing.items()
        ):
            self.progressed_at = wall

    def pass_time(self, at: float, *, serves: bool | None) -> None:
        """Count the time until *at*; from then on the group *serves*, or None: is not counted."""
        if self._serves is None and serves is False:  # it has not served yet
            return
        if self._serves is not None:
            spent = max(0.0, at - self._since)
            self.serving += spent if self._serves else 0.0
            self.down += 0.0 if self._serves else spent
        self._serves = serves
        self._recovery = None if serves is None else self._recovery
        self._since = max(self._since, at)

    @property
    def is_down(self) -> bool:
        """Whether it has served, and does not just now."""
        return self._serves is False

    def _died(self, report: dict[str, Any]) -> None:
        rank = "standby" if report["rank"] is None else str(report["rank"])
        kind = str(report["reason"]["kind"])
        self.deaths[rank, kind] += 1
        call = report.get("call")
        if kind == "unresponsive" and call is not None:
            ran = call.get("running_for") or 0.0
            self.hung[rank] += ran
            self.recoveries["detect"].add(ran)


def _has_moved(before: tuple[int, float], now: tuple[int, float]) -> bool:
    return now[0] != before[0] or now[1] > before[1] + _JITTER


class DriverMetrics:
    """Everything known of one driver, or of those that follow one another under one name.

    Attributes:
        groups: By name; also those that have ended.
        trees: As in the last picture (`TreeStatus`).
        problem: Why there is no stream of a driver; empty if there is one.
        is_alive: Whether there is a driver all the same, which has no executor just now.
    """

    def __init__(self) -> None:
        self.groups: dict[str, GroupMetrics] = {}
        self.trees: list[dict[str, Any]] = []
        self.problem = "no driver was seen yet"
        self.is_alive = False
        self._picture: Picture | None = None
        self._last_received_at = 0.0
        self._sketch = Sketch()

    def begin(self, driver: dict[str, Any], now: float) -> None:  # noqa: ARG002  # a `StreamConsumer`'s
        """Note that a driver is being followed from *now* on (monotonic)."""
        self.problem, self._last_received_at, self._sketch = "", now, Sketch()

    def take(self, record: dict[str, Any], now: float, wall: float) -> None:
        """Add one message of the stream, heard *now* (monotonic), at *wall* (since 1970)."""
        if record.get("event") in _GROUP_EVENTS:
            self._group((record.get("report") or record)["group"]).on_event(record)
        elif (picture := self._sketch.take(record)) is not None:
            self._last_received_at = now
            self._show(picture, wall)

    def end(self, problem: str, now: float, *, is_alive: bool = False) -> None:
        """Note that there is no stream at *now*, because of *problem*; *is_alive*: but a driver."""
        self.problem, self.is_alive, self._picture, self.trees = problem, is_alive, None, []
        for group in self.groups.values():
            group.now = None
            group.ended = group.ended if is_alive else ""
            group.pass_time(now, serves=False if group.ended else None)

    def wait(self, now: float) -> None:
        """Take that nothing was heard; `unwell` says for how long."""

    def unwell(self, now: float) -> str:
        """Return why the driver does not seem to work; empty if it answers."""
        if self.problem:
            return "" if self.is_alive else self.problem
        return silence(self._last_received_at, now)

    def unready(self, now: float) -> str:
        """Return which group is not complete, or why that is not known; empty if all are."""
        if problem := self.unwell(now):
            return problem
        for name, group in self.groups.items():
            if group.ended:
                return f"group {name} has ended: {group.ended}"
            if group.is_down:  # the next picture says more
                return f"group {name} is down"
        if self.problem:
            return self.problem
        return (
            "the driver has not answered yet"
            if self._picture is None
            else (self._picture.incomplete())
        )

    def _group(self, name: str) -> GroupMetrics:
        if name not in self.groups and len(self.groups) >= _MOST_GROUPS:
            gone = next((key for key, each in self.groups.items() if each.now is None), None)
            if gone is not None:
                del self.groups[gone]
        return self.groups.setdefault(name, GroupMetrics())

    def _show(self, picture: Picture, wall: float) -> None:
        self._picture, self.trees = picture, picture.trees
        at = max((group["at"] for group in picture.groups), default=self._last_received_at)
        shown = {group["group"]: group for group in picture.groups}
        for name, group in self.groups.items():
            if name not in shown:
                group.now = None
                group.pass_time(at, serves=False if group.ended else None)
        for name, now in shown.items():
            self._group(name).show(now, wall)
