"""A driver is asked what it looks like only while somebody looks."""

from __future__ import annotations

import os
import queue
import select
from typing import Any

import pytest
from tests.support.output import Console

from phalanx.runtime.observe.status import ChildGlance, GlanceEnded, Glances, TreeGlance
from phalanx.runtime.observe.stream import Observer
from phalanx.runtime.output.collector import OutputCollector
from phalanx.runtime.process.launcher import Launcher
from phalanx.runtime.threads.event_loop import EventLoop

from .test_observers import attached, mine, until

LONG = 30.0


def tree(path: str) -> TreeGlance:
    root = ChildGlance(path=path, restart="", state="running", incarnation=1, last_exit="")
    return TreeGlance(root=root, children=(), hidden=0, at=0.0)


def test_a_look_is_answered_by_all_and_each_tree_once(loop: EventLoop) -> None:
    told: queue.SimpleQueue[Any] = queue.SimpleQueue()
    glances = Glances(loop, told.put)
    glances.add(lambda: [tree("a")])
    forget = glances.add(lambda: [tree("b")])
    glances.add(lambda: [tree("a"), tree("c")])
    forget()

    os.eventfd_write(glances.wish, 1)

    seen = [told.get(timeout=LONG) for _ in range(3)]
    assert [each.root.path for each in seen[:2]] == ["a", "c"]
    assert isinstance(seen[2], GlanceEnded)
    glances.close()


def test_what_cannot_be_shown_is_told_and_hides_nothing_else(loop: EventLoop) -> None:
    told: queue.SimpleQueue[Any] = queue.SimpleQueue()
    glances = Glances(loop, told.put)
    glances.add(lambda: [1 // 0])  # type: ignore[list-item]  # raises first
    glances.add(lambda: [tree("a")])

    os.eventfd_write(glances.wish, 1)

    names = [told.get(timeout=LONG).event for _ in range(3)]
    assert names == ["phalanx.callback_failed", "phalanx.tree_state", "phalanx.glance_ended"]
    glances.close()


@pytest.mark.parametrize("watch", [False, True])
def test_only_who_watches_has_the_driver_asked(
    launcher: Launcher, console: Console, watch: bool
) -> None:
    wish = os.eventfd(0, os.EFD_CLOEXEC)
    options: dict[str, Any] = {"console": None, "out": console.fd, "err": console.fd}
    with (
        OutputCollector(launcher, wish=wish, **options) as scribe,
        Observer(mine(), watch=watch) as observer,
    ):
        attached(scribe, observer)

        if watch:
            for _ in range(2):
                assert select.select([wish], [], [], LONG)[0]
                os.eventfd_read(wish)
            scribe.emit(GlanceEnded(groups=0, at=0.0))
            until(observer, kind="state", event="phalanx.glance_ended", groups=0)
        scribe.log.info("over")
        scribe.emit(GlanceEnded(groups=0, at=0.0))

        if not watch:
            until(observer, kind="event", event="over")
            assert not select.select([wish], [], [], 0)[0]
    os.close(wish)
