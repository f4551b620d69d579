"""When a group's arena gives back the memory that lies idle.

Guarantees: memory that nobody has any more is given back within `ARENA_LONGEST` seconds, and
`ARENA_IDLE` after the last message where no reader kept any. At rest no timer runs, unless a reader
keeps something, which a rank that is stopped does; then looks become rare.

Left to others: the memory itself (`runtime.arena`).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from phalanx.runtime import ARENA_IDLE, ARENA_LONGEST

if TYPE_CHECKING:
    from phalanx.runtime import Arena, Hub, OwnedLock, Timer


class Trimming:
    """Trims one arena once nothing has been placed in it for a while. Under the plane's lock."""

    def __init__(self, hub: Hub, lock: OwnedLock, arena: Arena) -> None:
        self._hub = hub
        self._lock = lock
        self._arena = arena
        self._timer: Timer | None = None

    def later(self, wait: float = ARENA_IDLE) -> None:
        """See to it that the arena, which is in use, is trimmed when it no longer is."""
        arena = self._arena
        if self._timer is not None or arena.fd < 0:
            return
        placed = arena.placed

        def look() -> None:
            idle = arena.placed == placed
            if idle:
                # Not under the plane's lock: who is inside the arena may have to call the plane.
                arena.trim()
            with self._lock.asked():
                self._timer = None
                if arena.is_warm:
                    # Idle and yet warm: a reader keeps something. Then look less often.
                    self.later(min(2 * wait, ARENA_LONGEST) if idle else ARENA_IDLE)

        self._timer = self._hub.call_at(time.monotonic() + wait, look)

    def close(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()
