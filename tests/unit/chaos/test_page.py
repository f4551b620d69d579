"""A run as a page: what must be seen on it, and that nothing on it is more than text."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any

from tests.support.histories import Teller, whole

from phalanx.chaos import Chaos, ChaosResult, History, render_page
from phalanx.chaos.checker.checker import check
from phalanx.chaos.history.events import FaultInjected, WorkloadFailed


class Reader(HTMLParser):
    """Reads a page, and fails where its tags do not close each other."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def rects(self, kind: str) -> list[dict[str, str | None]]:
        return [a for tag, a in self.found if tag == "rect" and a.get("class") == kind]


def told(**options: Any) -> Teller:
    """The history of a group one of whose ranks is killed once."""
    teller = Teller(**options)
    teller.start(0, 1)
    teller.serve()
    struck = {"number": 0, "fault": "kill", "target": "1", "group": "g", "rank": 1}
    teller.add(FaultInjected, **struck, incarnation=1, lethal=True)
    teller.die(1, stopped=(0,))
    teller.start(0, 1)
    teller.serve()
    teller.close()
    return teller


def page_of(teller: Teller) -> str:
    history = History.of(teller.events, seed=7)
    return render_page(
        ChaosResult("mine:build", Chaos(duration=30, rate=1, seed=7), history, check(history))
    )


def test_every_incarnation_fault_and_outcome_is_there() -> None:
    read = Reader(page_of(told()))
    words = " ".join(read.text)

    assert len(read.rects("up")) == 4  # two ranks, two incarnations each
    assert len(read.rects("run")) == 4
    assert len(read.rects("whole")) == 2
    assert len(read.rects("broken")) == 1
    assert sum(tag == "polygon" for tag, _ in read.found) == 1
    assert "fault 0: kill to 1" in words
    assert "incarnation 2, epoch 2" in words
    assert "PASS: every invariant held" in words
    assert "seed 7" in words


def test_no_mark_is_drawn_across_the_name_of_another() -> None:
    teller = told()
    for strike in range(1, 9):
        struck = {"number": strike, "fault": "stop", "target": "0", "group": "g", "rank": 0}
        teller.now += 0.1 * strike
        teller.add(FaultInjected, **struck, incarnation=1, lethal=False)

    found = Reader(page_of(teller)).found
    named = [a for _, a in found if a.get("class") == "kind"]
    names = [(float(a["y"] or 0) - 10, float(a["x"] or 0)) for a in named]
    points = [str(a["points"]).split()[0].split(",") for tag, a in found if tag == "polygon"]
    marks = [(float(y) - 9, float(x)) for x, y in points]

    assert len(marks) == 9
    assert len(names) >= 2
    width = 6.5 * len("stop")
    crossed = [
        (x, at) for lane, x in names for on, at in marks if on == lane and x < at < x + width
    ]
    assert crossed == []


def test_a_violation_is_shown_with_its_records_which_are_text_and_never_markup() -> None:
    evil = "</title><script>alert(1)</script>"
    teller = told()
    teller.add(WorkloadFailed, error=evil)
    teller.settle(teller.issue(), outcome=evil)

    page = page_of(teller)

    read = Reader(page)
    assert not any(tag == "script" for tag, _ in read.found)
    assert any(evil in text for text in read.text)
    words = " ".join(read.text)
    assert "FAIL: " in words
    assert "broken 1x" in words
    assert not re.search(r"(src|href)\s*=|url\(|@import|https?:", page)  # it loads nothing


def test_the_page_of_many_calls_is_no_larger_than_its_width_allows() -> None:
    def with_calls(count: int) -> str:
        teller = told()
        teller.events = teller.events[:-2]
        for _ in range(count):
            teller.serve()
        last = max(each.at for each in teller.events)
        for record in teller.events:  # spread over the same 30 s, however many there are
            object.__setattr__(record, "at", 29.0 * record.at / last)
        return page_of(teller)

    assert len(with_calls(4000)) < 1.5 * len(with_calls(1000))


def test_a_run_of_nothing_is_a_page_too() -> None:
    result = ChaosResult("mine:build", Chaos(duration=30, rate=1, seed=7), History.of([]), ())

    assert "0 calls" in " ".join(Reader(render_page(result)).text)


def test_who_lived_on_was_well_with_the_next_call_and_who_died_with_its_successors() -> None:
    teller = whole(1)
    call = teller.issue()
    wire = teller.send(call)
    teller.begin(call, wire, 0)
    who = {"target": "0", "rank": 0, "group": "g", "incarnation": 1}
    slowed = teller.add(FaultInjected, number=1, fault="slow", **who)
    teller.end(call, wire, 0)
    teller.settle(call)
    teller.serve()
    well = teller.events[-3].at
    killed = teller.add(FaultInjected, number=2, fault="kill", lethal=True, **who)
    teller.die(0)
    teller.start(0)
    teller.serve()
    well_again = teller.events[-3].at
    teller.close()

    result = ChaosResult("it", Chaos(duration=30, seed=7), teller.history(), ())

    took = {each.fault: each.recoveries for each in result.faults}
    assert took == {"slow": (well - slowed.at,), "kill": (well_again - killed.at,)}
