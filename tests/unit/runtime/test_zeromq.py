"""What waits on ZeroMQ, on descriptors of its own; and the memory of its messages."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest
import zmq

from phalanx.runtime.remote.zeromq import (
    IN,
    OUT,
    Readiness,
    descriptor,
    has_message,
    post,
    receive,
)

LONG = 10.0
MIB = 1024 * 1024


@pytest.fixture
def readiness() -> Iterator[Readiness]:
    readiness = Readiness()
    yield readiness
    readiness.close()


@pytest.fixture
def ends() -> Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    near, far = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    near.bind("inproc://both")
    far.connect("inproc://both")
    yield near, far
    context.destroy(linger=0)


def take(sock: zmq.Socket[bytes]) -> list[bytes]:
    return [part.bytes for part in receive(sock)]


def wait_for(readiness: Readiness, sock: zmq.Socket[bytes]) -> None:
    while not has_message(sock):
        assert readiness.wait(LONG) == [(descriptor(sock), IN)]


def test_each_message_ends_a_wait_once_it_was_asked_for(
    readiness: Readiness, ends: tuple[zmq.Socket[bytes], zmq.Socket[bytes]]
) -> None:
    near, far = ends
    readiness.watch(descriptor(near), IN)

    for number in range(100):
        while has_message(near):
            receive(near)
        post(far, [b"one", b"%d" % number, b""])
        wait_for(readiness, near)
        assert take(near) == [b"one", b"%d" % number, b""]
        post(near, [b"back"])
        assert take(far) == [b"back"]


def test_nothing_is_received_where_there_is_nothing(
    ends: tuple[zmq.Socket[bytes], zmq.Socket[bytes]],
) -> None:
    assert not has_message(ends[0])
    with pytest.raises(zmq.Again):
        receive(ends[0])


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
