"""The process beside the workers of a group: one after the other, each known by its number."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable

import pytest
from tests.support.gateway_peers import LONG, Driver, open_beside
from tests.support.processes import wait_until
from tests.support.relayed_links import Relay, free_port

from phalanx.runtime import Frame, Kind, Payload, RelaySlot, Runtime, WorkerRelay
from phalanx.runtime.linux import procfs
from phalanx.runtime.remote.gateway import PeerRejected
from phalanx.runtime.remote.link import WINDOW
from phalanx.runtime.remote.options import Zmq
from phalanx.runtime.wire.channel import Arrival
from phalanx.runtime.wire.packet_decoder import receive


def test_the_end_of_each_is_told_with_the_number_that_its_slots_have(
    driver: Driver, runtime: Runtime
) -> None:
    told: list[tuple[int, str, bool]] = []
    relay = WorkerRelay(runtime.launcher, "relay", lambda *exit: told.append(exit))
    driver.gateway.open()

    def slot() -> RelaySlot:
        deadline = time.monotonic() + LONG
        invitation = driver.gateway.invite(0)
        return relay.open_slots(invitation, [(1, 1)], deadline=deadline, is_wanted=lambda: True)[0]

    with contextlib.closing(relay):
        for number in (1, 2):
            with contextlib.closing(slot()) as beside:
                assert beside.relay == number
                assert relay.pid is not None
                os.kill(relay.pid, signal.SIGKILL)
                wait_until(lambda: len(told) == beside.relay)
        with contextlib.closing(slot()) as beside:
            assert beside.relay == 3

    assert [(number, by_itself) for number, _, by_itself in told] == [(1, False), (2, False)]
    assert all("SIGKILL" in why for _, why, _ in told)


def packet(kind: int, number: int) -> bytes:
    return Payload.of(None).packet(kind, epoch=1, call_id=number, incarnation=1)


def test_a_relay_serves_over_its_first_connection_whose_handshake_succeeds(
    driver_of: Callable[[Zmq], Driver], runtime: Runtime
) -> None:
    port, between = free_port(), free_port()
    driver = driver_of(Zmq(bind=f"tcp://127.0.0.1:{port}", advertise=f"tcp://127.0.0.1:{between}"))
    relay = WorkerRelay(runtime.launcher, "relay")
    with contextlib.ExitStack() as stack:
        wire = stack.enter_context(
            contextlib.closing(Relay("127.0.0.1", between, "127.0.0.1", port))
        )
        stack.enter_context(contextlib.closing(relay))
        wire.cut()  # the gateway hears nothing, and ends the connection
        slot = driver.add_rank(0)
        beside = open_beside(relay, slot)
        fds = beside.worker_fds()
        worker, _ = (
            stack.enter_context(socket.socket(fileno=os.dup(fds[name])))
            for name in ("data", "control")
        )
        beside.close()
        assert isinstance(driver.events.get(timeout=LONG), PeerRejected)

        wire.heal()

        worker.send(packet(Kind.HELLO, 0))
        assert isinstance(slot.next(), Frame)
        slot.call(1)
        worker.settimeout(LONG)
        while isinstance(frame := receive(worker), Frame) and frame.kind != Kind.CALL:
            pass
        assert isinstance(frame, Frame)


def processor_time(pid: int) -> float:
    user, system = procfs.stat_fields(f"/proc/{pid}")[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("first", ["data", "control"])
def test_what_a_worker_wrote_before_its_end_arrives_however_long_the_link_was_stuck(
    driver: Driver, runtime: Runtime, first: str
) -> None:
    relay = WorkerRelay(runtime.launcher, "relay", lambda *_: None)
    slot = driver.add_rank(0)
    count = 5 * WINDOW
    with contextlib.closing(relay), contextlib.ExitStack() as stack:
        beside = open_beside(relay, slot)
        fds = beside.worker_fds()
        ends = {name: socket.socket(fileno=os.dup(fds[name])) for name in ("data", "control")}
        for end in ends.values():
            stack.enter_context(end)
        beside.close()
        ends["data"].send(packet(Kind.HELLO, 0))
        assert isinstance(slot.next(), Frame)

        gateway = driver.gateway.pid
        assert gateway is not None
        assert relay.pid is not None
        os.kill(gateway, signal.SIGSTOP)
        try:
            if first == "control":
                ends.pop("control").close()
                time.sleep(0.1)  # until the relay has seen that
            for number in range(1, count + 1):
                ends["data"].send(packet(Kind.ITEM, number))
            for end in ends.values():
                end.close()
            before = processor_time(relay.pid)
            time.sleep(1.0)  # longer than the relay waits for the end of the second socket
            assert processor_time(relay.pid) - before < 0.5  # nor does it look all the time
        finally:
            os.kill(gateway, signal.SIGCONT)

        got: list[int] = []
        while isinstance(frame := slot.next(), Frame):
            got.append(frame.call_id)
        assert frame is Arrival.END
        assert got == list(range(1, count + 1))
        assert slot.why_it_ended() == ""
