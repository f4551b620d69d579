"""What the other ranks are asked when one has ended: how far they are, and to begin nothing more.

Guarantees: once it is over, the page of every rank that has answered says which call it has really
begun, and a collective call that no rank had begun when it was asked is begun by none, or by one
that says so. Whoever does not answer in time is taken at what its page says: all it was handed.

It is what `progress_page.withdraw` does for local workers, with messages in place of fences: first
the highest call that any has begun is found, then all are kept from going further.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .link import Say

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .remote_rank import Berth

PATIENCE = 0.5
"""Seconds for the answers; the driver waits a little longer for all of it."""


class Recall:
    """One round of questions. Used by one thread.

    Attributes:
        number: Its own, above those of earlier rounds.
        ended: Who has ended.
        until: When it is over, answered or not.

    Args:
        berths: All of the group, the ended ones included.
    """

    def __init__(self, number: int, ended: Berth, berths: Iterable[Berth], now: float) -> None:
        self.number = number
        self.until = now + PATIENCE
        self.ended = ended
        self._reached = 0
        self._all = [berth for berth in berths if berth.seated]
        self._told: dict[Berth, int] = {}
        # Who has been handed a collective call and not ended it, and which.
        self._asked = {
            berth: berth.running
            for berth in self._all
            if berth.running and berth.recallable and not berth.ended
        }
        self._doubtful: set[Berth] | None = None  # those that are kept from going further
        self._open = set(self._asked)
        for berth in self._asked:
            berth.line.say(Say.ASK, number, now=now)

    def told(self, berth: Berth, number: int, begun: int) -> None:
        """Note that *berth* has begun *begun*, and if it was recalled nothing after it."""
        if number != self.number or berth not in self._open:
            return
        self._open.discard(berth)
        if self._doubtful is None:
            self._told[berth] = begun
        elif berth in self._doubtful and berth.running == self._asked[berth]:
            berth.retract(begun)

    def lost(self, berth: Berth) -> None:
        """Expect no answer of *berth*."""
        self._open.discard(berth)
        self._told.pop(berth, None)
        if berth in self._all:
            self._all.remove(berth)

    def is_over(self, now: float) -> bool:
        """Whether everything is known that will be; asks what is next to be asked."""
        if now >= self.until:
            return True
        if not self._open and self._doubtful is None:
            self._doubtful = self._in_doubt()
            self._open = set(self._doubtful)
            for berth in self._doubtful:
                berth.line.say(Say.RECALL, self.number, self._reached, now=now)
        return not self._open

    def _in_doubt(self) -> set[Berth]:
        """Return who has been handed a call that nobody has begun."""
        still = {b: n for b, n in self._told.items() if b.running == self._asked[b]}
        pages = (still.get(berth, berth.page.begun) for berth in self._all)
        self._reached = reached = max(pages, default=0)
        # Once the driver has judged the death, what it sends is none of this: nobody would send
        # it again if it were voided here.
        if self.ended.page.is_shut:
            return set()
        return {berth for berth in still if reached < berth.running}
