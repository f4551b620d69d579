"""A run as one page of HTML that needs nothing else: verdict, timelines, tables, violations.

Guarantees: whatever stands in the history is text on the page and never markup; the page loads
nothing, from nowhere; its size is bounded by its width, not by the number of calls.

Left to others: what lies where on a timeline (`timeline`).
"""

from __future__ import annotations

from collections import Counter
from html import escape
from typing import TYPE_CHECKING

from .result import quantile
from .timeline import others, timelines
from .violation import INVARIANTS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from .result import ChaosResult
    from .timeline import Lane, Mark, Span, Timeline

_PER_SECOND = 24.0  # pixels
_LEAST, _MOST = 1000.0, 16_000.0
_LABELS = 84.0
_LANE, _GAP, _AXIS = 44.0, 8.0, 22.0
_STRIP = 14.0  # at the top of a lane, for marks and their names
_SHOWN = 20  # violations

_STYLE = """
:root { color-scheme: light dark; --ink: #1d2430; --paper: #fff; --faint: #667085; --line: #d5dae3;
 --up: #b9dcc4; --start: #f3d9a4; --run: #2f855a; --bad: #c53030; --whole: #cfe3f7;
 --fault: #6b21a8; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ef; --paper: #14181f; --faint: #98a2b3;
 --line: #323a46; --up: #24523a; --start: #6a5321; --run: #58c08a; --bad: #ff7b72; --whole: #1f3f61;
 --fault: #d2a8ff; } }
body { font: 14px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--paper);
 margin: 2rem auto; max-width: 1300px; padding: 0 1rem; }
h1 { font-size: 1.4rem; margin: 0 0 .3rem; } h2 { font-size: 1.05rem; margin: 2rem 0 .5rem; }
.verdict { display: inline-block; padding: .15rem .7rem; border-radius: 4px; font-weight: 600;
 color: #fff; background: #276749; } .verdict.broken { background: #c53030; }
.faint, .key { color: var(--faint); } table { border-collapse: collapse; margin: .3rem 0; }
th, td { text-align: left; padding: .2rem .9rem .2rem 0; border-bottom: 1px solid var(--line);
 vertical-align: top; } td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
.bad { color: var(--bad); font-weight: 600; } .scroll { overflow-x: auto; }
pre { overflow-x: auto; padding: .7rem; border: 1px solid var(--line); border-radius: 4px; }
svg text { fill: var(--ink); font: 11px system-ui, sans-serif; } svg .tick { fill: var(--faint); }
svg .grid { stroke: var(--line); } .starting { fill: var(--start); } .up { fill: var(--up); }
.run { fill: var(--run); } .failed, .broken { fill: var(--bad); } .whole { fill: var(--whole); }
.fault { fill: var(--fault); } .outcome { fill: var(--bad); } svg text.kind { fill: var(--fault); }
.swatch { display: inline-block; width: .9em; height: .9em; border-radius: 2px;
 margin: 0 .3em 0 1em; vertical-align: -1px; }
"""

_KEY = (
    ("--start", "starting"),
    ("--up", "up"),
    ("--run", "running calls"),
    ("--bad", "a call failed, was cut off, or the group was not whole"),
    ("--fault", "fault"),
)


def render_page(result: ChaosResult) -> str:
    """Return *result* as a page of HTML."""
    records = result.history.records
    seconds = max(records[-1].at if records else 0.0, result.plan.duration, 1.0)
    width = min(max(seconds * _PER_SECOND, _LEAST), _MOST)
    scale = width / seconds
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(result.target)}: chaos</title><style>{_STYLE}</style></head><body>",
        *_head(result),
        "<h2>Timeline</h2>",
        _legend(),
        *(_drawing(line, seconds, scale) for line in timelines(result.history, 1.0 / scale)),
        *_helpers(others(result.history), seconds, scale),
        *_faults(result),
        *_calls(result),
        *_invariants(result),
        *_violations(result),
        "</body></html>",
    ]
    return "\n".join(parts)


