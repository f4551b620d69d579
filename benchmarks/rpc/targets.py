"""What the message plane is to reach, held against what `rpc` found.

Guarantees: ratios are taken round by round, so that both sides of each had the same machine; a
target is met when all of the interval meets it, not when a median happens to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.harness.roster import COPY, OURS
from benchmarks.harness.stats import Samples, of
from benchmarks.harness.tables import ranks_in_words
from benchmarks.harness.targets import Verdict, at_least, at_most

from .run import EMPTY, FEW, MIB, MOST, Message

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .run import Found

# An empty call to so many ranks, over the same of a peer.
_EMPTY = {
    1: {"pyzmq": 0.6, "vllm": 0.5},
    2: {"pyzmq": 0.5, "vllm": 0.35},
    4: {"pyzmq": 0.5, "vllm": 0.25, "ray": 0.05},
    8: {"pyzmq": 0.5, "vllm": 0.25, "ray": 0.05},
}
_BEST = 0.9  # of the best of `_PEERS`, with every message
_PEERS = ("pipe", "pyzmq", "vllm", "vllm-direct")
_STRUCTURE = 0.7  # of pickle over a pipe
_LEAST_PIPELINED = 20_000  # a second
_MOST_AT_REST = 0.001  # of a processor
_MOST_SHARED = 8 * MIB


def verdicts(found: Found) -> list[Verdict]:
    """Return one for each target, in the order of the document that sets them."""
    return [
        *_empty(found),
        *_tail(found),
        *_messages(found),
        *_pipelined(found),
        *_large(found),
        _growth(found),
        *_rest(found),
    ]


def _empty(found: Found) -> Iterator[Verdict]:
    for ranks, limits in _EMPTY.items():
        for peer, limit in limits.items():
            ratio = _ratio(found, ranks, EMPTY, peer)
            what = f"empty call, {ranks_in_words(ranks)}: at most {limit:g} of {peer}"
            yield at_most(what, ratio, limit, _why(found, ranks, peer))


def _tail(found: Found) -> Iterator[Verdict]:
    for ranks in _EMPTY:
        for peer in ("pyzmq", "vllm"):
            ratio = _ratio(found, ranks, EMPTY, peer, "p99")
            what = f"p99 of an empty call, {ranks_in_words(ranks)}: below {peer}'s"
            yield at_most(what, ratio, 1.0, _why(found, ranks, peer))


def _messages(found: Found) -> Iterator[Verdict]:
    """Hold what was measured of each message up to 1 MiB against the best peer."""
    for ranks in found.plan.ranks:
        for message in found.plan.messages:
            if message.size > MIB:
                continue
            where = f"{message}, {ranks_in_words(ranks)}"
            for figure, limit in (("median", _BEST), ("cpu", 1.0)):
                best = _best(found, ranks, message, figure)
                ratio = None if best is None else _ratio(found, ranks, message, best, figure)
                what = "processor time" if figure == "cpu" else "median"
                what = f"{where}: {what}, at most {limit:g} of the best ({best})"
                yield at_most(what, ratio, limit, _why(found, ranks, best or OURS))
            if message.size:
                ratio = _ratio(found, ranks, message, "pyzmq", "p99")
                what = f"{where}: p99, at most that of pyzmq"
                yield at_most(what, ratio, 1.0, _why(found, ranks, "pyzmq"))
            if message.form == "structure":
                ratio = _ratio(found, ranks, message, "pipe")
                what = f"{where}: at most {_STRUCTURE:g} of pipe"
                yield at_most(what, ratio, _STRUCTURE, _why(found, ranks, "pipe"))


def _best(found: Found, ranks: int, message: Message, figure: str) -> str | None:
    """Return the peer with the least *figure*, None where there is none."""
    there = {name: found.series(ranks, message, name, figure) for name in _PEERS}
    medians = {name: samples.median for name, samples in there.items() if samples is not None}
    return min(medians, key=medians.__getitem__, default=None)


def _pipelined(found: Found) -> Iterator[Verdict]:
    ours = of(found.pipelined.get((1, OURS), []))
    theirs = of(found.pipelined.get((1, "pyzmq"), []))
    what = f"pipelined empty calls, 1 rank: at least {_LEAST_PIPELINED:,} a second"
    yield at_least(what, ours, _LEAST_PIPELINED, _why(found, 1, OURS))
    ratio = ours.over(theirs) if ours and theirs else None
    what = "the same: at least that of pyzmq"
    yield at_least(what, ratio, 1.0, _why(found, 1, "pyzmq"))


def _large(found: Found) -> Iterator[Verdict]:
    large = Message(8 * MIB)
    ratio = _ratio(found, 8, large, "vllm")
    what = "8 MiB to 8 ranks: at most 0.3 of vllm"
    yield at_most(what, ratio, 0.3, _why(found, 8, "vllm"))
    ours = found.series(8, large, OURS)
    copy = found.series(8, large, COPY)
    empty = found.series(8, EMPTY, OURS)
    budget = copy.with_each(empty, lambda one, two: 2 * one + two) if copy and empty else None
    ratio = ours.over(budget) if ours and budget else None
    what = "the same: at most 1 of two copies and an empty call"
    yield at_most(what, ratio, 1.0, _why(found, 8, OURS))
    ratio = _ratio(found, 4, Message(64 * MIB), COPY)
    what = "64 MiB to 4 ranks: at most 1.5 of one copy"
    yield at_most(what, ratio, 1.5, _why(found, 4, OURS))


def _growth(found: Found) -> Verdict:
    few, many = (of(found.growth.get((ranks, OURS), [])) for ranks in (FEW, MOST))
    ratio = many.over(few) if many and few else None
    what = f"empty call, {MOST} ranks over {FEW}: at most linear"
    return at_most(what, ratio, MOST / FEW, _why(found, MOST, OURS))


def _rest(found: Found) -> Iterator[Verdict]:
    ours = [rest for (_, name), rest in found.rest.items() if name == OURS]
    kinds = {
        "the driver": [rest.driver_share for rest in ours],
        "the busiest other process": [rest.worker_share for rest in ours],
    }
    for who, shares in kinds.items():
        worst = Samples((max(shares),)) if shares else None
        what = f"processor at rest, {who}: below 0.1 %"
        yield at_most(what, worst, _MOST_AT_REST, "not asked for")
    worst = Samples((float(max(rest.shared_bytes for rest in ours)),)) if ours else None
    yield at_most("shared memory at rest: below 8 MiB", worst, _MOST_SHARED, "not asked for")


def _ratio(
    found: Found, ranks: int, message: Message, peer: str, what: str = "median"
) -> Samples | None:
    ours = found.series(ranks, message, OURS, what)
    theirs = found.series(ranks, message, peer, what)
    return ours.over(theirs) if ours and theirs else None


def _why(found: Found, ranks: int, peer: str) -> str:
    for name in (peer, OURS):
        if (ranks, name) in found.broken:
            return f"{name} broke: {found.broken[ranks, name]}"
        if name in found.absent:
            return f"{name} is absent"
    return "not asked for"
