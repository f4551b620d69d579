"""What `rpc` found, as text and as plain values.

Guarantees: the text holds nothing that the values do not.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from benchmarks.harness.machine import sentence
from benchmarks.harness.roster import COPY, ENTRIES, OURS
from benchmarks.harness.stats import Samples, of
from benchmarks.harness.tables import (
    ranks_in_words,
    seconds,
    size,
    table,
    time_with_interval,
    verdict_table,
    with_interval,
)

from .run import FEW, MOST
from .targets import verdicts

if TYPE_CHECKING:
    from .run import Found, Message


def text(found: Found) -> str:
    """Return everything as tables."""
    parts = [
        f"## Messages\n\n{sentence(found.machine)}.",
        _about(found),
        _who(found),
        *(_rank_tables(found, ranks) for ranks in found.plan.ranks),
        _rest_table(found),
        _growth_table(found),
        "### Targets\n\nA target is met when all of the interval meets it.\n\n"
        + verdict_table(verdicts(found)),
    ]
    return "\n\n".join(part for part in parts if part)


def values(found: Found) -> dict[str, Any]:
    """Return everything in types that JSON knows; times in seconds."""
    return {
        "machine": found.machine,
        "plan": asdict(found.plan),
        "contestants": {name: {"version": version} for name, version in found.versions.items()},
        "absent": found.absent,
        "broken": [
            {"ranks": ranks, "contestant": name, "why": why}
            for (ranks, name), why in found.broken.items()
        ],
        "calls": [
            {
                "ranks": ranks,
                **message._asdict(),
                "contestant": name,
                "calls": row.calls,
                "median": _plain(of(row.median)),
                "p99": _plain(of(row.p99)),
                "cpu_per_call": _plain(of(row.cpu)),
                "every_byte_read": _plain(of(row.read)),
                "ratio": _plain(_ours_over(found, ranks, message, name)),
            }
            for (ranks, message, name), row in found.rows.items()
        ],
        "pipelined_per_second": [
            {"ranks": ranks, "contestant": name, **(_plain(of(rates)) or {})}
            for (ranks, name), rates in found.pipelined.items()
        ],
        "rest": [
            {"ranks": ranks, "contestant": name, **asdict(rest)}
            for (ranks, name), rest in found.rest.items()
        ],
        "growth": [
            {"ranks": ranks, "contestant": name, **(_plain(of(times)) or {})}
            for (ranks, name), times in found.growth.items()
        ],
        "targets": [asdict(verdict) for verdict in verdicts(found)],
    }


def _about(found: Found) -> str:
    rounds = found.plan.rounds
    return (
        f"A figure is the median of {rounds} alternating rounds, with the interval of that median "
        f"by order statistics ({Samples((0.0,) * rounds).confidence:.1%} confidence); a ratio is "
        "taken round by round."
    )


def _who(found: Found) -> str:
    rows = [
        (entry.name, found.versions.get(entry.name, found.absent.get(entry.name, "")), entry.about)
        for entry in ENTRIES
        if entry.name in found.versions or entry.name in found.absent
    ]
    return table(("contestant", "version", "what it is"), rows)


def _rank_tables(found: Found, ranks: int) -> str:
    heads = ("to", "contestant", "median", "p99", "cpu per call", "every byte read", "ours / its")
    rows: list[tuple[str, ...]] = []
    for each in found.plan.messages:
        for name in found.names():
            row = found.rows.get((ranks, each, name))
            if row is None or not row.median:
                continue
            read = of(row.read)
            p99, cpu = of(row.p99), of(row.cpu)
            rows.append(
                (
                    str(each),
                    name,
                    time_with_interval(of(row.median)),
                    seconds(p99.median if p99 else None),
                    "" if name == COPY else seconds(cpu.median if cpu else None),
                    seconds(read.median) if read else "",
                    "" if name == OURS else with_interval(_ours_over(found, ranks, each, name)),
                )
            )
    parts = [f"### {ranks_in_words(ranks)}\n\n{table(heads, rows)}"] if rows else []
    piped = {name: of(rates) for (count, name), rates in found.pipelined.items() if count == ranks}
    if piped:
        ours = piped.get(OURS)
        lines = [
            (
                name,
                with_interval(rate),
                with_interval(ours.over(rate)) if ours and rate and name != OURS else "",
            )
            for name, rate in piped.items()
        ]
        parts.append(table(("pipelined", "calls a second", "ours / its"), lines))
    parts += [
        f"{name} broke with {ranks_in_words(ranks)}: {why}"
        for (count, name), why in found.broken.items()
        if count == ranks
    ]
    return "\n\n".join(parts)


def _rest_table(found: Found) -> str:
    heads = (
        "at rest",
        "contestant",
        "driver",
        "busiest other",
        "all",
        "memory",
        "shared",
        "processes",
    )
    rows = [
        (
            ranks_in_words(ranks),
            name,
            f"{rest.driver_share:.3%}",
            f"{rest.worker_share:.3%}",
            f"{rest.total_share:.2%}",
            size(rest.pss_bytes >> 20 << 20),
            size(rest.shared_bytes),
            str(rest.processes),
        )
        for (ranks, name), rest in found.rest.items()
        if name != COPY
    ]
    if not rows:
        return ""
    about = (
        f"Share of one processor over {found.plan.rest:g} s without a call, after all calls above; "
        "memory is proportional (PSS) and of all its processes; shared memory is what exists of it."
    )
    return f"### At rest\n\n{about}\n\n{table(heads, rows)}"


def _growth_table(found: Found) -> str:
    names = list(dict.fromkeys(name for _, name in found.growth))
    if not names:
        return ""
    rows: list[tuple[str, ...]] = []
    for name in names:
        few, many = (of(found.growth.get((ranks, name), [])) for ranks in (FEW, MOST))
        ratio = many.over(few) if few and many else None
        rows.append((name, time_with_interval(few), time_with_interval(many), with_interval(ratio)))
    heads = ("empty call", ranks_in_words(FEW), ranks_in_words(MOST), "ratio")
    return f"### Growth\n\n{table(heads, rows)}"


def _ours_over(found: Found, ranks: int, message: Message, name: str) -> Samples | None:
    ours, theirs = (found.series(ranks, message, each) for each in (OURS, name))
    return ours.over(theirs) if ours and theirs and name != OURS else None


def _plain(found: Samples | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {
        "median": found.median,
        "low": found.low,
        "high": found.high,
        "confidence": round(found.confidence, 4),
        "rounds": len(found.values),
    }
