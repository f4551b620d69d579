"""What the other ranks are asked when one has ended: how far they are, and to begin nothing more.

Guarantees: once it is over, the page of every rank that has answered says which call it has really
begun, and a collective call that no rank had begun when it was asked is begun by none, or by one
that says so. Whoever does not answer in time is taken at what its page says: all it was handed.

It is what `board.withdraw` does for workers next door, with messages in place of fences: first
the highest call that any has begun is found, then all are kept from going further.

Left to others: holding back what has not been handed over (`gateway_main`), and what becomes of
the calls (the driver).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .line import Say

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .berth import Berth

PATIENCE = 0.5
"""Seconds for the answers; the driver waits a little longer for all of it."""


class Recall:
    """One round of questions. Used by one thread.

    Args:
        number: Its own, above those of earlier rounds.
        berths: All of the group, the ended ones included.
    """

    def __init__(self, number: int, berths: Iterable[Berth], now: float) -> None:
        self.number = number
        self.until = now + PATIENCE
        self._all = [berth for berth in berths if berth.seated]
        self._told: dict[Berth, int] = {}
        self._asked = {
            berth for berth in self._all if berth.running and berth.recallable and not berth.ended
        }
        self._doubtful: set[Berth] | None = None  # those that are kept from going further
        for berth in self._asked:
            berth.line.say(Say.ASK, number, now=now)

    def told(self, berth: Berth, number: int, begun: int) -> None:
        """Note that *berth* has begun *begun* and nothing after it."""
        if number != self.number:
            return
        if berth in self._asked:
            self._asked.discard(berth)
            self._told[berth] = begun
        elif self._doubtful is not None and berth in self._doubtful:
            self._doubtful.discard(berth)
            berth.retract(begun)

    def lost(self, berth: Berth) -> None:
        """Expect no answer of *berth*."""
        self._asked.discard(berth)
        self._told.pop(berth, None)
        if self._doubtful is not None:
            self._doubtful.discard(berth)

    def is_over(self, now: float) -> bool:
        """Whether everything is known that will be; asks what is next to be asked."""
        if now >= self.until:
            return True
        if self._asked:
            return False
        if self._doubtful is None:
            reached = max(
                (self._told.get(berth, berth.board.begun) for berth in self._all), default=0
            )
            self._doubtful = {
                berth
                for berth, begun in self._told.items()
                if begun < berth.running and reached < berth.running
            }
            for berth in self._doubtful:
                berth.line.say(Say.RECALL, self.number, reached, now=now)
        return not self._doubtful
