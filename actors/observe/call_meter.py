"""`CallMeter`: how many calls of a group have ended with which outcome, and how long they took.

A group has one from the moment at which an observer first asks for its status; before that a call
pays a test for None. Written under the plane's lock; read without it, so that the outcomes may be
one call behind the seconds.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Any

from phalanx.actors.calls.call import Shape
from phalanx.runtime import CALL_SECONDS

from .tracing import kind_of, outcome_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx.actors.calls.call import Call


class CallMeter:
    """Counts calls as they end; *clock* is the plane's."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ok = 0
        self._others: dict[str, int] = {}
        self._buckets = [0] * (len(CALL_SECONDS) + 1)
        self._sum = 0.0

    def begun(self, call: Call) -> None:
        """Note that *call* is being made."""
        call.made_at = self._clock()

    def settled(self, call: Call, cause: BaseException | None = None) -> None:
        """Count *call*, which has its outcome, or ends by *cause*, unless that has been done."""
        if not call.made_at:
            return
        seconds = self._clock() - call.made_at
        call.made_at = 0.0
        self._sum += seconds
        self._buckets[bisect_left(CALL_SECONDS, seconds)] += 1
        if cause is not None:
            outcome = kind_of(cause)
        elif call.error is None and call.failed is None and call.shape is not _GATHER:
            self._ok += 1
            return
        else:
            outcome = outcome_of(call)[0]
        self._others[outcome] = self._others.get(outcome, 0) + 1

    def counts(self) -> dict[str, Any]:
        """Return the counts, as fields of `GroupStatus`."""
        others = dict(self._others)
        return {
            "calls": others | {"ok": self._ok + others.get("ok", 0)},
            "call_seconds": tuple(self._buckets),
            "call_seconds_sum": self._sum,
        }


_GATHER = Shape.GATHER  # looking an enum member up takes as long as a call
