"""How many calls there were, and of how many the state is kept.

Guarantees: a value for each key, which is a rank, or the group where all ranks make one cut. It
decides; it does nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


@dataclass(slots=True)
class Count:
    """The calls of one key: those *sent*, those up to the last cut *begun*, those *saved*."""

    sent: int = 0
    begun: int = 0
    saved: int = 0


@dataclass(slots=True)
class Counts:
    """The calls of an executor, by key."""

    _by_key: dict[int, Count] = field(default_factory=dict[int, Count])

    def add(self, keys: Iterable[int], every: int | None) -> list[int]:
        """Count a call; return the keys for which a cut is due with it, one to *every* calls."""
        due: list[int] = []
        for key in keys:
            count = self._by_key.setdefault(key, Count())
            count.sent += 1
            if every is not None and count.sent - count.begun >= every:
                due.append(key)
        return due

    def begin(self, keys: Iterable[int]) -> dict[int, int]:
        """Note that a cut of *keys* begins; return how many calls it has in it."""
        covers: dict[int, int] = {}
        for key in keys:
            count = self._by_key.setdefault(key, Count())
            covers[key] = count.begun = count.sent
        return covers

    def save(self, covers: Mapping[int, int]) -> None:
        """Note that a cut with so many calls in it is kept."""
        for key, calls in covers.items():
            count = self._by_key.setdefault(key, Count())
            count.saved = max(count.saved, calls)

    def void(self, keys: Iterable[int]) -> None:
        """Note that cuts of *keys* that had begun will not be kept: the next call is due again."""
        for key in keys:
            count = self._by_key.get(key)
            if count is not None:
                count.begun = count.saved

    def forget(self, keys: Iterable[int]) -> None:
        """Note that *keys* go on from what is kept, without the calls since."""
        for key in keys:
            self._by_key.pop(key, None)

    def clear(self) -> None:
        """Begin anew."""
        self._by_key.clear()

    @property
    def is_begun(self) -> bool:
        """Whether a cut has begun behind every call."""
        return all(count.begun >= count.sent for count in self._by_key.values())

    @property
    def is_saved(self) -> bool:
        """Whether every call is in a cut that is kept."""
        return all(count.saved >= count.sent for count in self._by_key.values())
