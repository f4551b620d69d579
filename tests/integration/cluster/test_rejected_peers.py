"""A gateway of nodes: each node connects once, strangers do not; neither harms another node."""

from __future__ import annotations

import contextlib
import os
import queue
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterator
from functools import partial
from typing import Any

import pytest
import zmq
from tests.support.processes import LONG, wait_until

from phalanx.cluster.link.handshake import greeting_of
from phalanx.cluster.link.messages import (
    Answer,
    Beat,
    Fenced,
    Launch,
    Leave,
    Message,
    Output,
    Piece,
    RankLaunch,
    Started,
    Taken,
    Withdraw,
    decode,
    encode,
)
from phalanx.cluster.link.node_gateway import NodeGateway
from phalanx.cluster.link.node_gateway_main import LARGEST
from phalanx.cluster.link.node_link import LinkState, NodeLink
from phalanx.runtime import EventLoop, Zmq
from phalanx.runtime.process.launcher import Launcher
from phalanx.runtime.remote.link import LARGEST as CUT_OFF

EARLY = "its key is not one of this group's"  # told of a node whose key is on the way, too
GREETING = greeting_of("0" * 32, "127.0.0.1")


class Told:
    """What a gateway tells, as tuples."""

    def __init__(self) -> None:
        self.all: queue.Queue[tuple[Any, ...]] = queue.Queue()

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *what: self.all.put((name, *what))

    def next(self, *but: str) -> tuple[Any, ...]:
        while (told := self.all.get(timeout=LONG))[0] in ("ready", "beat_received", *but) or told[
            -1
        ] == EARLY:
            pass
        return told


class Peer:
    """A node that the test plays."""

    def __init__(self, gateway: NodeGateway, *, key: NodeLink | None = None) -> None:
        self.link = NodeLink(gateway.endpoint, gateway.key)
        if key is not None:
            self.link.public, self.link.secret = key.public, key.secret
            self.link.renew()

    def connect(self, *states: LinkState) -> LinkState:
        self.link.connect()
        return self.wait(*states or (LinkState.OPEN,))

    def wait(self, *states: LinkState) -> LinkState:
        def is_there() -> bool:
            self.link.look()
            if self.link.state is LinkState.REFUSED and LinkState.OPEN in states:
                self.link.renew()  # its key is on the way to the gateway
                self.link.connect()
            return self.link.state in states

        wait_until(is_there, "the state of a link")
        return self.link.state

    def receive(self) -> Message:
        """Return the next message but for looks whether it is there."""
        while (message := self.link.receive()) is None or message == Answer(number=0):
            assert self.link.socket.poll(int(LONG * 1000))
        return message

    def close(self) -> None:
        self.link.socket.setsockopt(zmq.LINGER, 0)
        self.link.close()


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def gateway(loop: EventLoop, launcher: Launcher, told: Told) -> Iterator[NodeGateway]:
    events: Any = told
    gateway = NodeGateway(loop, launcher, Zmq(), group="tp", events=events)
    gateway.open()
    yield gateway
    gateway.close()


@pytest.fixture
def peer_of(gateway: NodeGateway) -> Iterator[Callable[..., Peer]]:
    with contextlib.ExitStack() as made:
        yield lambda **options: made.enter_context(contextlib.closing(Peer(gateway, **options)))


@pytest.fixture
def node(gateway: NodeGateway, peer_of: Callable[..., Peer], told: Told) -> Peer:
    """Node 1, which has greeted."""
    peer = peer_of()
    gateway.admit(1, peer.link.public)
    peer.connect()
    peer.link.send(GREETING)
    assert told.next()[:3] == ("received", 1, GREETING)
    return peer


def launch(number: int) -> Launch:
    rank = RankLaunch(rank=0, incarnation=1, entry="m:f", label="tp/0", payload=b"x" * 1_000_000)
    return Launch(number=number, ranks=(rank,))


def is_served(node: Peer, number: int = 1) -> bool:
    node.link.send(Beat(number=number))
    return node.receive() == Answer(number=number)


def test_an_unknown_key_is_refused_and_told_once(
    node: Peer, peer_of: Callable[..., Peer], told: Told
) -> None:
    for _ in range(2):
        assert peer_of().connect(LinkState.REFUSED) is LinkState.REFUSED

    assert is_served(node)
    whys = [what[2] for what in list(told.all.queue) if what[0] == "refused"]
    assert len(whys) <= 1  # it may have been told before, while its own key was on the way
    assert set(whys) <= {EARLY}


