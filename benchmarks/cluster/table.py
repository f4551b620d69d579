"""The rows of `cluster`: what each is to reach, held against what was found, as text and values.

A time meets its target if all of the interval of its median does, a count if every round does. What
was not measured, or not to its end, says why.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from benchmarks.harness.machine import sentence
from benchmarks.harness.stats import of, percentile
from benchmarks.harness.tables import seconds, table, time_with_interval
from benchmarks.harness.targets import Verdict, at_most

if TYPE_CHECKING:
    from collections.abc import Mapping

_MIB = 1 << 20
SIZES = {"empty": 0, "8 MiB": 8 * _MIB, "64 MiB": 64 * _MIB}


@dataclass(frozen=True, slots=True)
class Row:
    """One row.

    Attributes:
        key: Under which its figures are: the part of the run, a dot, and the rest.
        most: The target, in seconds, bytes or as a count; None sets none.
        kind: ``total`` is the sum of all rounds, ``each`` the count of one.
    """

    key: str
    what: str
    most: float | None = None
    kind: Literal["time", "bytes", "total", "each"] = "time"


ROWS = (
    Row("rank.known", "rank killed on a well node: the driver knows", 0.025),
    Row("rank.next", "- next call, no process group", 0.350),
    Row("node.known", "node process killed: the driver knows", 0.100),
    Row("node.gone", "- nothing is left on the node", 1.0),
    Row("node.next", "- ranks serve on a spare node", 2.0),
    Row("silence.failed", "machine silent, node_timeout=3: the call in flight has failed", 3.3),
    Row("silence.next", "- next call, with a spare node", 5.0),
    Row("silence.gone", "- nothing is left on the node", 4.0),
    Row("silence.overlap", "- ranks that were in two places at once", 0, "total"),
    Row("cuts.0.3", "cut of 0.3 node_timeout: ranks lost", 0, "total"),
    Row("cuts.0.9", "cut of 0.9 node_timeout: ranks lost", 0, "total"),
    Row("driver.gone", "driver's machine silent, node_timeout=3: last process gone", 4.0),
    Row("eight.restarts", "loss of a node with 8 ranks: restarts spent", 1, "each"),
    Row("eight.epochs", "- epochs", 1, "each"),
    Row("accounts.calls", "calls while nodes are killed and cut off", None, "total"),
    Row("accounts.nodes", "- nodes that were lost meanwhile", None, "total"),
    Row("accounts.lost", "- calls lost", 0, "total"),
    Row("accounts.doubled", "- doubled", 0, "total"),
    Row("accounts.stale", "- stale", 0, "total"),
    Row("accounts.other", "- otherwise wrong", 0, "total"),
    Row("calls.empty.1", "empty call to 1 rank of one far node", 0.00045),
    Row("calls.empty.4", "empty call to 4 ranks of one far node", 0.0006),
    Row("calls.8 MiB.4", "8 MiB to 4 ranks of one far node", 0.020),
    Row("calls.64 MiB.4", "64 MiB to 4 ranks of one far node", 0.130),
    Row("start.memory", "memory of ours on a node, beside its 4 ranks (PSS)", 85 * _MIB, "bytes"),
    Row("start.memory.torch", "- with torch warm", 175 * _MIB, "bytes"),
    Row("start.torch", "2 nodes x 4 ranks, Executor(...) to the first answer of torch", 12.0),
    Row("ray.start", "- on Ray, which is up", 12.0),
    Row("ray.agent.known", "on Ray, agent of a node killed: the driver knows", 0.100),
    Row("ray.agent.gone", "- nothing is left on the node", 1.0),
    Row("ray.agent.next", "- ranks serve on a spare node", 2.0),
    Row("ray.raylet.known", "on Ray, raylet killed: the driver knows", 1.0),
)

PEERS = (
    *(
        Row(f"{key}.{what}.{ranks}", f"{name}: {what} to {ranks} of one far node")
        for key, name in (("ray-actors", "Ray actors"), ("monarch", "Monarch"))
        for what, ranks in (("empty", 1), ("empty", 4), ("8 MiB", 4), ("64 MiB", 4))
    ),
    Row("ray-actors.next", "Ray actors, max_restarts=-1: one killed, next good call"),
    Row("ray-actors.known", "Ray actors: raylet and actors of a node killed, a call has failed"),
    Row("torchrun.next", "torchrun, two agents: rank killed, every rank has taken a step"),
)


@dataclass(slots=True)
class Found:
    """What a run found.

    Attributes:
        figures: By the keys of rows, a figure of each round.
        tails: For what is called many times in a round, the 99th percentile of each.
        why: By the part of the run that was not measured, why.
        left: Commands of processes that the run would have left behind, and has ended.
    """

    machine: dict[str, Any]
    about: str = ""
    figures: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    tails: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    why: dict[str, str] = field(default_factory=dict[str, str])
    left: list[str] = field(default_factory=list[str])

    def note(self, part: str, found: Mapping[str, float]) -> None:
        """Add a figure of one round to each row that *found* names within *part*."""
        for what, value in found.items():
            self.figures.setdefault(f"{part}.{what}" if part else what, []).append(value)


def verdict(row: Row, found: Found) -> Verdict:
    """Hold *row* against its target, which a part that broke has not met; without one it is met."""
    figures = found.figures.get(row.key, [])
    if row.kind in ("total", "each") and figures:
        figures = [sum(figures) if row.kind == "total" else max(figures)]
    limit = float("inf") if row.most is None else row.most
    why = found.why.get(row.key.partition(".")[0])
    held = at_most(row.what, of(figures), limit, why or "not asked for")
    return replace(held, state="not measured", why=why) if why and row.most is not None else held


def text(found: Found) -> str:
    """Return everything as tables."""
    heads = ("", "median (interval)", "p99", "rounds", "target", "")
    return f"""## Several machines

{sentence(found.machine)}. {found.about} Where Ray is not named, nodes are started without it.

{table(heads, [_cells(row, found) for row in ROWS])}

### Peers

{table(heads, [_cells(row, found) for row in PEERS])}

Left behind at the end: {"; ".join(found.left) or "nothing"}."""


def values(found: Found) -> dict[str, Any]:
    """Return everything in types that JSON knows; times in seconds."""
    targets = [asdict(verdict(row, found)) for row in ROWS if row.most is not None]
    return {**asdict(found), "targets": targets}


def _cells(row: Row, found: Found) -> tuple[str, ...]:
    """Return what stands in *row*: its name, median, p99, rounds, target and verdict."""
    held, figures = verdict(row, found), found.figures.get(row.key, [])
    target = "" if row.most is None else _plain(row, row.most)
    state = f"{held.state}: {held.why}" if held.why else held.state
    if held.value is None:
        return row.what, "-", "", "", target, state
    middle, tail, tails = _plain(row, held.value), "", of(found.tails.get(row.key, []))
    if row.kind in ("time", "bytes"):
        tail = _plain(row, tails.median if tails else percentile(figures, 99))
    if row.kind == "time":
        middle = time_with_interval(of(figures))
    return row.what, middle, tail, str(len(figures)), target, state if target else ""


def _plain(row: Row, value: float) -> str:
    if row.kind == "time":
        return seconds(value)
    return f"{value / _MIB:.0f} MiB" if row.kind == "bytes" else f"{value:g}"
