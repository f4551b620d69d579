"""A node's end of its control link, and other ends that come and go."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
import zmq
from tests.support.processes import LONG, wait_until

from phalanx.cluster.link.messages import Beat, decode
from phalanx.cluster.link.node_link import LinkState, NodeLink

PUBLIC, SECRET = zmq.curve_keypair()
Listen = Callable[..., "zmq.Socket[bytes]"]


@pytest.fixture
def listen() -> Iterator[Listen]:
    """Makes other ends that listen."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def listen(endpoint: str = "tcp://127.0.0.1:*") -> zmq.Socket[bytes]:
        router = context.socket(zmq.ROUTER)
        router.setsockopt(zmq.CURVE_SERVER, 1)
        router.setsockopt(zmq.CURVE_SECRETKEY, SECRET)

        def is_bound() -> bool:  # one that was closed lets the port go a little later
            with contextlib.suppress(zmq.ZMQError):
                router.bind(endpoint)
                return True
            return False

        wait_until(is_bound)
        return router

    yield listen
    context.destroy(linger=0)


def test_a_link_that_has_ended_stays_so_and_what_was_said_on_it_reaches_no_other_end(
    listen: Listen,
) -> None:
    first = listen()
    endpoint = first.getsockopt_string(zmq.LAST_ENDPOINT)
    with contextlib.closing(NodeLink(endpoint, PUBLIC.decode())) as link:

        def is_heard(end: zmq.Socket[bytes], number: int) -> bool:
            link.send(Beat(number=number))
            return bool(end.poll(100))

        link.connect()
        wait_until(lambda: is_heard(first, 1))
        first.close()
        second = listen(endpoint)
        wait_until(lambda: is_heard(second, 2))  # by ZeroMQ, before the link is looked at
        link.look()
        assert link.state is LinkState.ENDED

        second.close()
        for _ in range(10):
            link.send(Beat(number=3))
        link.renew()
        third = listen(endpoint)
        link.connect()
        wait_until(lambda: is_heard(third, 4))

        assert third.poll(int(LONG * 1000))
        while third.poll(500):  # in which what is left of the old link would connect, too
            assert decode(third.recv_multipart()[1:]) == Beat(number=4)
