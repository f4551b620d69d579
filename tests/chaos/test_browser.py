"""The page of a run as a browser shows it: everything is there, visible, and where it belongs."""

from __future__ import annotations

import json
import os
import re
import shutil
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from tests.support.histories import Teller
from tests.support.programs import run_program
from tests.unit.chaos.test_page import told

from phalanx.chaos import Chaos, ChaosResult, History, render_page
from phalanx.chaos.checker.checker import check
from phalanx.chaos.history.events import FaultInjected, WorkloadFailed

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome", "headless_shell")
BROWSER = next((found for name in NAMES if (found := shutil.which(name))), None)

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(BROWSER is None, reason=f"no browser here; looked for {', '.join(NAMES)}"),
]

# What only a browser knows: sizes, places and colours once everything is laid out.
LOOK = """
<script>
const box = (e) => { const b = e.getBoundingClientRect();
  return {x: b.x, y: b.y, w: b.width, h: b.height, right: b.right, bottom: b.bottom}; };
const marks = [...document.querySelectorAll("svg rect, svg polygon")].map((e) => ({
  kind: e.getAttribute("class"), fill: getComputedStyle(e).fill, box: box(e),
  svg: box(e.closest("svg")),
  title: ((e.matches("polygon") ? e.parentNode : e).querySelector("title") || {}).textContent}));
const labels = [...document.querySelectorAll("svg text.kind")].map((e) => (
  {text: e.textContent, box: box(e)}));
const seen = {title: document.title, text: document.body.innerText, marks, labels,
  verdict: document.querySelector(".verdict").textContent,
  tables: [...document.querySelectorAll("table")].map((e) => e.innerText),
  loaded: performance.getEntriesByType("resource").length,
  wide: document.documentElement.scrollWidth > window.innerWidth};
const out = document.createElement("pre"); out.id = "seen";
out.textContent = JSON.stringify(seen); document.body.append(out);
</script>
"""


def look_at(page: str, folder: Path) -> Any:
    """Return what a browser makes of *page*."""
    assert BROWSER is not None
    file = folder / "page.html"
    file.write_text(page.replace("</body>", f"{LOOK}</body>"), encoding="utf-8")
    words = ("--headless", "--no-sandbox", "--disable-gpu", "--window-size=1280,900")
    own = {name: str(folder) for name in ("HOME", "XDG_RUNTIME_DIR")}
    done = run_program(
        [BROWSER, *words, f"--user-data-dir={folder / 'profile'}", "--dump-dom", file.as_uri()],
        env={**os.environ, **own},
    )
    seen = re.search(r'<pre id="seen">(.*?)</pre>', done.stdout, re.DOTALL)
    assert seen is not None, done.stderr[-2000:]
    return json.loads(unescape(seen.group(1)))


def struck_often(deaths: int) -> Teller:
    """The history of two ranks, of which one or the other dies again and again."""
    teller = told()
    teller.events = teller.events[:-5]  # what closed it
    for number in range(deaths):
        fault = ("kill", "stop", "raise_before", "grandchild")[number % 4]
        rank = number % 2
        struck = {"number": number + 2, "fault": fault, "target": "random", "group": "g"}
        teller.add(FaultInjected, **struck, rank=rank, incarnation=teller.incarnations[rank])
        teller.now += 0.03
        teller.add(FaultInjected, number=900 + number, fault="kill", target="zygote", group="g")
        call = teller.issue()
        teller.begin(call, teller.send(call), rank)
        teller.die(rank, stopped=(1 - rank,))
        teller.settle(call, "died")
        teller.now += 0.5
        teller.start(0, 1)
        teller.serve()
        teller.now += 1.0
    return teller


def test_a_browser_shows_every_mark_within_its_drawing(tmp_path: Path) -> None:
    teller = struck_often(16)
    teller.add(WorkloadFailed, error="one is not one <b>at all</b>")
    teller.close()
    history = History.of(teller.events, seed=7)
    page = render_page(
        ChaosResult("mine:build", Chaos(duration=30, rate=2, seed=7), history, check(history))
    )

    seen = look_at(page, tmp_path)

    assert seen["title"] == "mine:build: chaos"
    assert seen["verdict"].startswith("FAIL: ")
    assert seen["loaded"] == 0
    assert not seen["wide"]  # what is wide scrolls within the page
    kinds = {mark["kind"] for mark in seen["marks"]}
    assert {"starting", "up", "run", "failed", "whole", "broken", "fault", "outcome"} <= kinds
    fills = {mark["kind"]: mark["fill"] for mark in seen["marks"]}
    assert len({fills[kind] for kind in ("starting", "up", "run", "failed", "fault")}) == 5
    for mark in seen["marks"]:
        box, svg = mark["box"], mark["svg"]
        assert box["w"] > 0, mark
        assert box["h"] > 0, mark
        assert svg["x"] <= box["x"] <= box["right"] <= svg["right"], mark
        assert svg["y"] <= box["y"] <= box["bottom"] <= svg["bottom"], mark
        assert mark["title"], mark
    assert sum(mark["kind"] == "up" for mark in seen["marks"]) == 36  # 2 ranks, 18 incarnations
    assert {label["text"] for label in seen["labels"]} == {
        *("kill", "stop", "raise_before", "grandchild")
    }
    for one, other in zip(seen["labels"], seen["labels"][1:], strict=False):
        if one["box"]["y"] == other["box"]["y"]:
            assert one["box"]["right"] <= other["box"]["x"], (one, other)
    assert "one is not one <b>at all</b>" in seen["text"]
    assert "rank 1" in seen["text"]
    faults, calls, invariants = seen["tables"]
    assert "recovery p50" in faults
    assert "died" in calls
    assert "broken 1x" in invariants
