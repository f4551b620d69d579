"""Strangers by the hundred: a group's ranks are served all the same."""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import resource
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.gateway_peers import LONG, Driver, Joined, Rank, RankAddress, open_beside

from phalanx.runtime import (
    EVERY_RANK,
    Frame,
    Kind,
    LargeFrame,
    Payload,
    RemoteFailure,
    Runtime,
    WorkerRelay,
)
from phalanx.runtime.remote.gateway import PeerRejected
from phalanx.runtime.remote.link import Delivery, Lane
from phalanx.runtime.remote.options import Zmq
from phalanx.runtime.wire.channel import Arrival
from phalanx.runtime.wire.packet_decoder import receive, send
from phalanx.runtime.wire.packet_encoder import write_file
from phalanx.supervision import RuntimeFault

from .test_gateway import GREETING, serves

MANY = 300


def connect_raw(address: RankAddress) -> socket.socket:
    host, _, port = address.invitation.endpoint.removeprefix("tcp://").partition(":")
    raw = socket.create_connection((host, int(port)), LONG)
    raw.settimeout(LONG)
    return raw


def test_connections_that_never_say_enough_keep_nobody_out(
    driver_of: Callable[[Zmq], Driver], rank_of: Callable[..., Rank], joined: Joined
) -> None:
    driver = driver_of(Zmq(heartbeat=0.2, lost_after=3.0))
    first, mine = joined(driver)
    with contextlib.ExitStack() as held:
        idlers: list[socket.socket] = []
        for number in range(MANY):
            idlers.append(held.enter_context(connect_raw(first.address)))
            idlers[-1].sendall(GREETING[: number % len(GREETING)])
            mine.link.beat(0.0)  # a silent rank would be taken for lost

        second = driver.add_rank()
        other = rank_of(second.address)
        other.greets()

        assert isinstance(second.next(), Frame)
        serves(first, mine, 1)
        serves(second, other, 1)
        for idler in idlers:
            with contextlib.suppress(ConnectionError):
                while idler.recv(1 << 16):
                    pass  # until it is shown the door
    assert isinstance(driver.events.get(timeout=LONG), PeerRejected)


def test_a_rank_for_which_no_descriptor_is_free_costs_no_other(
    driver_of: Callable[[Zmq], Driver], joined: Joined
) -> None:
    driver = driver_of(Zmq())
    first, mine = joined(driver)

    keep_descriptors(driver, 3)
    second = driver.add_rank()
    second.control.settimeout(LONG)
    ended = second.control.recv(1)

    assert ended == b""
    assert second.next() is Arrival.END
    serves(first, mine, 1)


def test_a_body_for_which_no_descriptor_is_free_is_that_calls_error(
    driver_of: Callable[[Zmq], Driver], joined: Joined
) -> None:
    driver = driver_of(Zmq())
    first, mine = joined(driver)
    keep_descriptors(driver, 0)
    size = 32 * 1024  # one piece, after which none is awaited
    payload = Payload.in_file(write_file([memoryview(bytes(size))], [0], size), size)
    assert payload.file is not None
    state = LargeFrame(Kind.SAVED, payload.flags, 1, 1, 1, EVERY_RANK, payload.tail)
    state.fds = [payload.file]

    first.call(1)
    assert mine.takes_call() == 1
    mine.line.send(Lane.DATA, state)
    mine.answers(1)
    lost, answer = first.next(), first.next()

    assert isinstance(lost, Frame)
    assert lost.kind == Kind.NOT_SAVED
    with pytest.raises(RuntimeFault, match="Too many open files.*ulimit"):
        raise lost.value().revive()
    assert isinstance(answer, Frame)
    assert answer.kind == Kind.REPLY
    serves(first, mine, 2)


def test_a_rank_is_told_that_the_state_it_restores_was_lost_on_the_way(
    driver_of: Callable[[Zmq], Driver], joined: Joined
) -> None:
    driver = driver_of(Zmq())
    slot, rank = joined(driver)
    keep_descriptors(driver, 0)

    send_state(slot.control)

    told = rank.next()
    assert isinstance(told, Delivery)
    assert (told.lane, told.head[1]) == (Lane.CONTROL, Kind.RESTORE)
    failure = pickle.loads(told.body)
    assert "no descriptor was free" in failure.message


def test_a_worker_is_told_that_the_state_it_restores_found_no_room_on_its_machine(
    driver: Driver, runtime: Runtime
) -> None:
    relay = WorkerRelay(runtime.launcher, "relay")
    slot = driver.add_rank()
    with contextlib.closing(relay):
        beside = open_beside(relay, slot)
        fds = beside.worker_fds()
        with (
            socket.socket(fileno=os.dup(fds["data"])) as data,
            socket.socket(fileno=os.dup(fds["control"])) as control,
        ):
            beside.close()
            data.send(Payload.of(None).packet(Kind.HELLO, epoch=1, call_id=0, incarnation=1))
            assert isinstance(slot.next(), Frame)
            keep_descriptors(relay, 0)

            send_state(slot.control)

            control.settimeout(LONG)
            told = receive(control)
    assert isinstance(told, Frame)
    assert told.kind == Kind.RESTORE
    assert "Too many open files" in RemoteFailure.read(told).message


def send_state(control: socket.socket) -> None:
    """Send a rank a state to restore."""
    size = 32 * 1024
    payload = Payload.in_file(write_file([memoryview(bytes(size))], [0], size), size)
    send(control, payload.packet(Kind.RESTORE, epoch=1, call_id=0), payload.file)
    payload.close()


def keep_descriptors(process: Driver | WorkerRelay, number: int) -> None:
    """Have the gateway of a driver, or a relay, find so many descriptors free, and no more."""
    pid = process.gateway.pid if isinstance(process, Driver) else process.pid
    assert pid is not None
    used = {int(fd.name) for fd in Path(f"/proc/{pid}/fd").iterdir()}
    free = (number for number in itertools.count() if number not in used)
    few = next(itertools.islice(free, number, None))
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (few, few))


def test_unknown_peers_that_hold_every_descriptor_they_can_get_keep_no_new_rank_out(
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
            held.enter_context(connect_raw(first.address))
        second = driver.add_rank()
        rank_of(second.address).greets()

        assert isinstance(second.next(), Frame)
    serves(first, mine, 1)
