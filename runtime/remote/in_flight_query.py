"""In-flight query: after a rank has ended, reads what others have begun, and cancels later calls.

Guarantees: once it is over, the page of every rank that has answered holds the call it has really
begun, and a collective call that no rank had begun when queried is begun by none, or by one
that reports it. A rank that does not answer in time counts as having begun all it was handed.

It does for remote workers what `progress_page.withdraw` does for local ones, with messages in place
of fences: it finds the highest call that any has begun, then keeps all from beginning later ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .link import Say

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .remote_rank import RemoteRank

QUERY_TIMEOUT = 0.5
"""Seconds for the answers; the driver waits a little longer for all of it."""


class InFlightQuery:
    """One round of requests. Used by one thread.

    Attributes:
        number: Its own, above those of earlier rounds.
        ended: The rank that has ended.
        until: When it is over, answered or not.

    Args:
        ranks: All of the group, the ended ones included.
    """

    def __init__(
        self, number: int, ended: RemoteRank, ranks: Iterable[RemoteRank], now: float
    ) -> None:
        self.number = number
        self.until = now + QUERY_TIMEOUT
        self.ended = ended
        self._reached = 0
        self._all = [rank for rank in ranks if rank.greeted]
        self._begun: dict[RemoteRank, int] = {}
        # The ranks that were handed a collective call and have not ended it, and that call.
        self._asked = {
            rank: rank.running
            for rank in self._all
            if rank.running and rank.recallable and not rank.ended
        }
        self._recalled: set[RemoteRank] | None = None  # those that are kept from going further
        self._open = set(self._asked)
        for rank in self._asked:
            rank.line.say(Say.ASK, number, now=now)

    def answered(self, rank: RemoteRank, number: int, begun: int) -> None:
        """Note that *rank* has begun *begun*, and if it was recalled nothing after it."""
        if number != self.number or rank not in self._open:
            return
        self._open.discard(rank)
        if self._recalled is None:
            self._begun[rank] = begun
        elif rank in self._recalled and rank.running == self._asked[rank]:
            rank.retract(begun)

    def lost(self, rank: RemoteRank) -> None:
        """Expect no answer of *rank*."""
        self._open.discard(rank)
        self._begun.pop(rank, None)
        if rank in self._all:
            self._all.remove(rank)

    def is_over(self, now: float) -> bool:
        """Whether all answers are in; sends the next requests."""
        if now >= self.until:
            return True
        if not self._open and self._recalled is None:
            self._recalled = self._with_unbegun_call()
            self._open = set(self._recalled)
            for rank in self._recalled:
                rank.line.say(Say.RECALL, self.number, self._reached, now=now)
        return not self._open

    def _with_unbegun_call(self) -> set[RemoteRank]:
        """Return the ranks that have been handed a call that no rank has begun."""
        still = {b: n for b, n in self._begun.items() if b.running == self._asked[b]}
        pages = (still.get(rank, rank.page.begun) for rank in self._all)
        self._reached = reached = max(pages, default=0)
        # Calls that the driver sends after it has handled the death are not part of this: if one
        # were voided here, it would not be sent again.
        if self.ended.page.is_shut:
            return set()
        return {rank for rank in still if reached < rank.running}
