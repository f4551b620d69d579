"""A helper process is restarted, knows what its predecessor knew, and is gone after `close`."""

from __future__ import annotations

import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.support.processes import LONG, soon, wait_until

from phalanx.runtime.process import interpreter
from phalanx.runtime.process.child_process import Process
from phalanx.runtime.process.helper import Helper
from phalanx.runtime.threads.event_loop import EventLoop
from phalanx.supervision import RuntimeFault

# Answers each message; ends at end of file, or says one thing more and ends with code 3.
ECHO = """
import os, socket, sys
sock = socket.socket(fileno=int(sys.argv[1]))
while data := sock.recv(100):
    if data == b"end":
        sock.send(b"last word")
        os._exit(3)
    sock.send(b"heard " + data)
"""


class Echo:
    """A helper that echoes, and what a test learns of it."""

    def __init__(self, loop: EventLoop, **options: Any) -> None:
        self.received: queue.Queue[bytes] = queue.Queue()
        self.exits: queue.Queue[Any] = queue.Queue()
        self.known: list[bytes] = []
        self.restarts = True
        self.gate = threading.Event()
        self.gate.set()
        self.begun = threading.Event()
        self._loop = loop
        self.helper = Helper(
            loop,
            "echo",
            self.spawn,
            on_message=lambda data, _: self.received.put(data),
            on_exit=self.exited,
            replay=lambda: ((data, ()) for data in self.known),
            **options,
        )

    def spawn(self, control: socket.socket, on_exit: Callable[[Process], None]) -> Process:
        self.begun.set()
        assert self.gate.wait(LONG)
        command = [sys.executable, "-S", "-c", ECHO]
        return interpreter.start_helper(
            self._loop, "echo", command, [], control=control, on_exit=on_exit
        )

    def exited(self, pid: int | None, reason: Any) -> bool:
        self.exits.put((pid, str(reason), self.received.qsize()))
        return self.restarts


@pytest.fixture
def echo(loop: EventLoop, events: list[Any]) -> Iterator[Echo]:
    echo = Echo(loop, emit=events.append)
    yield echo
    echo.helper.close(soon())


def test_messages_reach_the_process_and_its_answers_come_before_its_exit(echo: Echo) -> None:
    echo.restarts = False
    echo.helper.start()
    pid = echo.helper.pid

    assert echo.helper.send(b"one")
    assert echo.helper.send(b"end")

    assert echo.exits.get(timeout=LONG) == (pid, "crash (exit code 3)", 2)
    assert echo.received.get_nowait() == b"heard one"
    assert echo.received.get_nowait() == b"last word"
    assert echo.helper.pid is None
    assert not echo.helper.send(b"two")


def test_one_whose_end_is_not_told_yet_is_ending(echo: Echo, loop: EventLoop) -> None:
    assert not echo.helper.is_ending
    echo.restarts = False
    echo.helper.start()
    assert not echo.helper.is_ending
    stops, goes_on = threading.Event(), threading.Event()

    def stop() -> None:
        stops.set()
        goes_on.wait(LONG)

    loop.post(stop)
    assert stops.wait(LONG)
    assert echo.helper.pid is not None

    os.kill(echo.helper.pid, signal.SIGKILL)
    wait_until(lambda: echo.helper.is_ending)
    assert echo.exits.empty()
    goes_on.set()

    echo.exits.get(timeout=LONG)
    assert not echo.helper.is_ending


def test_a_successor_is_told_first_what_its_predecessor_knew(echo: Echo, events: list[Any]) -> None:
    echo.helper.start()
    old = echo.helper.pid
    assert old is not None
    echo.known += [b"a", b"b"]

    os.kill(old, signal.SIGKILL)
    wait_until(lambda: echo.helper.pid not in (None, old) and echo.helper.send(b"new"))

    said = [echo.received.get(timeout=LONG) for _ in range(3)]
    assert said == [b"heard a", b"heard b", b"heard new"]
    wait_until(lambda: [(event.helper, event.replaced) for event in events] == [("echo", old)])


def test_closing_during_a_start_ends_what_is_being_started(echo: Echo) -> None:
    echo.gate.clear()
    echo.helper.start_soon()
    assert echo.begun.wait(LONG)

    echo.helper.close(time.monotonic())
    echo.gate.set()

    wait_until(lambda: not echo.helper._starting.locked())
    assert echo.helper.pid is None
    with pytest.raises(RuntimeFault, match="the echo is closed"):
        echo.helper.start()


@pytest.mark.parametrize(
    ("stopped", "ask", "code"), [(True, False, None), (True, True, None), (False, True, 0)]
)
def test_a_process_is_gone_after_close_and_not_killed_if_it_can_be_asked_to_end(
    echo: Echo, stopped: bool, ask: bool, code: int | None
) -> None:
    echo.helper.start()
    process = echo.helper._process
    assert process is not None
    if stopped:
        os.kill(process.pid, signal.SIGSTOP)
        wait_until(process.is_stopped)

    echo.helper.close(soon(), ask=ask)

    assert process.status is not None
    assert process.status.code == code
    assert echo.exits.empty()