def _head(result: ChaosResult) -> list[str]:
    plan = result.plan
    verdict = "every invariant held" if result.ok else "violated"
    if result.void and not result.violations:
        verdict = f"nothing shown: {result.void}"
    kind = "verdict" if result.ok else "verdict broken"
    cut = ", interrupted" if result.interrupted else ""
    strikes = len(plan.strikes)
    said = f"{plan.duration:g} s, {strikes} faults planned, seed {plan.seed}{cut}"
    deaths = f"{sum(result.calls.values())} calls, {result.restarts} unasked deaths"
    return [
        f"<h1>{escape(result.target)}</h1>",
        f'<p><span class="{kind}">{verdict}</span></p>',
        f'<p class="faint">{escape(said)}; {deaths}</p>',
    ]


def _legend() -> str:
    named = (
        f'<span class="swatch" style="background:var({colour})"></span>{text}'
        for colour, text in _KEY
    )
    return f'<p class="key">Point at anything for its story. {"".join(named)}</p>'


# --- drawings -----------------------------------------------------------------------------


def _drawing(line: Timeline, seconds: float, scale: float) -> str:
    lanes = (line.lane, *line.ranks)
    body = [_lane(lane, _AXIS + i * (_LANE + _GAP), scale) for i, lane in enumerate(lanes)]
    return _svg(f"group {line.group}", body, len(lanes), seconds, scale)


def _helpers(marks: Sequence[Mark], seconds: float, scale: float) -> list[str]:
    if not marks:
        return []
    body = [_name("others", _AXIS), *_marks(marks, _AXIS, scale)]
    return [_svg("faults of no rank: helpers, spares, the driver", body, 1, seconds, scale)]


def _svg(title: str, body: Iterable[str], lanes: int, seconds: float, scale: float) -> str:
    width = _LABELS + seconds * scale + 30
    height = _AXIS + lanes * (_LANE + _GAP)
    inside = [*_axis(seconds, scale, height), *body]
    return (
        f"<h3>{escape(title)}</h3>"
        f'<div class="scroll" tabindex="0"><svg role="img" aria-label="{escape(title)}" '
        f'width="{width:.0f}" height="{height:.0f}">{"".join(inside)}</svg></div>'
    )


def _axis(seconds: float, scale: float, height: float) -> list[str]:
    steps = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600)
    step = next((each for each in steps if each * scale >= 60), 1800)
    drawn: list[str] = []
    for second in range(0, int(seconds) + 1, step):
        x = _LABELS + second * scale
        drawn.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="16" y2="{height:.0f}"/>')
        drawn.append(f'<text class="tick" x="{x:.1f}" y="11">{second} s</text>')
    return drawn


def _lane(lane: Lane, top: float, scale: float) -> str:
    drawn = [_name(lane.name, top)]
    for span in lane.lives:
        drawn.append(_bar(span, top + _STRIP, _LANE - _STRIP, scale))
        begin, end = span.begin * scale, span.end * scale
        label = span.text.split(",")[0].replace("incarnation ", "#")
        if end - begin > 8 * len(label) and span.state != "starting":
            at = _LABELS + begin + 3
            drawn.append(f'<text x="{at:.1f}" y="{top + _STRIP + 11:.1f}">{escape(label)}</text>')
    drawn += [_bar(span, top + _STRIP + 15, _LANE - _STRIP - 17, scale) for span in lane.runs]
    if lane.name == "group":
        drawn += [_outcome(mark, top, scale) for mark in lane.marks]
    else:
        drawn += _marks(lane.marks, top, scale)
    return "".join(drawn)


def _name(name: str, top: float) -> str:
    return f'<text x="2" y="{top + _STRIP + 19:.1f}">{escape(name)}</text>'


