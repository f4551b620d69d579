"""What waits on ZeroMQ, on descriptors of its own; and the memory of its messages."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest
import zmq
from zmq.utils.monitor import parse_monitor_message

from phalanx.runtime.remote.zeromq import (
    IN,
    OUT,
    MessageMemory,
    MessageSocket,
    Readiness,
    event_of,
)

LONG = 10.0
MIB = 1024 * 1024


@pytest.fixture
def readiness() -> Iterator[Readiness]:
    readiness = Readiness()
    yield readiness
    readiness.close()


@pytest.fixture
def ends() -> Iterator[tuple[MessageSocket, MessageSocket]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    near, far = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    near.bind("inproc://both")
    far.connect("inproc://both")
    yield MessageSocket(near), MessageSocket(far)
    context.destroy(linger=0)


def take(sock: MessageSocket, most: int | None = None) -> list[list[bytes]]:
    return [[part.bytes for part in message] for message in sock.messages(most)]


def test_each_message_ends_a_wait(
    readiness: Readiness, ends: tuple[MessageSocket, MessageSocket]
) -> None:
    near, far = ends
    readiness.watch(near.fd, IN)
    assert not near.has_more()

    for number in range(100):
        far.post([b"one", b"%d" % number, b""])
        got: list[list[bytes]] = []
        while not got:
            if not near.has_more():
                assert readiness.wait(LONG) == [(near.fd, IN)]
            got = take(near)
        assert got == [[b"one", b"%d" % number, b""]]
        assert not near.has_more()
        near.post([b"back"])
        assert take(far) == [[b"back"]]


def test_nothing_is_received_where_there_is_nothing(
    ends: tuple[MessageSocket, MessageSocket],
) -> None:
    assert not ends[0].has_more()
    assert ends[0].receive() is None
    assert take(ends[0]) == []


def test_what_is_left_is_told_before_a_wait(ends: tuple[MessageSocket, MessageSocket]) -> None:
    near, far = ends
    for number in range(5):
        far.post([b"%d" % number])

    assert take(near, 3) == [[b"0"], [b"1"], [b"2"]]
    assert near.has_more()
    assert take(near) == [[b"3"], [b"4"]]
    assert not near.has_more()


def test_large_messages_count_as_use_of_their_memory() -> None:
    memory = MessageMemory()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context.socket(zmq.PAIR) as near, context.socket(zmq.PAIR) as far:
        near.bind("inproc://both")
        far.connect("inproc://both")
        ours, theirs = MessageSocket(near, memory), MessageSocket(far)

        ours.post([b"small"])
        theirs.post([b"small"])
        assert take(ours) == [[b"small"]]
        assert not memory.is_used
        ours.post([b"head", bytes(MIB)])
        assert memory.is_used
        memory.is_used = False
        theirs.post([b"head", bytes(MIB)])
        assert len(take(ours)) == 1
        assert memory.is_used
    context.term()


def test_events_of_a_socket_are_those_that_pyzmq_reads() -> None:
    with zmq.Context() as context:
        near, far = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        with near, far, near.get_monitor_socket() as monitor:
            port = near.bind_to_random_port("tcp://127.0.0.1")
            far.connect(f"tcp://127.0.0.1:{port}")
            event = 0
            while event != zmq.EVENT_HANDSHAKE_SUCCEEDED:
                assert monitor.poll(int(LONG * 1000))
                message = monitor.recv_multipart()
                event, value = event_of(message)
                assert parse_monitor_message(message) == {
                    "event": event,
                    "value": value,
                    "endpoint": message[1],
                }


def test_what_is_watched_is_what_was_asked_for_last(readiness: Readiness) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        readiness.watch(ours.fileno(), IN)
        assert readiness.wait(0) == []
        readiness.watch(ours.fileno(), IN | OUT)
        assert readiness.wait(LONG) == [(ours.fileno(), OUT)]
        theirs.send(b"x")
        assert readiness.wait(LONG) == [(ours.fileno(), IN | OUT)]
        readiness.watch(ours.fileno(), 0)
        theirs.close()
        assert readiness.wait(0) == []
        readiness.watch(ours.fileno(), 0)  # as before
        readiness.watch(ours.fileno(), IN)
        ((fd, events),) = readiness.wait(LONG)
        assert fd == ours.fileno()
        assert events & IN


def test_memory_is_kept_between_messages_and_given_back_when_there_are_none() -> None:
    program = """
import os
from phalanx.runtime.remote.zeromq import MessageMemory
def held():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
memory = MessageMemory()
bare = held()
blocks = [bytearray(b"x") * (512 * 1024) for _ in range(16)]
full = held()
del blocks
kept = held()
memory.is_used = True
memory.trim_if_idle(100.0)
memory.trim_if_idle(101.0)
soon = held()
memory.trim_if_idle(103.0)
print(full - bare, kept - bare, soon - bare, held() - bare)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**os.environ, "GLIBC_TUNABLES": ""},
    )
    full, kept, soon, left = map(int, done.stdout.split())
    assert full > 7 * MIB
    assert min(kept, soon) > 7 * MIB
    assert left < 2 * MIB
