"""A run as one page of HTML that loads nothing: verdict, timelines, tables, violations.

The template escapes what it inserts, so that text of a history is never markup.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.chaos.checker.checker import INVARIANTS
from phalanx.supervision import RuntimeFault

from .timeline import timelines

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .result import ChaosResult
    from .timeline import Mark

_TEMPLATE = "report.html.j2"
_PER_SECOND = 24.0  # pixels
_LEAST, _MOST = 1000.0, 16_000.0
_STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800)  # seconds between ticks
_SHOWN = 20  # violations


def render_page(result: ChaosResult) -> str:
    """Return *result* as a page of HTML.

    Raises:
        RuntimeFault: Jinja2 is not installed.
    """
    try:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined  # noqa: PLC0415
    except ImportError as error:
        msg = "the page needs Jinja2, which is not installed: pip install 'phalanx[chaos]'"
        raise RuntimeFault(msg) from error
    events = result.history.events
    seconds = max(events[-1].at if events else 0.0, result.plan.duration, 1.0)
    width = min(max(seconds * _PER_SECOND, _LEAST), _MOST)
    scale = width / seconds
    step = next((each for each in _STEPS if each * scale >= 60), _STEPS[-1])

    def named(marks: Sequence[Mark]) -> list[tuple[Mark, bool]]:
        """Return the marks, and whether the next one leaves room for the name of each."""
        room = [b.at - a.at for a, b in pairwise(marks)] + [float("inf")]
        return [(m, r * scale >= 12 + 6.5 * len(m.what)) for m, r in zip(marks, room, strict=False)]

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(_TEMPLATE).render(
        result=result,
        invariants=INVARIANTS,
        violations=result.selected(_SHOWN),
        timelines=timelines(result.history, 1.0 / scale),
        named=named,
        scale=scale,
        width=width,
        ticks=range(0, int(seconds) + 1, step),
    )
