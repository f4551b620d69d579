"""Status snapshots of a driver's groups and trees: their records, and their assembly elsewhere.

- While an observer is attached the output collector requests them; the event loop's thread answers
  with one event for each group and tree, then `StatusEnded`.
- A `Picture` is whole: all of it answers one request. If a message was missed it is dropped.
- The observer adds values that the driver lacks: the memory of each process, calls per second.
"""

from __future__ import annotations

import math
import mmap
import threading
import time
import traceback
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.runtime.event import Event, LoggedEvent
from phalanx.runtime.threads.event_loop import CallbackFailed
from phalanx.supervision import RuntimeFault

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from .event_stream import DriverStream, Observer

_LEAST = 0.5  # seconds between two answers; there is one request a second
_PICTURE_TIMEOUT = 10.0  # seconds for the first picture; a driver that answers takes milliseconds
_EVENTS = 8
_QUIET = ("phalanx.worker_started", "phalanx.worker_ready", "phalanx.report_written")
_ENVELOPE = ("kind", "event", "level", "timestamp", "seq")


@dataclass(frozen=True, slots=True)
class RankInfo:
    """One rank at one moment, as `Executor.ranks` and `phalanx top` show it.

    Attributes:
        pid: Its process, or None where it has none just now.
        state: ``"starting"``, ``"up"``, ``"reforming"``, ``"stopping"`` or ``"down"``.
        served: Calls that this incarnation has ended.
        owed: Calls that were sent to it and are not answered.
        method: The running method; empty for none.
        running_for: Seconds since its call began; 0.0 for a stream that waits for its consumer.
        abandoned: Whether that call timed out, or was cancelled or interrupted.
        host: The machine of its node, on a cluster; else empty.
    """

    rank: int
    pid: int | None
    incarnation: int
    epoch: int
    state: str
    device: str
    served: int = field(default=0, compare=False)
    owed: int = field(default=0, compare=False)
    method: str = field(default="", compare=False)
    running_for: float = field(default=0.0, compare=False)
    abandoned: bool = field(default=False, compare=False)
    host: str = ""

    @property
    def doing(self) -> str:
        """The call that it runs, and for how long; empty between calls."""
        what = f"an abandoned call, {self.method}," if self.abandoned else self.method
        return f"{what} for {self.running_for:.1f} s" if what and self.running_for else what


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """One node of a cluster at one moment, as `Status.nodes` and `phalanx top` show it.

    Attributes:
        host: The name of its machine; empty while it has not joined.
        state: ``"asked"``, ``"joining"``, ``"up"``, ``"suspect"``, ``"aside"``, ``"lost"`` or
            ``"leaving"``.
        ranks: Those that are on it; none on a spare.
        place: The mark in the environment of its processes; empty while it has not joined.
        devices: The UUIDs of the GPUs that its ranks have leased.
        beat_age: Seconds since its last beat that was reported to the driver, which happens twice
            a second; None before the first.
    """

    node: int
    host: str
    state: str
    ranks: tuple[int, ...]
    place: str = ""
    devices: tuple[str, ...] = ()
    beat_age: float | None = field(default=None, compare=False)


CALL_SECONDS = (1e-4, 5e-4, 1e-3, 5e-3, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 60.0, 300.0)
"""The classes in which the seconds of calls are counted; each includes its limit."""


