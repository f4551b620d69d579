"""Status snapshots of a driver's groups and trees, for observers in other processes.

While an observer is attached the output collector requests them through an eventfd; the event
loop's thread answers with one event for each group and tree, then `StatusEnded`.
"""

from __future__ import annotations

import os
import select
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from phalanx.runtime.event import Event, LoggedEvent
from phalanx.runtime.linux import descriptors
from phalanx.runtime.threads.event_loop import CallbackFailed, EventLoop

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


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

    @property
    def doing(self) -> str:
        """What it is running, and for how long; empty between calls."""
        what = f"an abandoned call, {self.method}," if self.abandoned else self.method
        return f"{what} for {self.running_for:.1f} s" if what and self.running_for else what


CALL_SECONDS = (1e-4, 5e-4, 1e-3, 5e-3, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 60.0, 300.0)
"""The classes in which the seconds of calls are counted; each includes its limit."""


class GroupStatus(Event, event="group_state", level="debug"):
    """One rank group at one moment.

    Attributes:
        group: Its name, or its path in a tree.
        restarts: Deaths that led to a restart, in all.
        restarts_in_window: Restarts that count against the intensity.
        period: Length of that window in seconds.
        calls: How many calls have ended with each outcome, since the first observer asked.
        call_seconds: How many of those took at most each of `CALL_SECONDS`, and longer than the one
            before it; last, how many took longer than all.
        call_seconds_sum: What they took together.
        releasing_bytes: Device memory of dead workers that is not seen to be released yet.
        first: The first rank of this event; a large group takes several.
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
        root: The top supervisor.
        children: Its descendants, parents first; of a large tree the first ones.
        hidden: How many are left out.
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


class StatusSource:
    """Status snapshots of one driver.

    Attributes:
        request: An eventfd; a write to it requests a snapshot.
    """

    def __init__(self, loop: EventLoop, emit: Callable[[LoggedEvent], None]) -> None:
        self.request = descriptors.own(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
        self._emit = emit
        self._lock = threading.Lock()
        self._parts: dict[object, Callable[[], Iterable[LoggedEvent]]] = {}
        self._ended: dict[str, str] = {}
        self._watch = loop.watch(self.request, select.EPOLLIN, self._on_request)

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

    def close(self) -> None:
        """Answer no more requests."""
        self._watch.cancel()
        descriptors.close(self.request)

    def _on_request(self, _events: int) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self.request)
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
