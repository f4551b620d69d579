"""An engine with a broker: what is told of nodes, once each, whatever becomes of the broker."""

from __future__ import annotations

import contextlib
import json
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.node_groups import kill
from tests.support.processes import is_alive, wait_until

from phalanx.cluster.driver.brokered_engine import BrokeredEngine
from phalanx.cluster.driver.engine import Cluster
from phalanx.cluster.link.messages import NodeOrder
from phalanx.runtime import EventLoop
from phalanx.supervision import ExitReason

ORDER = NodeOrder(
    number=0, endpoint="tcp://10.0.0.1:1", gateway_key="k", lease=1.0, join=1.0, place="p"
)


class Told:
    """What the engine tells, one thing after the other."""

    def __init__(self) -> None:
        self.news = queue.SimpleQueue[tuple[Any, ...]]()

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *what, **more: self.news.put((name, *what, *more.values()))

    def next(self, count: int = 1) -> list[tuple[Any, ...]]:
        return [self.news.get(timeout=60) for _ in range(count)]


@pytest.fixture
def told() -> Any:
    return Told()


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    return tmp_path / "journal"


@pytest.fixture
def engine(loop: EventLoop, journal: Path) -> Iterator[BrokeredEngine]:
    opening = {"journal": str(journal)}
    engine = BrokeredEngine(loop, "broker", "tests.support.fake_broker", opening)
    with contextlib.closing(engine):
        yield engine


def test_what_the_broker_tells_is_told_of_its_node(engine: BrokeredEngine, told: Any) -> None:
    assert engine.open() == Cluster(address="10.0.0.1", ranks_per_node=4)
    engine.reserve(7, told)
    assert told.next() == [("offered", 7)]
    engine.start(7, ORDER)

    assert told.next(6) == [
        ("refused", "10.0.0.9", "it is no kettle"),
        ("started", 7, "key of 7"),
        ("unreached", 7, "it is behind a wall"),
        ("suspect_reported", 7, "it hums"),
        ("engine_gone", "the stove is cold"),
        ("gone", 7, "it boiled", True),
    ]
    assert engine.shortage() == "there are 3 kettles"
    engine.reserve(8, told)
    assert told.next() == [("offered", 8)]
    assert engine.shortage() == ""


def test_what_is_asked_for_at_once_is_asked_of_the_broker_at_once(
    engine: BrokeredEngine, told: Any, loop: EventLoop, journal: Path
) -> None:
    engine.open()

    def ask() -> None:
        for number in range(3):
            engine.reserve(number, told)

    loop.call(ask)

    assert told.next(3) == [("offered", number) for number in range(3)]
    assert [json.loads(line) for line in journal.read_text().splitlines()] == [
        {"reserve": []},
        {"reserve": [0, 1, 2]},
    ]


def test_a_node_asked_for_while_no_broker_can_be_started_is_offered_by_the_next(
    engine: BrokeredEngine, told: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.open()
    engine.reserve(0, told)
    told.next()
    assert engine.pid is not None
    failed = threading.Event()
    exited = engine._exited  # the start that fails is seen nowhere else

    def see(pid: int | None, reason: ExitReason) -> bool:
        again = exited(pid, reason)
        if pid is None:
            monkeypatch.undo()
            failed.set()
        return again

    monkeypatch.setattr(engine._helper, "_on_exit", see)
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    kill(engine.pid)
    assert [each[:2] for each in told.next()] == [("gone", 0)]
    assert engine.shortage().startswith("the broker has ended: killed")
    engine.reserve(1, told)

    assert failed.wait(60)
    assert told.next() == [("offered", 1)]


def test_a_close_releases_what_is_left_and_ends_the_broker(
    engine: BrokeredEngine, told: Any, journal: Path
) -> None:
    engine.open()
    engine.reserve(0, told)
    told.next()
    pid = engine.pid
    assert pid is not None

    engine.close()

    assert json.loads(journal.read_text().splitlines()[-1]) == {"release": 0}
    wait_until(lambda: not is_alive(pid))
