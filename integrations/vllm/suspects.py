"""`Suspects`: requests that may be what kills the workers of one engine.

Guarantees: no suspect is begun beside another; one at whose trial the workers are lost again ends,
with what belongs to it, and only that one. A row of losses ends when the request has been computed
for some steps beyond the place where the last one was. Pure.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

_CLEARED_AFTER = 8  # steps; one that kills at a certain place does so in the first of them
_CHILD = re.compile(r"\d+_(.+)")  # vLLM's name for one of the n answers of a request


@dataclass(slots=True)
class _Watched:
    """One request that was running at a loss."""

    losses: int = 0
    place: int = 0  # tokens that were computed, or were to be, at the last loss
    steps: int = 0  # beyond those


class Suspects:
    """The losses of the requests of one engine.

    Args:
        limit: Losses in a row that make a suspect; 0 for no suspects.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._watched: dict[str, _Watched] = {}
        self._row = 0  # losses that no request has ended for, and none has outlived

    @property
    def is_watching(self) -> bool:
        """Whether there is a request whose steps are to be reported."""
        return bool(self._watched)

    def lose(self, running: Mapping[str, int]) -> list[str]:
        """Note that the workers were lost while *running* ran; return the requests that end.

        Args:
            running: By name, how many of its tokens had been computed or were to be.
        """
        if not self.limit:
            return []
        self._row += 1
        for watched in self._watched.values():
            watched.steps = 0
        ending: list[str] = []
        for name, place in running.items():
            watched = self._watched.setdefault(name, _Watched())
            watched.losses, watched.place = watched.losses + 1, place
            if watched.losses > self.limit:
                del self._watched[name]
                ending.append(name)
        return ending

    def computed(self, requests: Iterable[str], place: Callable[[str], int]) -> None:
        """Note that a step of *requests* has come to its end.

        Args:
            place: Returns how many tokens of a request have been computed.
        """
        for name in requests:
            watched = self._watched.get(name)
            if watched is None or place(name) < watched.place:
                continue
            watched.steps += 1
            if watched.steps >= _CLEARED_AFTER:
                del self._watched[name]
                if not self._watched:
                    self._row = 0

    def take_row(self) -> int:
        """Return how many losses the requests that now end have made; each counts once."""
        row, self._row = self._row, 0
        return min(row, self.limit + 1)

    def suspects(self) -> frozenset[str]:
        """Return the requests that are tried one at a time."""
        return frozenset(n for n, each in self._watched.items() if each.losses >= self.limit)

    def may_run(self, running: Collection[str], known: Collection[str]) -> int | None:
        """Return how many may run beside each other; None for any number.

        While a suspect is among the requests that are *known*, one more than those *running* that
        are none.
        """
        for name in [each for each in self._watched if each not in known]:
            del self._watched[name]
        suspects = self.suspects()
        return sum(each not in suspects for each in running) + 1 if suspects else None


def with_siblings(ending: Iterable[str], known: Iterable[str]) -> set[str]:
    """Return *ending*, and those of *known* that are answers to the same requests (``n``)."""
    ended = set(ending)
    of = {name: child[1] for name in known if (child := _CHILD.fullmatch(name))}
    requests = {of[name] for name in ended if name in of}
    return ended | {name for name, request in of.items() if request in requests}
