"""When idle memory goes back to the machine."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, cast

from phalanx.actors.calls.plane import Trimming
from phalanx.runtime import ARENA_IDLE, Arena, Hub, OwnedLock

if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx.runtime import Timer


class Alarm:
    """A hub whose timers go off when the test says so."""

    def __init__(self) -> None:
        self.at = 0.0
        self.callback: Callable[[], None] | None = None

    def call_at(self, at: float, callback: Callable[[], None]) -> Timer:
        self.at, self.callback = at - time.monotonic(), callback
        return cast("Timer", self)

    def go_off(self) -> float:
        """Go off; return for how long it was set."""
        wait, callback, self.callback = self.at, self.callback, None
        assert callback is not None
        callback()
        return wait


class Keeper:
    """A reader that keeps what it is lent."""

    keeps = True

    def holds(self, _slot: int) -> bool:
        return self.keeps


def test_what_a_reader_let_go_of_is_given_back_within_ten_seconds() -> None:
    arena = Arena.create(1 << 20)
    alarm = Alarm()
    reader: Any = Keeper()
    trimming = Trimming(cast("Hub", alarm), OwnedLock(), arena)
    extent = arena.place(4096)
    assert extent is not None
    extent.borrowers.append(reader)
    extent.let_go()

    trimming.later()
    waits = [alarm.go_off() for _ in range(12)]  # it is kept for long
    reader.keeps = False
    last = alarm.go_off()

    assert waits[0] <= ARENA_IDLE
    assert max(*waits, last) <= 10.0
    assert alarm.callback is None
    assert not arena.is_warm
    assert arena.backed_bytes == 0
    arena.close()
