"""A driver is asked what it looks like only while somebody looks."""

from __future__ import annotations

import queue
import time
from dataclasses import fields
from typing import Any

import pytest
from tests.support.output import Console

from phalanx.runtime.observe.event_stream import Observer
from phalanx.runtime.observe.status import (
    ChildStatus,
    GroupStatus,
    StatusEnded,
    StatusSource,
    TreeStatus,
)
from phalanx.runtime.output.collector_client import OutputCollector
from phalanx.runtime.process.launcher import Launcher

from .test_observers import attached, mine, until

LONG = 30.0


def tree(path: str) -> TreeStatus:
    root = ChildStatus(path=path, restart="", state="running", incarnation=1, last_exit="")
    return TreeStatus(root=root, children=(), hidden=0, at=0.0)


def group(name: str) -> GroupStatus:
    nothing: dict[str, Any] = dict.fromkeys((field.name for field in fields(GroupStatus)), 0)
    nothing["group"] = name
    return GroupStatus(**nothing)


def test_a_look_is_answered_by_all_and_each_tree_once() -> None:
    told: queue.SimpleQueue[Any] = queue.SimpleQueue()
    source = StatusSource(told.put)
    source.add(lambda: [tree("a")])
    forget = source.add(lambda: [tree("b")])
    source.add(lambda: [tree("a"), tree("c")])
    forget()

    source.answer()

    seen = [told.get_nowait() for _ in range(3)]
    assert [each.root.path for each in seen[:2]] == ["a", "c"]
    assert isinstance(seen[2], StatusEnded)


def test_requests_that_have_queued_up_get_one_answer() -> None:
    told: queue.SimpleQueue[Any] = queue.SimpleQueue()
    source = StatusSource(told.put)

    for _ in range(3):
        source.request()

    assert told.qsize() == 1


def test_why_a_group_has_ended_is_told_until_one_of_its_name_is_built_or_closed() -> None:
    told: queue.SimpleQueue[Any] = queue.SimpleQueue()
    source = StatusSource(told.put)

    def ended() -> dict[str, str]:
        source.answer()
        while not isinstance(event := told.get_nowait(), StatusEnded):
            pass
        return event.ended

    for number in range(200):
        source.note_end(f"g{number}", "too many deaths")
    assert list(ended())[-1] == "g199"
    assert len(ended()) == 64
    for number in range(200):
        source.note_end(f"g{number}", "" if number else "too many deaths")
    assert ended() == {"g0": "too many deaths"}
    forget = source.add(lambda: [group("g0")])
    assert ended() == {}
    forget()
    assert ended() == {"g0": "too many deaths"}
    source.note_end("g0", "")
    assert ended() == {}


def test_what_cannot_be_shown_is_told_and_hides_nothing_else() -> None:
    told: queue.SimpleQueue[Any] = queue.SimpleQueue()
    source = StatusSource(told.put)
    source.add(lambda: [1 // 0])  # type: ignore[list-item]  # raises first
    source.add(lambda: [tree("a")])

    source.answer()

    names = [told.get_nowait().event for _ in range(3)]
    assert names == ["phalanx.callback_failed", "phalanx.tree_state", "phalanx.status_ended"]


@pytest.mark.parametrize("watch", [False, True])
def test_only_who_watches_has_the_driver_asked(
    launcher: Launcher, console: Console, watch: bool
) -> None:
    asked: queue.SimpleQueue[float] = queue.SimpleQueue()
    options: dict[str, Any] = {"console": None, "out": console.fd, "err": console.fd}
    options["on_status_request"] = lambda: asked.put(time.monotonic())
    with (
        OutputCollector(launcher, **options) as collector,
        Observer(mine(), watch=watch) as observer,
    ):
        attached(collector, observer)

        if watch:
            for _ in range(2):
                asked.get(timeout=LONG)
            collector.emit(StatusEnded(groups=0, ended={}, at=0.0))
            until(observer, kind="state", event="phalanx.status_ended", groups=0)
        collector.log.info("over")
        collector.emit(StatusEnded(groups=0, ended={}, at=0.0))

        if not watch:
            until(observer, kind="event", event="over")
            assert asked.empty()
