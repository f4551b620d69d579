"""The driver's side of the accounts: what was asked for, what came of it, and whether that adds up.

Exact, not statistical: every call has one entry and gets one outcome; every answer carries the
call's own token; every effect that any worker ever had is in the file of effects.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter, defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.booked import Answer

_EVERYWHERE = ("collective", "streams", "gather")


@dataclass(slots=True)
class Entry:
    """One call.

    Attributes:
        shape: ``collective`` (a scatter is one), ``gather``, ``single``, ``pool``, ``stream``,
            ``streams`` or ``tell``.
        retries: How often it may be sent again after it had begun; 0 for at most once.
        outcomes: How it ended; exactly one where all is right.
        answers: Those that came back.
        told: How often its future ran its done-callback, for calls that have one.
    """

    token: str
    shape: str
    retries: int
    outcomes: list[str] = field(default_factory=list[str])
    answers: list[Answer] = field(default_factory=list[Answer])
    told: int | None = None


@dataclass(frozen=True, slots=True)
class Effect:
    """One line of a worker: a call that it began or ended, or an order that it took."""

    kind: str
    what: str
    rank: int
    incarnation: int
    epoch: int


class Books:
    """All calls of one run."""

    def __init__(self, folder: Path, sizes: Collection[int]) -> None:
        self._folder = folder
        self._sizes = sizes  # that the group has had
        self._lock = threading.Lock()
        self._more = threading.Condition(self._lock)
        self._settled = 0
        self.entries: dict[str, Entry] = {}
        self.wrong: list[str] = []
        kinds = ("lost", "doubled", "swapped", "stale", "hung", "other")
        self.sums: dict[str, int] = dict.fromkeys(kinds, 0)

    def open(self, token: str, shape: str, retries: int = 0) -> Entry:
        entry = Entry(token, shape, retries)
        with self._lock:
            assert token not in self.entries
            self.entries[token] = entry
        return entry

    def settle(self, entry: Entry, outcome: str) -> None:
        with self._lock:
            entry.outcomes.append(outcome)
            self._settled += 1
            self._more.notify_all()

    def wait_for_more(self, calls: int, seconds: float) -> None:
        """Return once so many more calls have ended, or after *seconds*."""
        with self._lock:
            goal = self._settled + calls
            self._more.wait_for(lambda: self._settled >= goal, seconds)

    def complain(self, entry: Entry, what: str, kind: str = "other") -> None:
        with self._lock:
            self.sums[kind] += 1
            told = f"{entry.token} ({entry.shape}, retries={entry.retries}): {what}"
            self.wrong.append(f"{kind}: {told}")

    def effects(self) -> list[Effect]:
        found: list[Effect] = []
        for line in (self._folder / "effects").read_text().splitlines():
            kind, what, rank, incarnation, epoch, _pid = line.split()
            found.append(Effect(kind, what, int(rank), int(incarnation), int(epoch)))
        return found

    def audit(self) -> list[str]:
        """Return everything that does not add up."""
        by_token: dict[str, list[Effect]] = defaultdict(list)
        ended: dict[str, set[tuple[int, int, int]]] = defaultdict(set)
        effects = self.effects()
        for effect in effects:
            if effect.kind == "effect":
                by_token[effect.what].append(effect)
            elif effect.kind == "ended":
                ended[effect.what].add((effect.rank, effect.incarnation, effect.epoch))
        for token in by_token.keys() - self.entries.keys():
            self.complain(Entry(token, "none", 0), "done, and never asked for")
        for entry in self.entries.values():
            self._audit_one(entry, by_token[entry.token], ended[entry.token])
        self._audit_order(effects)
        return self.wrong

    def outcomes(self) -> Counter[str]:
        return Counter(
            f"{entry.shape}{'+' if entry.retries else ''}:{outcome}"
            for entry in self.entries.values()
            for outcome in entry.outcomes
        )

    def _audit_one(
        self, entry: Entry, effects: list[Effect], ended: set[tuple[int, int, int]]
    ) -> None:
        if len(entry.outcomes) != 1:
            what = f"has {len(entry.outcomes)} outcomes: {entry.outcomes}"
            self.complain(entry, what, "doubled" if entry.outcomes else "lost")
            return
        (outcome,) = entry.outcomes
        if entry.told not in (None, 1):
            what = f"its done-callback ran {entry.told} times"
            self.complain(entry, what, "doubled" if entry.told else "lost")
        begun = {(e.rank, e.incarnation, e.epoch) for e in effects}
        for token, *where in entry.answers:
            if token != entry.token:
                self.complain(entry, f"was answered with {token}'s answer", "swapped")
            elif tuple(where) not in begun:
                self.complain(entry, f"an answer of {where}, which never began it", "stale")
            elif outcome == "ok" and tuple(where) not in ended:
                self.complain(entry, f"an answer of {where}, which never ended it", "lost")
        often = Counter(effect.rank for effect in effects)
        if entry.shape in ("single", "pool", "stream"):
            often = Counter({0: sum(often.values())})
        most = max(often.values(), default=0)
        if most > entry.retries + 1:
            self.complain(entry, f"was begun {most} times on one rank: {effects}", "doubled")
        whole = entry.shape in ("collective", "streams")
        if whole and not entry.retries and len({effect.epoch for effect in effects}) > 1:
            self.complain(entry, f"ran in two epochs: {effects}", "stale")
        if outcome == "ok":
            answered = [rank for _, rank, _, _ in entry.answers]
            in_full = len(answered) in self._sizes and answered == list(range(len(answered)))
            if entry.shape in ("collective", "gather") and not in_full:
                self.complain(entry, f"was answered by {answered}", "lost")
            if entry.shape in ("single", "pool") and len(answered) != 1:
                self.complain(entry, f"was answered by {answered}", "lost")
            if whole and len({epoch for *_, epoch in entry.answers}) > 1:
                what = f"was answered out of two epochs: {entry.answers}"
                self.complain(entry, what, "stale")

    def _audit_order(self, effects: list[Effect]) -> None:
        """All ranks see the collective calls of an epoch in one order.

        Told of those that are begun at most once: a call that is sent again has several places.
        """
        orders: dict[int, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
        for effect in effects:
            entry = self.entries.get(effect.what) if effect.kind == "effect" else None
            if entry is not None and entry.shape in _EVERYWHERE and not entry.retries:
                orders[effect.epoch][effect.rank].append(effect.what)
        for epoch, ranks in orders.items():
            several = list(ranks.items())
            for (one, here), (other, there) in itertools.pairwise(several):
                both = set(here) & set(there)
                pairs = zip(
                    (t for t in here if t in both), (t for t in there if t in both), strict=False
                )
                apart = next((pair for pair in pairs if pair[0] != pair[1]), None)
                if apart is not None:
                    told = f"epoch {epoch}: rank {one} ran it where rank {other} ran {apart[1]}"
                    self.complain(self.entries[apart[0]], told, "swapped")
