"""Status snapshots of a driver's groups and trees, for observers in other processes.

The output collector requests one through an eventfd if an observer is attached; the event loop's
thread answers with one event for each group and tree, then `GlanceEnded`. Without an observer it
costs nothing.
"""

from __future__ import annotations

import itertools
import os
import select
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from phalanx.runtime.event import Event
from phalanx.runtime.linux import descriptors
from phalanx.runtime.threads.event_loop import CallbackFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from phalanx.runtime.event import LoggedEvent
    from phalanx.runtime.threads.event_loop import EventLoop


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGlance:
    """One rank at one moment.

    Attributes:
        served: Calls that this incarnation has ended.
        owed: Calls that were sent to it and are not answered.
        method: The running method; empty for none.
        running_for: Seconds since its call began.
    """

    rank: int
    pid: int | None
    incarnation: int
    state: str
    device: str
    served: int = 0
    owed: int = 0
    method: str = ""
    running_for: float = 0.0


class GroupGlance(Event, event="group_state", level="debug"):
    """One rank group at one moment.

    Attributes:
        group: Its name, or its path in a tree.
        restarts_in_window: Restarts that count against the intensity.
        period: Length of that window in seconds.
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
    ranks: tuple[RankGlance, ...]
    first: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildGlance:
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


class TreeGlance(Event, event="tree_state", level="debug"):
    """One supervision tree at one moment.

    Attributes:
        root: The top supervisor.
        children: Its descendants, parents first; of a large tree the first ones.
        hidden: How many are left out.
    """

    root: ChildGlance
    children: tuple[ChildGlance, ...]
    hidden: int


class GlanceEnded(Event, event="glance_ended", level="debug"):
    """The last event of a snapshot, with the number of groups."""

    groups: int


GLANCES = frozenset((GroupGlance.event, TreeGlance.event, GlanceEnded.event))


class Glances:
    """Status snapshots of one driver.

    Attributes:
        wish: An eventfd; a write to it requests a snapshot.
    """

    def __init__(self, loop: EventLoop, emit: Callable[[LoggedEvent], None]) -> None:
        self.wish = descriptors.own(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
        self._emit = emit
        self._lock = threading.Lock()
        self._shows: dict[int, Callable[[], Iterable[LoggedEvent]]] = {}
        self._keys = itertools.count()
        self._watch = loop.watch(self.wish, select.EPOLLIN, self._on_wish)

    def add(self, show: Callable[[], Iterable[LoggedEvent]]) -> Callable[[], None]:
        """Have *show* tell its part of every look, until what is returned is called.

        It runs on the event loop's thread: it must be quick.
        """
        with self._lock:
            key = next(self._keys)
            self._shows[key] = show

        def cancel() -> None:
            with self._lock:
                self._shows.pop(key, None)

        return cancel

    def close(self) -> None:
        """Answer no more requests."""
        self._watch.cancel()
        descriptors.close(self.wish)

    def _on_wish(self, _events: int) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self.wish)
        with self._lock:
            shows = list(self._shows.values())
        told: set[str] = set()
        groups = 0
        for show in shows:
            try:
                for event in show():
                    if isinstance(event, TreeGlance):
                        if event.root.path in told:
                            continue  # shown by another group of the same tree
                        told.add(event.root.path)
                    elif isinstance(event, GroupGlance):
                        groups += event.first == 0
                    self._emit(event)
            except Exception:  # noqa: BLE001  # whoever looks sees less; nobody else is concerned
                failed = CallbackFailed(
                    callback=repr(show), trace=traceback.format_exc(), at=time.monotonic()
                )
                self._emit(failed)
        self._emit(GlanceEnded(groups=groups, at=time.monotonic()))
