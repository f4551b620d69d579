"""What has arrived of a stream and not been taken: between whoever reads and whoever takes.

Left to others: reading it (`arriving`), taking it (`taking`), iterating over it (`streams`).
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx.runtime import Frame, Timer

    from .reading import Ticket


class Incoming:
    """What has arrived of one stream and not been taken. Guarded by the plane's lock.

    Attributes:
        granted: How many items some rank may have made by now.
        take_within: Seconds that an item may wait for its taker; infinity for no limit.
        taken: How many items have been taken, by rank.
        since: When the last was taken, or the oldest of those that wait arrived.
        timer: Looks whether they wait for too long; None while none is known to wait.
    """

    __slots__ = (
        "granted",
        "items",
        "since",
        "take_within",
        "taken",
        "ticket",
        "timer",
        "wake",
        "window",
    )

    def __init__(self, window: int, take_within: float) -> None:
        self.window = self.granted = window
        self.take_within = take_within
        self.since = 0.0
        self.timer: Timer | None = None
        self.items: deque[tuple[int, Frame]] = deque()
        self.taken: dict[int, int] = {}
        self.ticket: Ticket | None = None
        self.wake: Callable[[], None] | None = None

    def grant(self, rank: int) -> int | None:
        """Count an item of *rank* as taken; return how many may be made in all, if that is news.

        Said once per half a window: once per item would double the packets.
        """
        taken = self.taken[rank] = self.taken.get(rank, 0) + 1
        if taken % max(1, self.window // 2):
            return None
        self.granted = max(self.granted, taken + self.window)
        return taken + self.window