def test_a_second_connection_of_a_node_brings_beats_and_nothing_else(
    node: Peer, gateway: NodeGateway, peer_of: Callable[..., Peer]
) -> None:
    second = peer_of(key=node.link)
    second.connect()

    assert is_served(second, 7)
    second.link.send(Started(number=1, pids=(1,)))
    assert second.receive() == Fenced(why="another process has greeted with this key")
    assert is_served(node, 8)
    gateway.silence(1, "it is lost")
    assert node.receive() == Fenced(why="it is lost")
    second.link.send(Beat(number=9))
    assert not second.link.socket.poll(300)


def test_a_beat_that_overtakes_the_greeting_of_its_node_does_it_no_harm(
    gateway: NodeGateway, peer_of: Callable[..., Peer], told: Told
) -> None:
    node = peer_of()
    second = peer_of(key=node.link)
    gateway.admit(1, node.link.public)
    node.connect()
    second.connect()

    second.link.send(Beat(number=1))  # while the greeting is sent again, which was lost
    gateway.ask(1)
    assert told.next()[0] == "asked"
    node.link.send(GREETING)

    assert told.next()[:2] == ("received", 1)
    assert is_served(second, 2)
    assert is_served(node, 3)


def test_a_stranger_is_told_of_though_a_node_has_two_connections(
    node: Peer, gateway: NodeGateway, peer_of: Callable[..., Peer], told: Told
) -> None:
    second = peer_of(key=node.link)
    second.connect()
    assert is_served(second, 7)

    host, _, port = gateway.endpoint.partition("://")[2].rpartition(":")
    stranger = socket.create_connection((host, int(port)), LONG)
    with stranger, contextlib.suppress(ConnectionError):
        stranger.sendall(b"GET / HTTP/1.1\r\n" * 64)
        while stranger.recv(1 << 16):
            pass

    assert told.next()[0] == "refused"
    assert is_served(node, 8)


def test_of_two_processes_with_one_key_the_first_to_greet_serves(
    gateway: NodeGateway, peer_of: Callable[..., Peer], told: Told
) -> None:
    first = peer_of()
    second = peer_of(key=first.link)
    gateway.admit(1, first.link.public)
    first.connect()
    second.connect()

    first.link.send(GREETING)
    assert told.next()[:2] == ("received", 1)
    second.link.send(GREETING)

    assert second.receive() == Fenced(why="another process has greeted with this key")
    assert told.next()[2] == "another process has greeted with this key"
    assert is_served(first)


def test_a_node_that_greets_twice_is_told_of(node: Peer, told: Told) -> None:
    node.link.send(GREETING)

    assert told.next() == ("misbehaved", 1, "it has greeted twice")


@pytest.mark.parametrize(
    "parts", [[b"\x80\x04K\x01."], [b"{}"], encode(Fenced(why="")), [b"", b"", b""]]
)
def test_what_is_no_message_of_a_node_is_told_once(
    node: Peer, told: Told, parts: list[bytes]
) -> None:
    for _ in range(3):
        node.link.socket.send_multipart(parts)

    assert told.next()[:2] == ("misbehaved", 1)
    assert is_served(node)
    assert "misbehaved" not in [what for what, *_ in list(told.all.queue)]


def test_orders_pass_a_long_launch_and_one_that_is_withdrawn_is_not_sent_on(
    node: Peer, gateway: NodeGateway
) -> None:
    node.link.socket.setsockopt(zmq.RCVTIMEO, int(LONG * 1000))
    gateway.send(1, launch(7))
    while not isinstance(decode(node.link.socket.recv_multipart()), Piece):
        pass

    gateway.send(1, Leave())  # no piece is sent before that one has been taken
    assert node.receive() == Leave()
    gateway.send(1, Withdraw(number=7))
    assert node.receive() == Withdraw(number=7)
    node.link.send(Taken())
    gateway.send(1, launch(8))
    assert node.receive() == launch(8)


def test_a_short_order_is_sent_though_the_driver_has_no_descriptor_free(
    node: Peer, gateway: NodeGateway
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, limits[1]))
    try:
        assert gateway.send(1, Leave())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)

    assert node.receive() == Leave()


def test_an_order_whose_message_was_lost_for_want_of_a_descriptor_loses_its_node_alone(
    node: Peer, gateway: NodeGateway, told: Told
) -> None:
    gateway._send({"to": 1, "sizes": [2]})

    assert told.next()[:2] == ("misbehaved", 1)
    assert is_served(node)


def test_a_message_without_end_ends_the_link(node: Peer, told: Told) -> None:
    node.link.socket.send(b" " * (LARGEST + 1))
    assert told.next()[:2] == ("misbehaved", 1)

    node.link.socket.send(b" " * (CUT_OFF + 1))

    assert node.wait(LinkState.ENDED) is LinkState.ENDED
    assert told.next()[:2] == ("closed", 1)