class GroupStatus(Event, event="group_state", level="debug"):
    """One rank group at one moment.

    Attributes:
        group: Its name, or its path in a tree.
        restarts: Deaths that led to a restart, in all.
        restarts_in_window: Restarts that count against the intensity.
        calls: The number of calls that ended with each outcome, since the first status request.
        call_seconds: How many of those took at most each of `CALL_SECONDS`, and longer than the one
            before it; last, how many took longer than all.
        call_seconds_sum: Their total duration.
        releasing_bytes: Device memory of dead workers that is not seen to be released yet.
        first: The first of the ranks, and of the nodes, of this event; a large group takes several.
        nodes: The machines of its cluster; empty if its ranks are beside the driver.
    """

    group: str
    worker: str
    strategy: str
    phase: str
    epoch: int
    world_size: int
    restarts: int
    restarts_in_window: int
    max_restarts: int
    period: float
    planned: int
    standby: int
    in_flight: int
    waiting: int
    dropped_replies: int
    calls: dict[str, int]
    call_seconds: tuple[int, ...]
    call_seconds_sum: float
    releasing_bytes: int
    ranks: tuple[RankInfo, ...]
    first: int
    nodes: tuple[NodeInfo, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildStatus:
    """One child of a supervisor at one moment.

    Attributes:
        path: The ids from the top supervisor down.
        restarts: Restarts inside its window; None if it is no supervisor.
    """

    path: str
    restart: str
    state: str
    incarnation: int
    last_exit: str
    strategy: str = ""
    restarts: int | None = None
    max_restarts: int = 0
    period: float = 0.0


class TreeStatus(Event, event="tree_state", level="debug"):
    """One supervision tree at one moment.

    Attributes:
        children: Its descendants, parents first; of a large tree the first ones.
    """

    root: ChildStatus
    children: tuple[ChildStatus, ...]
    hidden: int


class StatusEnded(Event, event="status_ended", level="debug"):
    """The last event of a snapshot.

    Attributes:
        groups: How many groups it has.
        ended: Why groups have ended by themselves that were not built anew since, by name.
    """

    groups: int
    ended: dict[str, str]


_MOST_ENDED = 64  # the latest
STATUS_EVENTS = frozenset((GroupStatus.event, TreeStatus.event, StatusEnded.event))
EARLIER_REPORT = "phalanx.earlier_report"
"""The ``event`` of a crash report that an observer gets which was not there at the death."""


class StatusSource:
    """Status snapshots of one driver."""

    def __init__(self, emit: Callable[[LoggedEvent], None]) -> None:
        self._emit = emit
        self._lock = threading.Lock()
        self._parts: dict[object, Callable[[], Iterable[LoggedEvent]]] = {}
        self._ended: dict[str, str] = {}
        self._answered_at = -math.inf

    def add(self, part: Callable[[], Iterable[LoggedEvent]]) -> Callable[[], None]:
        """Make *part* a part of each snapshot; return what undoes this.

        It is called on the event loop's thread, and must be quick.
        """
        key = object()
        with self._lock:
            self._parts[key] = part

        def remove() -> None:  # without a reference to *part*, which may hold what holds this
            with self._lock:
                self._parts.pop(key, None)

        return remove

    def note_end(self, group: str, cause: str) -> None:
        """Note that *group* has ended by itself because of *cause*; empty: it was closed."""
        with self._lock:
            self._ended.pop(group, None)
            if cause:
                self._ended[group] = cause
            while len(self._ended) > _MOST_ENDED:
                del self._ended[next(iter(self._ended))]

    def request(self) -> None:
        """Answer; requests that have queued up get one answer."""
        if time.monotonic() - self._answered_at >= _LEAST:
            self._answered_at = time.monotonic()
            self.answer()

    def answer(self) -> None:
        """Emit a snapshot."""
        with self._lock:
            parts = list(self._parts.values())
            ended = dict(self._ended)
        trees: set[str] = set()
        groups = 0
        for part in parts:
            try:
                for event in part():
                    if isinstance(event, TreeStatus):
                        if event.root.path in trees:
                            continue  # shown by another group of the same tree
                        trees.add(event.root.path)
                    elif isinstance(event, GroupStatus):
                        groups += event.first == 0
                        ended.pop(event.group, None)
                    self._emit(event)
            except Exception:  # noqa: BLE001  # the snapshot lacks this part
                trace = traceback.format_exc()
                self._emit(CallbackFailed(callback=repr(part), trace=trace, at=time.monotonic()))
        self._emit(StatusEnded(groups=groups, ended=ended, at=time.monotonic()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A driver at one moment.

    Attributes:
        groups: As in `GroupStatus`, whole; each rank also has ``rss_bytes`` (None if it has no
            process) and ``calls_per_s`` (None in the first picture).
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


class Sketch:
    """The messages of a picture that is not whole yet.

    Attributes:
        events: The latest events that are worth showing, oldest first.
    """

    def __init__(self) -> None:
        self.events: deque[dict[str, Any]] = deque(maxlen=_EVENTS)
        self._groups: dict[str, dict[str, Any]] = {}
        self._trees: dict[str, dict[str, Any]] = {}
        self._served: dict[tuple[str, int, int], tuple[float, int]] = {}

    def take(self, record: dict[str, Any]) -> Picture | None:
        """Return the picture that *record* completes, or None."""
        content = {key: value for key, value in record.items() if key not in _ENVELOPE}
        match record.get("event"):
            case "phalanx.group_state":
                first = content.pop("first")
                known = self._groups.get(content["group"])
                if first and known is not None:
                    known["ranks"] += content["ranks"]
                    known["nodes"] += content["nodes"]
                else:
                    self._groups[content["group"]] = content
            case "phalanx.tree_state":
                self._trees[record["root"]["path"]] = content
            case "phalanx.status_ended":
                return self._finish(int(record["groups"]), record["ended"])
            case event:
                is_quiet = record.get("level") == "debug" or event in _QUIET
                if record.get("kind") == "event" and not is_quiet:
                    self.events.append(record)
        return None

    def _finish(self, groups: int, ended: dict[str, str]) -> Picture | None:
        """Return the picture of the messages since the last one, unless some were missed."""
        collected, self._groups = self._groups, {}
        trees, self._trees = self._trees, {}
        is_whole = len(collected) == groups and all(
            len(group["ranks"]) == group["world_size"] for group in collected.values()
        )
        if not is_whole:  # it began before we listened, or something was dropped
            return None
        served: dict[tuple[str, int, int], tuple[float, int]] = {}
        for name, group in collected.items():
            for rank in group["ranks"]:
                key = (name, rank["rank"], rank["incarnation"])
                served[key] = (group["at"], rank["served"])
                rank["calls_per_s"] = _rate(self._served.get(key), served[key])
                pid = None if rank.get("host") else rank["pid"]  # of this machine
                rank["rss_bytes"] = _resident_bytes(pid)
        self._served = served
        return Picture(
            groups=[collected[name] for name in sorted(collected)],
            trees=[trees[name] for name in sorted(trees)],
            ended=ended,
            at=time.monotonic(),
        )


def first_picture(
    observer: Observer, driver: DriverStream, timeout: float | None = None
) -> Picture:
    """Return the first whole picture that *observer* gets within *timeout* seconds; None for 10.

    Raises:
        RuntimeFault: the driver has ended or closed its stream, or there was none in time.
    """
    sketch = Sketch()
    timeout = _PICTURE_TIMEOUT if timeout is None else timeout
    deadline = time.monotonic() + timeout
    while (record := observer.next(deadline)) is not None:
        picture = sketch.take(record)
        if picture is not None:
            return picture
        if observer.is_last(record):
            raise RuntimeFault(f"driver {driver.pid} has closed its stream")
    if observer.has_ended:
        raise RuntimeFault(f"driver {driver.pid} has ended")
    raise RuntimeFault(
        f"driver {driver.pid} did not answer within {timeout:g} s: it is stopped, or very busy"
    )


def _resident_bytes(pid: int | None) -> int | None:
    """Return how much memory of process *pid*, shared pages included, is in RAM; None without."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * mmap.PAGESIZE or None
    except OSError:
        return None


def _rate(before: tuple[float, int] | None, now: tuple[float, int]) -> float | None:
    if before is None or now[0] <= before[0]:
        return None
    return (now[1] - before[1]) / (now[0] - before[0])
