"""For tests of the gateway, both ends of a link: the driver's, and a rank that the test plays."""

from __future__ import annotations

import queue
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq
from zmq.utils import z85

from phalanx.runtime import Arena, Frame, Kind, Payload, RelaySlot, Runtime, WorkerRelay
from phalanx.runtime.remote.gateway import Gateway
from phalanx.runtime.remote.link import BODIES, Delivery, Lane, Line, Link, Say, records
from phalanx.runtime.remote.options import Zmq
from phalanx.runtime.remote.worker_relay import Invitation
from phalanx.runtime.wire.channel import Arrival, SocketChannel
from phalanx.runtime.wire.packet_decoder import receive
from phalanx.runtime.wire.packet_header import Flag

LONG = 10.0


class Driver:
    """A gateway, and one channel for each rank that was made room for."""

    def __init__(self, runtime: Runtime, options: Zmq) -> None:
        self.events: queue.Queue[Any] = queue.Queue()
        self.gateway = Gateway(
            runtime.loop, runtime.launcher, options, group="tp", on_event=self.events.put
        )
        self.arena = Arena.create()
        self.slots: list[Slot] = []

    def add_rank(self, where: int | None = None) -> Slot:
        """Make room for a rank, on a machine of its own by default."""
        self.gateway.open()
        where = len(self.slots) if where is None else where
        channel = SocketChannel.create(self.arena, 1)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        fds = {**channel.child_fds(), "control": theirs.fileno()}
        number = self.gateway.add_rank(where, fds)
        address = RankAddress(self.gateway.invite(where), number)
        theirs.close()
        channel.close_child_ends()
        self.slots.append(Slot(channel, ours, address))
        return self.slots[-1]

    def close(self) -> None:
        for slot in self.slots:
            slot.close()
        self.gateway.close()
        self.arena.close()


@dataclass(frozen=True)
class RankAddress:
    """How one rank is reached."""

    invitation: Invitation
    number: int


class Slot:
    """What the driver holds of one rank."""

    def __init__(
        self, channel: SocketChannel, control: socket.socket, address: RankAddress
    ) -> None:
        self.channel = channel
        self.control = control
        self.address = address
        self._open = True

    def call(self, number: int, *, collective: bool = True) -> None:
        flags = Flag.COLLECTIVE if collective else Flag.NONE
        packet = Payload.of(None).packet(Kind.CALL, epoch=1, call_id=number, flags=flags)
        assert self.channel.send(packet)

    def next(self, seconds: float = LONG) -> Frame | Arrival:
        readable, _, _ = select.select([self.channel.fileno()], [], [], seconds)
        return self.take() if readable else Arrival.NOTHING

    def take(self) -> Frame | Arrival:
        frame = self.channel.peek()
        self.channel.unhandled = None
        return frame

    def why_it_ended(self) -> str:
        self.control.settimeout(LONG)
        while isinstance(frame := receive(self.control), Frame):
            if frame.kind == Kind.LINK_ENDED:
                why: str = frame.value()
                assert receive(self.control) == b""
                return why
        raise AssertionError("it ended without a word")

    def close(self) -> None:
        if self._open:
            self._open = False
            self.channel.close()
            self.control.close()


class DirectLink(Link):
    """One over which each message leaves at once and alone."""

    def post(self, message: bytes, now: float) -> None:
        super().post(message, now)
        self.flush()


