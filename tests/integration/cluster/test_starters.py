"""A node process ends with what has started it, and a new one ends what one before it has left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Generator
from pathlib import Path
from typing import Any

from tests.support.node_groups import kill, seconds_until

from phalanx.cluster.link.messages import NodeOrder, encode
from phalanx.runtime import process_tree

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


def test_a_new_node_ends_what_one_before_it_at_its_place_has_left() -> None:
    with program() as (first, old):
        os.kill(first.pid, signal.SIGSTOP)  # as one that cannot end its node
        with program() as (_, new):
            assert old not in left()
            assert new in left()
        seconds_until(lambda: not left(), time.monotonic())
