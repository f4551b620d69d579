"""When an arena's memory is given back to the kernel by a process that looks now and then.

Guarantees: memory of an arena that nothing has been placed in for a while is given back; while
readers keep some of it, looks become rarer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.runtime.memory.arena import ARENA_IDLE, ARENA_LONGEST

if TYPE_CHECKING:
    from phalanx.runtime.memory.arena import Arena


class Idling:
    """One arena under watch."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._placed = 0
        self._since = 0.0
        self._wait = ARENA_IDLE

    def look(self, now: float) -> None:
        """Give memory back if it has been idle for long enough at *now*."""
        arena = self._arena
        if arena.placed != self._placed:
            self._placed = arena.placed
            self._since = now
            self._wait = ARENA_IDLE
        elif arena.is_warm and now - self._since >= self._wait:
            arena.trim()
            self._since = now
            self._wait = min(2 * self._wait, ARENA_LONGEST)
