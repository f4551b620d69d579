"""One attack on an engine at work: what is done to which ranks, and when.

Guarantees: the moments come from a seed; a prefill is struck right after the requests were sent,
decoding after a number of tokens has arrived, a recovery once the first new rank has been born.
"""

from __future__ import annotations

import itertools
import signal
import threading
import time
from typing import TYPE_CHECKING

from .processes import find_ranks, strike, wait_new_ranks

if TYPE_CHECKING:
    import random

KINDS = ("decode", "prefill", "twice", "both", "recovery", "stop")
_RESTART_TIMEOUT = 60.0


class Attack:
    """What is done in one round of requests.

    Args:
        kind: One of `KINDS`, or ``"none"``.
        root: The process under which the ranks are.
        ranks: How many there are.
        tokens: How many tokens a round brings, about.

    Attributes:
        struck: When signals were sent, on the monotonic clock.
    """

    def __init__(
        self, kind: str, root: int, chance: random.Random, *, ranks: int = 2, tokens: int = 600
    ) -> None:
        self.kind = kind
        self.struck: list[float] = []
        self._arrivals: list[float] = []
        self._root = root
        self._chance = chance
        self._ranks = ranks
        self._lock = threading.Lock()
        self._arrived = 0
        self._thread: threading.Thread | None = None
        at = chance.uniform(0.15, 0.6)
        self._moments = {
            "none": [],
            "prefill": [0],
            "twice": [int(tokens * at), int(tokens * (at + 0.2))],
        }.get(kind, [int(tokens * at)])

    def begin(self) -> None:
        """Note that the requests have been sent."""
        if self._moments and self._moments[0] == 0:
            self._moments.pop(0)
            self._go(self._chance.uniform(0.0, 0.03))

    def arrived(self, count: int) -> None:
        """Note that *count* tokens have arrived, from whichever thread."""
        with self._lock:
            self._arrivals.append(time.monotonic())
            self._arrived += count
            due = bool(self._moments) and self._arrived >= self._moments[0]
            if due:
                self._moments.pop(0)
        if due:
            self._go(self._chance.uniform(0.0, 0.02))

    @property
    def waits(self) -> list[float]:
        """From each strike to the token that ended the longest silence after it, in seconds.

        What arrives before that had been made when the rank died.
        """
        with self._lock:
            bounds = [*self.struck, float("inf")]
            found: list[float] = []
            for at, until in itertools.pairwise(bounds):
                moments = [at, *(moment for moment in self._arrivals if at < moment <= until)]
                if len(moments) > 1:
                    _, end = max(itertools.pairwise(moments), key=lambda two: two[1] - two[0])
                    found.append(end - at)
            return found

    def end(self) -> None:
        """Wait until nothing more is done."""
        if self._thread is not None:
            self._thread.join()

    def _go(self, after: float) -> None:
        self.end()
        self._thread = threading.Thread(target=self._strike, args=(after,), daemon=True)
        self._thread.start()

    def _strike(self, after: float) -> None:
        time.sleep(after)
        one = (self._chance.randrange(self._ranks),)
        match self.kind:
            case "both":
                self._note(strike(self._root, tuple(range(self._ranks))))
            case "stop":
                self._note(strike(self._root, one, signal.SIGSTOP))
            case "recovery":
                old = find_ranks(self._root)
                self._note(strike(self._root, one))
                wait_new_ranks(self._root, old, time.monotonic() + _RESTART_TIMEOUT)
                time.sleep(self._chance.uniform(0.0, 1.0))
                strike(self._root, (self._chance.randrange(self._ranks),))
            case _:
                self._note(strike(self._root, one))

    def _note(self, at: float | None) -> None:
        with self._lock:
            self.struck += [] if at is None else [at]
