"""What of the workers' memory sleeps, and how a new worker comes to sleep as they did.

Guarantees: what was awake in the worker that died is awake in the new one, and holds what that has
loaded; the calls are as many as the state needs, however often the engine has slept before.

Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .entry import Entry

if TYPE_CHECKING:
    from collections.abc import Iterable

_ALL = frozenset(("weights", "kv_cache"))
"""What falls asleep together, by the names under which each can be woken."""


class Sleep:
    """The sleep of the workers of one engine."""

    def __init__(self) -> None:
        self._call: Entry | None = None
        self._asleep: frozenset[str] = frozenset()
        self._discarded: frozenset[str] = frozenset()

    def begin(self, call: Entry) -> None:
        """Note *call*, by which everything fell asleep."""
        self._call, self._asleep = call, _ALL

    def discard(self, tags: Iterable[str]) -> None:
        """Note that the memory named *tags* was given away."""
        self._discarded |= frozenset(tags)

    def wake(self, tags: Iterable[str] | None) -> None:
        """Note that what *tags* name is awake again; None names all."""
        woken = self._asleep | self._discarded if tags is None else frozenset(tags)
        self._asleep -= woken
        self._discarded -= woken

    def entries(self) -> list[Entry]:
        """Return the calls that have a new worker sleep so."""
        calls: list[Entry] = []
        if self._asleep == _ALL and self._call is not None:
            calls.append(self._call)
        elif self._asleep:
            # Whatever is awake has been filled again since the old worker slept. A new one has it
            # from its start, and would lose it in a deep sleep (level 2).
            calls.append(Entry("sleep", kwargs={"level": 1}))
            calls.append(Entry("wake_up", kwargs={"tags": sorted(_ALL - self._asleep)}))
        if self._discarded - self._asleep:
            calls.append(Entry("discard", (tuple(sorted(self._discarded - self._asleep)),)))
        return calls
