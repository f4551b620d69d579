"""When to look whether a rank hangs, and what of the looks counts.

Guarantees: while ranks owe answers somebody looks often enough; at rest no timer runs. A rank is
judged by how long it has been running its call, as its own page tells, never by how long a call
has waited; without a limit only a rank that is stopped (and not traced) is. When this process
itself was paused (Ctrl-Z, a suspended machine), what the ranks wrote meanwhile is read first, and
every limit begins anew: it was we who kept them waiting.

Left to others: stacks and killing (`stopping`), what is found before (`suspicion`).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from .notices import Look

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from phalanx.runtime import Hub, Timer

    from .seat import Running

_PAUSE = 1.0  # seconds that a look may come late before it counts as a pause of this process
_LOOKS = 4  # how often a rank is looked at in the time it may be stopped


class HangWatch:
    """The looks of one executor.

    Args:
        stopped_after: Seconds a rank may be stopped; None for ever.
    """

    def __init__(self, hub: Hub, stopped_after: float | None, tell: Callable[[Look], None]) -> None:
        self._hub = hub
        self._stopped_after = stopped_after
        self._tell = tell
        self._timer: Timer | None = None
        self._anew = 0.0  # when all limits began anew
        self._stopped: dict[tuple[int, int], float] = {}  # since when, as far as was seen

    def wake(self, limit: float | None) -> None:
        """Look in time: ranks owe answers, perhaps one that they have *limit* seconds for."""
        waits = [limit] if limit is not None else []
        if self._stopped_after is not None:
            waits.append(self._stopped_after / _LOOKS)
        if waits:
            self._look_at(time.monotonic() + min(waits))

    def judge(
        self,
        look: Look,
        running: Iterable[Running],
        is_stopped: Callable[[Running], bool],
        now: float,
    ) -> list[tuple[Running, str]]:
        """Return who hangs, and how; sees to the next look."""
        if now - look.due > _PAUSE:
            self._anew = now
            self._stopped.clear()
        hung: list[tuple[Running, str]] = []
        stopped: dict[tuple[int, int], float] = {}
        waits: list[float] = []
        limit = self._stopped_after
        for rank in running:
            if limit is not None:
                waits.append(now + limit / _LOOKS)
            if limit is not None and is_stopped(rank):
                key = rank.rank, rank.incarnation
                since = stopped[key] = self._stopped.get(key, now)
                if now - since >= limit:
                    hung.append((rank, f"stopped for {now - since:.1f} s"))
                    continue
                waits.append(since + limit)
            if rank.shortest is not None:
                waits.append(now + rank.shortest)
            if rank.limit is not None:
                began = max(rank.began, self._anew, now if rank.spoke else 0.0)
                if now - began >= rank.limit:
                    text = f"{rank.method} ran for {now - rank.began:.1f} s"
                    hung.append((rank, f"{text}, hang_after={rank.limit:g} s"))
                    continue
                waits.append(began + rank.limit)
        self._stopped = stopped
        if waits:
            self._look_at(min(waits))
        return hung

    def close(self) -> None:
        """Look no more."""
        if (timer := self._timer) is not None:
            timer.cancel()

    def _look_at(self, at: float) -> None:
        # No lock, for this is called under the plane's: a race causes a look too many at worst.
        if (timer := self._timer) is not None and timer.is_pending:
            if timer.at <= at:
                return
            timer.cancel()
        self._timer = self._hub.call_at(at, lambda: self._tell(Look(at)))
