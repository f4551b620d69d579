"""A node process ends with what has started it, and a new one ends what one before it has left."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.support.node_groups import kill, seconds_until
from tests.support.processes import LONG

from phalanx.cluster.link.messages import NodeOrder, encode
from phalanx.cluster.node_process.starter import NodeStarter
from phalanx.runtime import EventLoop, process_tree

SOON = 5.0  # seconds for what takes a tenth of one on an idle machine
ORDER = NodeOrder(
    number=0,
    endpoint="tcp://127.0.0.1:9",  # nothing listens there
    gateway_key="rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7",
    lease=30.0,
    join=60.0,
    place=uuid.uuid4().hex,
)
PROGRAM = [sys.executable, "-m", "tests.support.node_agent", encode(ORDER)[0].decode()]


def left() -> set[int]:
    """Return all that came from nodes at that place."""
    return set(process_tree.find(process_tree.TreeTarget(f"{ORDER.place}/".encode()))[0])


@contextlib.contextmanager
def program() -> Generator[tuple[subprocess.Popen[str], int]]:
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(PROGRAM, cwd=Path(__file__).parents[3], **pipes) as process:
        assert process.stdout is not None
        pid = json.loads(process.stdout.readline())["pid"]
        seconds_until(lambda: len(left()) >= 2, time.monotonic())  # its guardian too
        try:
            yield process, pid
        finally:
            process.kill()


def test_a_node_process_ends_with_its_starter() -> None:
    with program() as (process, node):
        assert node in left()

        at = kill(process.pid)

        assert seconds_until(lambda: not left(), at) < SOON


def test_a_starter_is_closed_when_its_sweep_is_over_which_would_end_the_next_node(
    loop: EventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone, sweeps, go_on = threading.Event(), threading.Event(), threading.Event()
    starter = NodeStarter(loop, ORDER, on_key=lambda _: None, on_gone=lambda *_: gone.set())
    starter.start()
    sweep = starter._sweep

    def slow_sweep() -> Sequence[process_tree.Victim]:
        if threading.current_thread().name == "phalanx-node-sweep":
            sweeps.set()
            assert go_on.wait(LONG)
        return sweep()

    monkeypatch.setattr(starter, "_sweep", slow_sweep)
    kill(starter.pid or 0)
    assert sweeps.wait(LONG)

    closing = threading.Thread(target=starter.close, args=(time.monotonic() + SOON,))
    closing.start()
    closing.join(0.3)

    assert closing.is_alive()
    go_on.set()
    closing.join(LONG)
    assert gone.is_set()


def test_the_end_of_a_node_is_told_though_no_thread_is_to_be_had_for_its_sweep(
    loop: EventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone: queue.Queue[tuple[str, bool]] = queue.Queue()
    starter = NodeStarter(
        loop, ORDER, on_key=lambda _: None, on_gone=lambda why, swept: gone.put((why, swept))
    )
    starter.start()
    assert starter.pid is not None
    start = threading.Thread.start

    def refuse_sweeps(thread: threading.Thread) -> None:
        if thread.name == "phalanx-node-sweep":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse_sweeps)
    kill(starter.pid)

    why, is_swept = gone.get(timeout=LONG)
    assert "SIGKILL" in why
    assert is_swept
    starter.close(time.monotonic() + SOON)


def test_a_new_node_ends_what_one_before_it_at_its_place_has_left() -> None:
    with program() as (first, old):
        os.kill(first.pid, signal.SIGSTOP)  # as one that cannot end its node
        with program() as (_, new):
            assert old not in left()
            assert new in left()
        seconds_until(lambda: not left(), time.monotonic())
