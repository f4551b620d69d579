"""The books of one run: which calls were made, which were answered, and how often.

Guarantees: what is *lost* or answered *twice* is counted from the tickets that workers hand back
with their answers, not from what the library promises: an answer that was matched to the wrong
call shows up as one call answered twice and another one lost.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter


class Ledger:
    """Counts calls by ticket. Safe to use from several threads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._made: set[int] = set()
        self._answers: Counter[int] = Counter()
        self._last = time.monotonic()
        self._pace = math.inf
        self._closed = False

    def made(self, ticket: int) -> None:
        """Note that a call was accepted."""
        with self._changed:
            self._made.add(ticket)

    def answered(self, ticket: int) -> None:
        """Note that an answer with *ticket* came in."""
        with self._changed:
            self._answers[ticket] += 1
            now = time.monotonic()
            self._pace, self._last = min(self._pace, now - self._last), now
            self._changed.notify_all()

    def close(self) -> None:
        """Let whoever waits for answers go: no more will come."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def wait_answered(self, count: int, timeout: float | None = None) -> bool:
        """Return once *count* calls are answered, or after *timeout* seconds; None has no end.

        False says that the books were closed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._answers) >= count, timeout)
            return not self._closed

    @property
    def calls(self) -> int:
        """Calls made."""
        with self._changed:
            return len(self._made)

    @property
    def in_flight(self) -> int:
        """Calls made and not answered."""
        with self._changed:
            return len(self._made - self._answers.keys())

    @property
    def twice(self) -> int:
        """Answers beyond the first of each call, and answers to calls that were never made."""
        with self._changed:
            extra = sum(self._answers.values()) - len(self._answers)
            return extra + len(self._answers.keys() - self._made)

    @property
    def pace(self) -> float:
        """Seconds that an answer takes at least, as far as is known; 0 before the first."""
        with self._changed:
            return self._pace if self._answers else 0.0
