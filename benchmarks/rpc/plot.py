"""What `rpc` found, as a picture: time over size, one panel for each number of ranks."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from benchmarks.harness.machine import sentence
from benchmarks.harness.roster import OURS
from benchmarks.harness.stats import of
from benchmarks.harness.tables import size

from .run import Message

if TYPE_CHECKING:
    from pathlib import Path

    from .run import Found

_EMPTY_AT = 256  # bytes: where an empty call stands on an axis that has no zero


def can_draw() -> bool:
    """Return whether there is something to draw with."""
    return find_spec("matplotlib") is not None


def draw(found: Found, path: Path) -> None:
    """Write the picture to *path*, as a PNG."""
    matplotlib: Any = import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot: Any = import_module("matplotlib.pyplot")
    ranks = list(found.plan.ranks)
    figure, panels = pyplot.subplots(
        1, len(ranks), figsize=(4.2 * len(ranks) + 1, 4.8), sharey=True, squeeze=False
    )
    for panel, count in zip(panels[0], ranks, strict=True):
        _panel(panel, found, count)
    panels[0][0].set_ylabel("one call to all ranks, microseconds")
    shown: dict[str, Any] = {}  # by name: one that broke may be in one panel only
    for panel in panels[0]:
        handles, labels = panel.get_legend_handles_labels()
        shown |= zip(labels, handles, strict=True)
    columns = min(10, len(shown))
    figure.legend(shown.values(), shown, loc="upper center", ncols=columns, frameon=False)
    figure.supxlabel(sentence(found.machine), fontsize=7, color="gray")
    figure.tight_layout(rect=(0, 0.02, 1, 0.93))
    figure.savefig(path, format="png", dpi=130)
    pyplot.close(figure)


def _panel(panel: Any, found: Found, ranks: int) -> None:
    for name in found.names():
        points = [
            (each or _EMPTY_AT, samples)
            for each in found.plan.sizes
            if (row := found.rows.get((ranks, Message(each), name))) and (samples := of(row.median))
        ]
        if not points:
            continue
        middle = [samples.median * 1e6 for _, samples in points]
        below = [(samples.median - samples.low) * 1e6 for _, samples in points]
        above = [(samples.high - samples.median) * 1e6 for _, samples in points]
        style = {"color": "black", "linewidth": 2.4, "zorder": 3} if name == OURS else {}
        if name == "memcpy":
            style = {"color": "gray", "linestyle": ":"}
        panel.errorbar(
            [at for at, _ in points],
            middle,
            yerr=(below, above),
            label=name,
            marker="o",
            markersize=3,
            capsize=2,
            **style,
        )
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    ticks = {each or _EMPTY_AT: size(each) if each else "empty" for each in found.plan.sizes}
    panel.set_xticks(list(ticks), list(ticks.values()), rotation=45, fontsize=7)
    panel.set_title("1 rank" if ranks == 1 else f"{ranks} ranks", fontsize=10)
    panel.grid(visible=True, which="major", alpha=0.3)
