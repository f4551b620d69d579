"""Tables as Markdown, aligned, so that a terminal and a document show them alike."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .stats import Samples
    from .targets import Verdict

_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table."""
    lines = [heads, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(heads))]
    drawn = [
        "| "
        + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        + " |"
        for line in lines
    ]
    rule = "| " + " | ".join("-" * max(3, width) for width in widths) + " |"
    return "\n".join([drawn[0], rule, *drawn[1:]])


def seconds(value: float | None) -> str:
    """Return a time in the unit that leaves three digits before the point at most."""
    if value is None:
        return "-"
    scale, unit = next((each for each in _UNITS if abs(value) >= each[0]), _UNITS[-1])
    return f"{short(value / scale)} {unit}"


def size(count: float) -> str:
    """Return bytes in binary units."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:g} {unit}" if count == int(count) else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def short(value: float) -> str:
    """Return three digits, more where they stand before the point."""
    if abs(value) >= 100 or value == 0:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def ranks_in_words(count: int) -> str:
    """Return how many ranks."""
    return "1 rank" if count == 1 else f"{count} ranks"


def with_interval(found: Samples | None) -> str:
    """Return a ratio and its interval."""
    if found is None:
        return "-"
    return f"{short(found.median)} ({short(found.low)} to {short(found.high)})"


def time_with_interval(found: Samples | None) -> str:
    """Return a time and its interval."""
    if found is None:
        return "-"
    scale, unit = next((each for each in _UNITS if found.median >= each[0]), _UNITS[-1])
    middle, low, high = (short(value / scale) for value in (found.median, found.low, found.high))
    return f"{middle} ({low} to {high}) {unit}"


def verdict_table(verdicts: Sequence[Verdict]) -> str:
    """Return one line for each target."""
    rows: list[tuple[str, ...]] = []
    for each in verdicts:
        if each.value is None or each.low is None or each.high is None:
            rows.append((each.what, "-", f"not measured: {each.why}"))
            continue
        interval = (
            "" if each.low == each.high else f" ({_figure(each.low)} to {_figure(each.high)})"
        )
        rows.append((each.what, _figure(each.value) + interval, each.state))
    return table(("target", "found", ""), rows)


def _figure(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