def _bar(span: Span, top: float, height: float, scale: float) -> str:
    x = _LABELS + span.begin * scale
    width = max((span.end - span.begin) * scale, 0.8)
    told = f"{span.text} | {span.begin:.3f} to {span.end:.3f} s"
    return (
        f'<rect class="{span.state}" x="{x:.1f}" y="{top:.1f}" width="{width:.1f}" '
        f'height="{height:.1f}"><title>{escape(told)}</title></rect>'
    )


def _marks(marks: Iterable[Mark], top: float, scale: float) -> list[str]:
    drawn: list[str] = []
    free = 0.0  # where the last name ended
    for mark in marks:
        x = _LABELS + mark.at * scale
        told = f"{mark.text} | {mark.at:.3f} s"
        shape = f"{x:.1f},{top + 9:.1f} {x - 4.5:.1f},{top:.1f} {x + 4.5:.1f},{top:.1f}"
        drawn.append(
            f'<g><line x1="{x:.1f}" x2="{x:.1f}" y1="{top:.1f}" y2="{top + _LANE:.1f}" '
            f'stroke="var(--fault)"/><polygon class="fault" points="{shape}"/>'
            f"<title>{escape(told)}</title></g>"
        )
        if x >= free:
            drawn.append(
                f'<text class="kind" x="{x + 6:.1f}" y="{top + 10:.1f}">{escape(mark.what)}</text>'
            )
            free = x + 10 + 6.5 * len(mark.what)
    return drawn


def _outcome(mark: Mark, top: float, scale: float) -> str:
    x = _LABELS + mark.at * scale
    told = f"{mark.text} | {mark.at:.3f} s"
    return (
        f'<rect class="outcome" x="{x - 1:.1f}" y="{top:.1f}" width="2" height="{_LANE:.1f}">'
        f"<title>{escape(told)}</title></rect>"
    )


# --- tables -------------------------------------------------------------------------------


def _faults(result: ChaosResult) -> list[str]:
    rows: list[Sequence[str]] = []
    for each in result.faults:
        times = sorted(each.recoveries)
        picked = (quantile(times, 0.5), quantile(times, 0.99), times[-1] if times else None)
        shown = ("-" if seconds is None else f"{seconds:.2f} s" for seconds in picked)
        rows.append((each.fault, str(each.done), str(each.missed), *shown))
    head = ("fault", "done", "missed", "recovery p50", "p99", "max")
    drawn = ["<h2>Faults</h2>", _table(head, rows)]
    missed = [
        (each.fault, str(count), why) for each in result.faults for why, count in each.reasons
    ]
    return [*drawn, _table(("missed", "times", "why"), missed)] if missed else drawn


def _calls(result: ChaosResult) -> list[str]:
    rows = [(outcome, str(count)) for outcome, count in result.calls.items()]
    return ["<h2>Calls</h2>", _table(("outcome", "calls"), rows)]


def _invariants(result: ChaosResult) -> list[str]:
    broken = Counter(violation.invariant for violation in result.violations)
    drawn = ["<h2>Invariants</h2>", "<table><tr><th></th><th>invariant</th><th>says</th></tr>"]
    for name, says in INVARIANTS.items():
        state = f'<td class="bad">broken {broken[name]}x</td>' if broken[name] else "<td>held</td>"
        drawn.append(f"<tr>{state}<td>{escape(name)}</td><td>{escape(says)}</td></tr>")
    return [*drawn, "</table>"]


def _violations(result: ChaosResult) -> list[str]:
    if not result.violations:
        return []
    drawn = ["<h2>Violations</h2>"]
    shown = result.told(_SHOWN)
    drawn += [f"<pre>{escape(each.render())}</pre>" for each in shown]
    more = len(result.violations) - len(shown)
    return [*drawn, f"<p>and {more} more</p>"] if more > 0 else drawn


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    def cells(tag: str, values: Sequence[str]) -> str:
        first, *others = (escape(value) for value in values)
        return f"<{tag}>{first}</{tag}>" + "".join(
            f'<{tag} class="n">{other}</{tag}>' for other in others
        )

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f"<table><tr>{cells('th', head)}</tr>{body}</table>"