def test_a_silenced_node_is_fenced_and_never_answered_again(
    node: Peer, gateway: NodeGateway, told: Told
) -> None:
    before = time.monotonic()
    assert is_served(node)

    gateway.silence(1, "it is lost")

    what, number, last = told.next()
    assert (what, number) == ("silenced", 1)
    assert before <= last <= time.monotonic()
    assert node.receive() == Fenced(why="it is lost")
    node.link.send(Beat(number=2))
    node.link.send(Started(number=1, pids=()))
    assert told.next()[:2] == ("received", 1)
    assert not node.link.socket.poll(300)


def test_the_end_of_a_link_is_told_after_all_that_came_over_it(
    node: Peer, gateway: NodeGateway, told: Told
) -> None:
    for number in range(50):
        node.link.send(Started(number=number, pids=()))
    node.link.close()

    came = [told.next() for _ in range(51)]

    assert [message.number for _, _, message, _ in came[:50]] == list(range(50))
    assert came[50][:2] == ("closed", 1)
    node.link = NodeLink(node.link._endpoint, gateway.key)  # for the fixture to close


def test_a_gateway_that_dies_before_it_is_ready_is_replaced_too(gateway: NodeGateway) -> None:
    def is_replaced(pid: int) -> bool:
        return gateway.pid not in (None, pid)

    for _ in range(2):
        pid = gateway.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        wait_until(partial(is_replaced, pid), "a successor")

    wait_until(lambda: bool(gateway.endpoint), "its address")


def test_no_more_output_is_taken_than_a_stopped_driver_has_room_for(
    node: Peer, loop: EventLoop
) -> None:
    stops, goes_on = threading.Event(), threading.Event()

    def stop() -> None:
        stops.set()
        goes_on.wait(LONG)

    loop.post(stop)
    assert stops.wait(LONG)
    output = Output(rank=0, incarnation=1, stream="stdout", text="x" * 8000)
    for _ in range(200):
        node.link.send(output)

    taken = 0
    while node.link.socket.poll(500):
        taken += node.receive() == Taken()
    goes_on.set()

    assert taken < 100
    assert [node.receive() for _ in range(200 - taken)] == [Taken()] * (200 - taken)


def test_a_recorded_greeting_gets_nowhere(
    gateway: NodeGateway, peer_of: Callable[..., Peer], told: Told
) -> None:
    said = bytearray()
    peer = peer_of()
    gateway.admit(1, peer.link.public)
    with eavesdropper(gateway.endpoint, said) as endpoint:
        peer.link.socket.connect(endpoint)
        peer.wait(LinkState.OPEN)
        peer.link.send(GREETING)
        assert told.next()[:2] == ("received", 1)
        gateway.forget(1)
        gateway.admit(1, peer.link.public)  # as if its key were good again
        gateway.ask(1)
        assert told.next("refused")[0] == "asked"

        with connect_raw(gateway.endpoint) as raw:
            raw.sendall(said)
            while raw.recv(1 << 16):
                pass

    gateway.ask(2)
    assert told.next("closed", "refused")[0] == "asked"


def test_a_question_is_answered_however_long_the_time_between_beats(
    loop: EventLoop, launcher: Launcher, told: Told
) -> None:
    events: Any = told
    options = Zmq(heartbeat=10 * LONG, lost_after=20 * LONG)
    with contextlib.closing(NodeGateway(loop, launcher, options, group="tp", events=events)) as far:
        far.open()
        far.ask(1)
        assert told.next()[0] == "asked"


@contextlib.contextmanager
def eavesdropper(endpoint: str, said: bytearray) -> Generator[str]:
    """Pass one connection on, and keep what its side says in *said*; yield where it listens."""
    with socket.create_server(("127.0.0.1", 0)) as server, connect_raw(endpoint) as beyond:
        ends: list[socket.socket] = []

        def copy(source: socket.socket, sink: socket.socket, kept: bytearray) -> None:
            with contextlib.suppress(OSError):
                while data := source.recv(1 << 16):
                    kept += data
                    sink.sendall(data)

        def run() -> None:
            near, _ = server.accept()
            ends.append(near)
            back = threading.Thread(target=copy, args=(beyond, near, bytearray()))
            back.start()
            copy(near, beyond, said)
            beyond.shutdown(socket.SHUT_RDWR)
            back.join()
            near.close()

        thread = threading.Thread(target=run)
        thread.start()
        yield f"tcp://127.0.0.1:{server.getsockname()[1]}"
        for end in ends:
            end.shutdown(socket.SHUT_RDWR)
        thread.join(LONG)


def connect_raw(endpoint: str) -> socket.socket:
    host, _, port = endpoint.removeprefix("tcp://").partition(":")
    raw = socket.create_connection((host, int(port)), LONG)
    raw.settimeout(LONG)
    return raw
