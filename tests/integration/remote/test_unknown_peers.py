"""Strangers by the hundred, and what was overheard: a group's ranks are served all the same."""

from __future__ import annotations

import contextlib
import itertools
import resource
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Self

from tests.support.gateway_peers import Berth, Driver, Joined, Posting, Rank

from phalanx.runtime import Frame
from phalanx.runtime.remote.gateway import StrangerRefused
from phalanx.runtime.remote.options import Zmq
from phalanx.runtime.wire.channel import Arrival

LONG = 10.0
MANY = 300
GREETING = b"\xff" + bytes(8) + b"\x7f\3\0CURVE" + bytes(15 + 1 + 31)


class Eavesdropper:
    """Passes one connection to *posting* on, and keeps what its side says in *said*."""

    def __init__(self, posting: Posting, said: bytearray) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self._beyond = knock(posting)
        self._said = said
        self._ends = [self._beyond]
        here = f"tcp://127.0.0.1:{self._server.getsockname()[1]}"
        known = replace(posting.invitation, endpoint=here)
        self.posting = replace(posting, invitation=known)
        self._threads = [threading.Thread(target=self._run)]

    def __enter__(self) -> Self:
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(LONG)
        for end in (*self._ends, self._server):
            end.close()

    def _run(self) -> None:
        near, _ = self._server.accept()
        self._ends.append(near)
        back = threading.Thread(target=self._pass, args=(self._beyond, near, bytearray()))
        self._threads.append(back)
        back.start()
        self._pass(near, self._beyond, self._said)

    def _pass(self, source: socket.socket, sink: socket.socket, said: bytearray) -> None:
        source.settimeout(None)
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                said += data
                sink.sendall(data)


def knock(posting: Posting) -> socket.socket:
    host, _, port = posting.invitation.endpoint.removeprefix("tcp://").partition(":")
    raw = socket.create_connection((host, int(port)), LONG)
    raw.settimeout(LONG)
    return raw


def serves(berth: Berth, rank: Rank, number: int) -> None:
    berth.call(number)
    assert rank.takes_call() == number
    rank.answers(number)
    answer = berth.next()
    assert isinstance(answer, Frame)
    assert answer.call_id == number


def test_connections_that_never_say_enough_keep_nobody_out(
    driver_of: Callable[[Zmq], Driver], rank_of: Callable[..., Rank], joined: Joined
) -> None:
    driver = driver_of(Zmq(heartbeat=0.2, lost_after=3.0))
    first, mine = joined(driver)
    with contextlib.ExitStack() as held:
        idlers: list[socket.socket] = []
        for number in range(MANY):
            idlers.append(held.enter_context(knock(first.posting)))
            idlers[-1].sendall(GREETING[: number % len(GREETING)])
            mine.link.beat(0.0)  # a silent rank would be taken for lost

        second = driver.berth()
        other = rank_of(second.posting)
        other.greets()

        assert isinstance(second.next(), Frame)
        serves(first, mine, 1)
        serves(second, other, 1)
        for idler in idlers:
            with contextlib.suppress(ConnectionError):
                while idler.recv(1 << 16):
                    pass  # until it is shown the door
    assert isinstance(driver.events.get(timeout=LONG), StrangerRefused)


def test_a_rank_for_which_no_descriptor_is_free_costs_no_other(
    driver_of: Callable[[Zmq], Driver], joined: Joined
) -> None:
    driver = driver_of(Zmq())
    first, mine = joined(driver)
    pid = driver.gateway.pid
    assert pid is not None
    used = {int(fd.name) for fd in Path(f"/proc/{pid}/fd").iterdir()}
    free = (number for number in itertools.count() if number not in used)

    few = next(itertools.islice(free, 3, None))
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (few, few))
    second = driver.berth()
    second.control.settimeout(LONG)
    ended = second.control.recv(1)

    assert ended == b""
    assert second.next() is Arrival.END
    serves(first, mine, 1)


def test_strangers_that_hold_every_descriptor_they_can_get_keep_no_new_rank_out(
    driver_of: Callable[[Zmq], Driver], rank_of: Callable[..., Rank], joined: Joined
) -> None:
    driver = driver_of(Zmq())
    first, mine = joined(driver)
    pid = driver.gateway.pid
    assert pid is not None
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    assert soft < hard
    used = len(list(Path(f"/proc/{pid}/fd").iterdir()))

    resource.prlimit(pid, resource.RLIMIT_NOFILE, (used + 20, hard))
    with contextlib.ExitStack() as held:
        for _ in range(60):
            held.enter_context(knock(first.posting))
        second = driver.berth()
        rank_of(second.posting).greets()

        assert isinstance(second.next(), Frame)
    serves(first, mine, 1)


def test_a_recorded_conversation_opens_no_door(
    driver_of: Callable[[Zmq], Driver], rank_of: Callable[..., Rank]
) -> None:
    driver = driver_of(Zmq())
    berth = driver.berth()
    said = bytearray()
    with Eavesdropper(berth.posting, said) as between:
        rank = rank_of(between.posting)
        rank.greets()
        assert isinstance(berth.next(), Frame)
        rank.answers(7)
        assert isinstance(berth.next(), Frame)

        with knock(berth.posting) as again:
            again.sendall(said)
            with contextlib.suppress(ConnectionError):
                while again.recv(1 << 16):
                    pass

        assert isinstance(driver.events.get(timeout=LONG), StrangerRefused)
        assert berth.next(0.2) is Arrival.NOTHING
        serves(berth, rank, 8)
