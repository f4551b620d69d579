"""Something to wait for that happens once, told of under locks.

Guarantees: `set` never waits, also where a signal handler or finalizer that has interrupted `wait`
comes to it on the same thread. `threading.Event` would wait for itself there: its own lock is held
for a moment by who waits.
"""

from __future__ import annotations

import threading
import time


class Latch:
    """One thread waits for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        """Let who waits go on; to be called once."""
        self._lock.release()

    def wait(self, deadline: float | None) -> bool:
        """Return True once it has happened, False at *deadline* (monotonic); None for none."""
        if deadline is None:
            return self._lock.acquire()
        left = max(0.0, deadline - time.monotonic())
        return self._lock.acquire(timeout=min(left, threading.TIMEOUT_MAX))
