"""What a run came to: numbers, a table of them, a verdict.

Guarantees: the verdict is `ok` only if every passage was embedded, every call was answered exactly
once, and every embedding is the single process's.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

TOLERANCE = 1e-4
"""How far an embedding may be from the single process's, in any of its numbers (all below 1).
Shards add up float32 in another order, which costs some 1e-7 each time."""


@dataclass(frozen=True, slots=True)
class Found:
    """A passage near the query."""

    score: float
    name: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """What one way of recovering came to.

    Attributes:
        meaning: What it does, in a few words.
        recoveries: Seconds from each kill until the group was whole again.
        loads: How many ranks have loaded their weights again after the start.
        untold: How many survivors of a kill had to be replaced as well: gloo never told them of it.
    """

    name: str
    meaning: str
    kills: int
    recoveries: list[float]
    loads: int
    untold: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of one run.

    Attributes:
        seconds: From the first call made to the last answer.
        kills_asked: What the command line asked for; fewer are sent if the work runs out.
        hits: Kills whose crash report names a call that was running.
        restarts: Deaths that led to a restart, by the executor's count.
        recoveries: Seconds from each kill until the group was whole again.
        lost: Calls without an answer.
        twice: Answers beyond the first of a call.
        difference: The largest, over all passages, to the single-process reference.
        errors: What calls failed with.
        ways: What each way of recovering came to, where there is more than one.
    """

    pipeline: str
    ranks: int
    passages: int
    seconds: float
    calls: int
    kills_asked: int
    kills: int
    hits: int
    restarts: int
    recoveries: list[float]
    lost: int
    twice: int
    difference: float
    query: str
    nearest: list[Found]
    errors: list[str] = field(default_factory=list[str])
    ways: list[Way] = field(default_factory=list[Way])

    @property
    def rate(self) -> float:
        """Passages per second."""
        return self.passages / self.seconds

    @property
    def ok(self) -> bool:
        """Whether nothing was lost, doubled or wrong."""
        return not (self.lost or self.twice or self.errors) and self.difference <= TOLERANCE

    def rows(self) -> list[tuple[str, str]]:
        """Return the closing table."""
        times = [("recovery time per kill", _times(self.recoveries))]
        loads: list[tuple[str, str]] = []
        if self.ways:
            times = [
                (f"recovery time per kill, {w.meaning}", _times(w.recoveries)) for w in self.ways
            ]
            loads = [(f"weights loaded again, {w.meaning}", _loads(w)) for w in self.ways]
        asked = "" if self.kills == self.kills_asked else f" of {self.kills_asked} asked for"
        return [
            ("passages", f"{self.passages}"),
            ("passages/s", f"{self.rate:.0f}"),
            ("kills", f"{self.kills}{asked}"),
            ("kills that hit a running call", f"{self.hits}"),
            ("restarts", f"{self.restarts}"),
            *times,
            *loads,
            ("calls made", f"{self.calls}"),
            ("calls lost", f"{self.lost}"),
            ("calls answered twice", f"{self.twice}"),
            ("largest difference from one process", f"{self.difference:.1e}"),
        ]

    def render(self) -> str:
        """Return the table, the errors if any, and the passages nearest to the query."""
        rows = self.rows()
        width = max(len(name) for name, _ in rows)
        title = f"{self.pipeline}, {self.ranks} ranks"
        lines = [title, "-" * len(title)]
        lines += [f"{name:<{width}}  {value}" for name, value in rows]
        lines += [f"error: {text}" for text in self.errors]
        lines += ["", f'nearest to "{self.query}":']
        for found in self.nearest:
            lines.append(f"  {found.score:.3f}  {found.name}")
            lines.append(f"         {_short(found.text)}")
        return "\n".join([*lines, "", "ok" if self.ok else "WRONG"])

    def to_json(self) -> str:
        """Return everything as one JSON object."""
        return json.dumps({**asdict(self), "rate": self.rate, "ok": self.ok})


def _times(recoveries: list[float]) -> str:
    return ", ".join(f"{seconds:.2f} s" for seconds in recoveries) or "-"


def _loads(way: Way) -> str:
    untold = f", {way.untold} of them not told by gloo" if way.untold else ""
    return f"by {way.loads} ranks after {way.kills} kills{untold}"


def _short(text: str, limit: int = 88) -> str:
    return text if len(text) <= limit else f"{text[: limit - 3].rstrip()}..."
