"""`Suspects`: requests that may be what kills the workers of one engine.

Guarantees: a request that was running at *limit* losses in a row is a suspect; no suspect is begun
beside another; one at whose trial the workers are lost again ends, and only that one. A row of
losses ends when the request has been computed for some steps. Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

_CLEARED_AFTER = 8  # steps; one that kills at a certain place does so in the first of them


class Suspects:
    """The losses of the requests of one engine.

    Args:
        limit: Losses in a row that make a suspect; 0 for no suspects.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._losses: dict[str, int] = {}
        self._steps: dict[str, int] = {}  # since the last of them

    def lose(self, running: Iterable[str]) -> list[str]:
        """Note that the workers were lost while *running* ran; return the requests that end."""
        before = self._losses
        if not self._limit:
            return []
        self._losses = {each: before.get(each, 0) + 1 for each in running}
        self._steps.clear()
        ending = [each for each, count in self._losses.items() if count > self._limit]
        self._losses |= {each: n for each, n in before.items() if each not in self._losses}
        for each in ending:
            del self._losses[each]
        return ending

    def computed(self, requests: Iterable[str]) -> None:
        """Note that a step of *requests* has come to its end."""
        if not self._losses:
            return
        for each in requests:
            if each in self._losses:
                self._steps[each] = steps = self._steps.get(each, 0) + 1
                if steps >= _CLEARED_AFTER:
                    del self._losses[each], self._steps[each]

    def suspects(self) -> frozenset[str]:
        """Return the requests that are tried one at a time."""
        return frozenset(each for each, count in self._losses.items() if count >= self._limit)

    def may_run(self, running: Collection[str], known: Collection[str]) -> int | None:
        """Return how many may run beside each other; None for any number.

        While a suspect is among the requests that are *known*, one more than those *running* that
        are none.
        """
        if not self._losses:
            return None
        self._losses = {each: count for each, count in self._losses.items() if each in known}
        suspects = self.suspects()
        return sum(each not in suspects for each in running) + 1 if suspects else None
