"""The session of a run with a target that has no processes: how it ends."""

from __future__ import annotations

import random
import threading
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.chaos import Chaos, Progress, Schedule, Target
from phalanx.chaos import session as of_run
from phalanx.chaos.checker.checker import check
from phalanx.chaos.history.journal import Journal, read_history
from phalanx.chaos.instrumentation.leaks import RunLeaks
from phalanx.chaos.session import Session
from phalanx.supervision import RuntimeFault

pytestmark = pytest.mark.timeout(60)
PLAN = Chaos(duration=600.0, schedule=Schedule(()), recovery_limit=600.0, callers=1)


@pytest.fixture
def closed() -> threading.Event:
    return threading.Event()


def session(folder: Path, closed: threading.Event, on_progress: Any = None) -> Session:
    def traffic(_handle: Any, _chance: random.Random) -> None:
        closed.wait()  # as a call whose rank hangs

    def build() -> Any:
        return SimpleNamespace(close=closed.set), traffic

    target = Target("t", build)
    return Session(PLAN, target, folder, threading.Event(), on_progress)


def test_an_interrupt_does_not_wait_for_calls_and_closes_the_target(
    tmp_path: Path, closed: threading.Event
) -> None:
    def interrupt(_progress: Progress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        session(tmp_path, closed, interrupt).run()

    assert closed.is_set()


def test_a_target_is_closed_although_its_processes_cannot_be_listed(
    tmp_path: Path, closed: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = session(tmp_path, closed)

    def look(*_words: Any) -> None:
        one.interrupt.set()
        raise OSError("too many open files")

    monkeypatch.setattr(RunLeaks, "look", look)
    with pytest.raises(OSError, match="too many open files"):
        one.run()

    assert closed.is_set()


def test_a_record_without_room_for_orders_is_named(
    tmp_path: Path, closed: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "orders").touch()

    with closing(Journal(tmp_path, "driver-1")) as journal, monkeypatch.context() as patch:
        patch.setattr(of_run, "Journal", lambda *_words: journal)
        with pytest.raises(RuntimeFault, match="record of the run could not be written"):
            session(tmp_path, closed)


def test_one_thread_looks_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = RunLeaks(tmp_path)
    held: list[bool] = []
    monkeypatch.setattr(found._detector, "look", lambda: held.append(found._lock.locked()))

    found.look(1)

    assert held == [True]


class Brittle:
    """A target that has given up when it is first seen; its next builds fail, so many times."""

    name = "brittle"

    def __init__(self, failing: float) -> None:
        self.failing = failing
        self.builds = 0

    def build(self) -> Any:
        self.builds += 1
        if 1 < self.builds <= 1 + self.failing:
            raise RuntimeFault("no process")
        return SimpleNamespace(
            handle=None, executor=None, traffic=pytest.fail, is_over=self.builds == 1, close=list
        )


@pytest.mark.parametrize("failing", [4, float("inf")])  # its time is up after three looks
def test_a_target_that_cannot_be_built_again_after_the_last_fault_has_not_healed(
    tmp_path: Path, failing: float
) -> None:
    target: Any = Brittle(failing)
    limit = 60.0 if failing == 4 else 0.5
    plan = Chaos(duration=0.3, schedule=Schedule(()), recovery_limit=limit, callers=1)

    Session(plan, target, tmp_path, threading.Event()).run()

    broken = [(each.invariant, each.message) for each in check(read_history(tmp_path))]
    told = "brittle: it had given up, and could not be built again: no process"
    assert broken == ([] if failing == 4 else [("heals", told)])