class Rank:
    """The other side of a link with one rank, played by the test."""

    def __init__(
        self,
        address: RankAddress,
        *,
        secret: bytes | None = None,
        route: bytes | None = None,
        says_open: bool = True,
    ) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        known = address.invitation
        key = z85.encode(known.secret if secret is None else secret)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.SNDTIMEO, int(LONG * 1000))
        self.socket.setsockopt(zmq.RECONNECT_IVL, -1)
        self.socket.setsockopt(zmq.ROUTING_ID, known.route if route is None else route)
        self.socket.setsockopt(zmq.CURVE_SERVERKEY, known.server_key.encode())
        self.socket.setsockopt(zmq.CURVE_PUBLICKEY, zmq.curve_public(key))
        self.socket.setsockopt(zmq.CURVE_SECRETKEY, key)
        self.socket.connect(known.endpoint)
        self.arena = Arena.create()
        self.link = DirectLink(self.post, 0.0)
        self.line = Line(address.number, self.arena)
        self.shared = Line(BODIES, self.arena)
        for line in (self.line, self.shared):
            line.attach(self.link)
        self.bodies: dict[int, Payload] = {}
        self.records: deque[Sequence[memoryview]] = deque()  # received and not taken
        if says_open:
            self.line.say(Say.OPEN, now=0.0)
            assert self.receives(Say.BEAT)

    def post(self, parts: Sequence[bytes | memoryview]) -> None:
        self.socket.send_multipart(parts)

    def next(self, seconds: float = LONG) -> Delivery | tuple[Say, int, int] | None:
        """Return what comes next but for signs of life; None if nothing does."""
        deadline = time.monotonic() + seconds
        while self._has_more(deadline):
            what = self._take()
            if isinstance(what, Delivery):
                self.line.taken(1)
                return what
            if what is not None and what[0] is not Say.BEAT:
                return what
            self.link.beat(0.0)
        return None

    def receives(self, what: Say) -> bool:
        deadline = time.monotonic() + LONG
        while self._has_more(deadline):
            said = self._take()
            if isinstance(said, tuple) and said[0] is what:
                return True
        return False

    def _has_more(self, deadline: float) -> bool:
        left = int((deadline - time.monotonic()) * 1000)
        if not self.records and self.socket.poll(max(0, left)):
            parts = [memoryview(part) for part in self.socket.recv_multipart()]
            self.records.extend(records(parts))
        return bool(self.records)

    def _take(self) -> Delivery | tuple[Say, int, int] | None:
        parts = self.records.popleft()
        if self.link.note_received(parts, 0.0) != BODIES:
            return self.line.take(parts)
        what = self.shared.take(parts)
        if not isinstance(what, Delivery):
            return what
        self.shared.taken(1)
        assert what.large is not None
        self.bodies[what.head[4]] = what.large
        return None

    def takes_call(self) -> int:
        what = self.next()
        assert isinstance(what, Delivery), what
        assert what.head[1] == Kind.CALL
        return what.head[4]

    def greets(self) -> None:
        self.sends(Payload.of(None).packet(Kind.HELLO, epoch=1, call_id=0, incarnation=1))

    def answers(self, number: int) -> None:
        self.sends(Payload.of(None).packet(Kind.REPLY, epoch=1, call_id=number, incarnation=1))

    def sends(self, packet: bytes) -> None:
        self.line.send_packet(Lane.DATA, packet)
        self.line.pump(0.0)

    def close(self) -> None:
        for body in self.bodies.values():
            body.close()
        self.line.close()
        self.arena.close()
        self.socket.close()
        self.context.term()


def listening(pid: int) -> set[str]:
    """Where *pid* listens: addresses and paths as the kernel has them."""
    inodes = set[str]()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            inodes.add(str(link.readlink()).removeprefix("socket:[").removesuffix("]"))
        except OSError:
            continue
    found = set[str]()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.add(fields[1].partition(":")[0])
    for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "00010000" and fields[6] in inodes:
            found.add(fields[7])
    return found


Joined = Callable[[Driver], tuple[Slot, Rank]]


def open_beside(relay: WorkerRelay, slot: Slot) -> RelaySlot:
    """Return the slot of *relay* that stands for *slot* on its own side."""
    (beside,) = relay.open_slots(
        slot.address.invitation,
        [(slot.address.number, 1)],
        deadline=time.monotonic() + LONG,
        is_wanted=lambda: True,
    )
    return beside
