"""`Suspects`: requests that may be what kills the workers of one engine.

Guarantees: a request that was running at *limit* losses in a row is a suspect; no suspect is begun
beside another; one at whose trial the workers are lost again ends, with what belongs to it, and
only that one. A row of losses ends when the request has been computed for some steps beyond the
place where the last one was. Pure.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

_CLEARED_AFTER = 8  # steps; one that kills at a certain place does so in the first of them
_CHILD = re.compile(r"\d+_(.+)")  # vLLM's name for one of the n answers of a request


class Suspects:
    """The losses of the requests of one engine.

    Args:
        limit: Losses in a row that make a suspect; 0 for no suspects.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._losses: dict[str, int] = {}
        self._places: dict[str, int] = {}  # tokens that were computed, or were to be, at the last
        self._steps: dict[str, int] = {}  # beyond those
        self._row = 0  # losses that no request has ended for, and none has outlived

    @property
    def any(self) -> bool:
        """Whether there is a request to watch."""
        return bool(self._losses)

    def lose(self, running: Mapping[str, int]) -> list[str]:
        """Note that the workers were lost while *running* ran; return the requests that end.

        Args:
            running: By name, how many of its tokens had been computed or were to be.
        """
        before = self._losses
        if not self.limit:
            return []
        self._losses = {each: before.get(each, 0) + 1 for each in running}
        self._places |= running
        self._row += 1
        self._steps.clear()
        ending = [each for each, count in self._losses.items() if count > self.limit]
        self._losses |= {each: n for each, n in before.items() if each not in self._losses}
        for each in ending:
            del self._losses[each]
        return ending

    def computed(self, requests: Iterable[str], place: Callable[[str], int]) -> None:
        """Note that a step of *requests* has come to its end.

        Args:
            place: Returns how many tokens of a request have been computed.
        """
        for each in requests:
            if each in self._losses and place(each) >= self._places[each]:
                self._steps[each] = steps = self._steps.get(each, 0) + 1
                if steps >= _CLEARED_AFTER:
                    del self._losses[each], self._steps[each], self._places[each]
                    self._row *= self.any

    def take_row(self) -> int:
        """Return how many losses the requests that now end have made; each counts once."""
        row, self._row = self._row, 0
        return min(row, self.limit + 1)

    def suspects(self) -> frozenset[str]:
        """Return the requests that are tried one at a time."""
        return frozenset(each for each, count in self._losses.items() if count >= self.limit)

    def may_run(self, running: Collection[str], known: Collection[str]) -> int | None:
        """Return how many may run beside each other; None for any number.

        While a suspect is among the requests that are *known*, one more than those *running* that
        are none.
        """
        if not self._losses:
            return None
        self._losses = {each: count for each, count in self._losses.items() if each in known}
        self._places = {each: place for each, place in self._places.items() if each in known}
        suspects = self.suspects()
        return sum(each not in suspects for each in running) + 1 if suspects else None


def with_siblings(ending: Iterable[str], known: Iterable[str]) -> set[str]:
    """Return *ending*, and those of *known* that are answers to the same requests (``n``)."""
    ended = set(ending)
    of = {name: child[1] for name in known if (child := _CHILD.fullmatch(name))}
    requests = {of[name] for name in ended if name in of}
    return ended | {name for name, request in of.items() if request in requests}
