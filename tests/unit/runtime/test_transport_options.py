"""What may be said about a transport, and what is refused at once."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.workers import Echo

from phalanx.actors import Executor, Launch
from phalanx.runtime import Zmq, check_transport
from phalanx.supervision import SpecError


@pytest.mark.parametrize(
    ("options", "listens_on"),
    [
        ({}, "tcp://127.0.0.1:*"),
        ({"bind": "tcp://127.0.0.1:5555"}, "tcp://127.0.0.1:5555"),
        ({"bind": "tcp://[::1]"}, "tcp://[::1]:*"),
        ({"bind": "tcp://[::1]:7"}, "tcp://[::1]:7"),
        ({"bind": "tcp://eth0"}, "tcp://eth0:*"),
        ({"bind": "tcp://*:5555", "advertise": "tcp://node1:5555"}, "tcp://*:5555"),
        ({"ipc": True}, ""),
    ],
)
def test_it_listens_where_it_was_told_and_else_on_loopback(
    options: dict[str, Any], listens_on: str
) -> None:
    assert Zmq(**options).listens_on == listens_on


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"bind": "127.0.0.1"}, "transport.bind"),
        ({"bind": "ipc:///tmp/x"}, "transport.bind"),
        ({"bind": "tcp://"}, "transport.bind"),
        ({"bind": "tcp://127.0.0.1:99999"}, "transport.bind"),
        ({"bind": "tcp://127.0.0.1:http"}, "transport.bind"),
        ({"bind": "tcp://::1"}, "transport.bind"),
        ({"bind": "tcp://[::1"}, "transport.bind"),
        ({"bind": "tcp://1.2.3.4/x"}, "transport.bind"),
        ({"bind": 5}, "transport.bind"),
        ({"bind": "tcp://*"}, "transport.bind"),
        ({"bind": "tcp://0.0.0.0:5555"}, "transport.bind"),
        ({"bind": "tcp://[::]:5555"}, "transport.bind"),
        ({"bind": "tcp://[0:0::0]:5555"}, "transport.bind"),
        ({"bind": "tcp://*", "advertise": "tcp://node1:5555"}, "transport.bind"),
        ({"advertise": "tcp://node1:5555"}, "transport.bind"),
        ({"advertise": "tcp://node1"}, "transport.advertise"),
        ({"advertise": "tcp://*:5555"}, "transport.advertise"),
        ({"ipc": True, "bind": "tcp://127.0.0.1:1"}, "transport.ipc"),
        ({"ipc": True, "advertise": "tcp://node1:1"}, "transport.ipc"),
        ({"heartbeat": 0}, "transport.heartbeat"),
        ({"heartbeat": float("nan")}, "transport.heartbeat"),
        ({"lost_after": float("inf")}, "transport.lost_after"),
        ({"heartbeat": 6.0}, "transport.heartbeat"),
        ({"lost_after": 1.0}, "transport.lost_after"),
    ],
)
def test_what_makes_no_sense_is_refused_by_its_field(options: dict[str, Any], field: str) -> None:
    with pytest.raises(SpecError) as caught:
        Zmq(**options)

    assert caught.value.field == field


def test_a_transport_has_a_name_or_is_a_value() -> None:
    assert check_transport("local") is None
    assert check_transport("zmq") == Zmq()
    assert check_transport(Zmq(ipc=True)) == Zmq(ipc=True)
    with pytest.raises(SpecError, match="phalanx.runtime.Zmq"):
        check_transport("tcp")


def test_an_inline_rank_has_no_transport() -> None:
    with pytest.raises(SpecError, match="inline"):
        Executor(Echo, 1, launch=Launch(method="inline", transport="zmq"))
