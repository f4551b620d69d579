"""What a driver looks like at one moment, told when somebody looks from outside.

Guarantees: nobody looking costs nothing. A look is asked for through one descriptor, by the process
that observers attach to, and answered on the hub's thread: one event for each group and tree, then
`GlanceEnded`. What cannot be shown is left out, and harms nothing.

Left to others: who looks (`publisher`), and what is made of it (the command line).
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
from typing import TYPE_CHECKING, ClassVar

from phalanx.runtime.linux import descriptors
from phalanx.runtime.threads.event_loop import HubCallbackFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from phalanx.runtime.event import LoggedEvent
    from phalanx.runtime.threads.event_loop import Hub


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGlance:
    """One rank at one moment.

    Attributes:
        served: Calls that this incarnation has ended.
        owed: Calls that it has been sent and has not answered.
        method: What it runs; empty for nothing.
        running_for: For how many seconds; 0.0 for nothing.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupGlance:
    """One rank group at one moment.

    Attributes:
        group: Its name, which is its path where it is part of a tree.
        restarts_in_window: Restarts that count against the intensity just now.
        period: Length of that window in seconds.
        first: A large group is told in several parts: the number of the first rank of this one.
    """

    event: ClassVar[str] = "phalanx.group_state"
    level: ClassVar[str] = "debug"
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
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildGlance:
    """One child of a supervisor at one moment; of a supervisor also how it stands.

    Attributes:
        path: The ids from the top supervisor down.
        restarts: How many are inside its window; None where it is no supervisor.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeGlance:
    """One supervision tree at one moment.

    Attributes:
        root: The top supervisor.
        children: What is below it, parents first; of a large tree the first ones.
        hidden: How many children were left out.
    """

    event: ClassVar[str] = "phalanx.tree_state"
    level: ClassVar[str] = "debug"
    root: ChildGlance
    children: tuple[ChildGlance, ...]
    hidden: int
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GlanceEnded:
    """Everything there is has been told.

    Attributes:
        groups: How many groups there are.
    """

    event: ClassVar[str] = "phalanx.glance_ended"
    level: ClassVar[str] = "debug"
    groups: int
    at: float


GLANCES = frozenset((GroupGlance.event, TreeGlance.event, GlanceEnded.event))


class Glances:
    """Answers looks at one driver.

    Attributes:
        wish: A descriptor; who adds to its count is told at once.
    """

    def __init__(self, hub: Hub, emit: Callable[[LoggedEvent], None]) -> None:
        self.wish = descriptors.own(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
        self._emit = emit
        self._lock = threading.Lock()
        self._shows: dict[int, Callable[[], Iterable[LoggedEvent]]] = {}
        self._keys = itertools.count()
        self._watch = hub.watch(self.wish, select.EPOLLIN, self._on_wish)

    def add(self, show: Callable[[], Iterable[LoggedEvent]]) -> Callable[[], None]:
        """Have *show* tell its part of every look, until what is returned is called.

        It runs on the hub's thread: it must be quick.
        """
        with self._lock:
            key = next(self._keys)
            self._shows[key] = show

        def cancel() -> None:
            with self._lock:
                self._shows.pop(key, None)

        return cancel

    def close(self) -> None:
        """Answer no more."""
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
                            continue  # another group of the same tree has told it
                        told.add(event.root.path)
                    elif isinstance(event, GroupGlance):
                        groups += event.first == 0
                    self._emit(event)
            except Exception:  # noqa: BLE001  # whoever looks sees less; nobody else is concerned
                failed = HubCallbackFailed(
                    callback=repr(show), trace=traceback.format_exc(), at=time.monotonic()
                )
                self._emit(failed)
        self._emit(GlanceEnded(groups=groups, at=time.monotonic()))
