"""The relay process: the ranks' side of a link, beside the workers of one group on one machine.

- Workers use it like a local driver: sockets and memory of this machine, and one arena
  for all of them.
- When a worker dies its last messages are passed on, then the number of the last call it had begun.
  When the link is lost all workers are disconnected, as when the driver dies.
- After a pause of this process arrived messages are read before limits are checked.

Why a process: it outlives workers, to report their exits, and its signs of life do not wait for
their threads.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import signal
import socket
import time
from typing import TYPE_CHECKING, Any

import zmq
from zmq.utils import z85

from phalanx.runtime.linux import descriptor_limit
from phalanx.runtime.linux.descriptors import receive_with_fds
from phalanx.runtime.memory.arena import Arena
from phalanx.runtime.memory.mapping import DriverExchange
from phalanx.runtime.wire.packet_header import Flag, Kind
from phalanx.runtime.wire.progress_page import ProgressPage, withdraw_behind
from phalanx.supervision import RuntimeFault

from .buffered_socket import BufferedSocket
from .link import BODIES, LARGEST, Delivery, Lane, Line, Link, Say, records
from .remote_rank import error_packet
from .worker_relay import LINK_TIMED_OUT, UNREACHED
from .zeromq import IN, OUT, MessageMemory, MessageSocket, Readiness, event_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from phalanx.runtime.wire.packet_encoder import Payload

    from .worker_relay import Invitation

_ORDER = 4096
_MOST_FDS = 16
_PAUSE = 1.0  # seconds that a look may come late before it counts as a pause of this process
_AT_ONCE = 64
_LAST_WORDS = 1000  # milliseconds for what has been said on the way out
_END = 0.2  # seconds for the second of a dead worker's sockets to end after the first
_PROGRESS = 0.1  # seconds between looks whether a call that runs has reported progress


def main(payload: bytes, fds: Mapping[str, int]) -> int:
    """Serve until the link is lost or no longer needed; return the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends with its owner, or with the link
    descriptor_limit.raise_limit()
    relay = _Relay(pickle.loads(payload), fds)
    try:
        return relay.run()
    finally:
        relay.close()


class _WorkerSlot:
    """One worker."""

    def __init__(self, number: int, fds: Mapping[str, int], arena: Arena, link: Link) -> None:
        self._page = ProgressPage(fds["page"])
        self._exchange = DriverExchange.inherit(arena, fds["results"], fds["returns"])
        self.data = BufferedSocket(fds["data"], self._exchange.reader)
        self.control = BufferedSocket(fds["control"])
        self.line = Line(number, arena)
        self.line.attach(link)
        self._round = 0
        self._incarnation = 0
        self._given = 0  # the last call that it was sent
        self._looked_at = 0.0
        self._progress = 0, 0.0  # the call that ran at the last look, and since when
        self.ended_at = math.inf
        self.is_end_reported = False
        self.is_done = False

    @property
    def next_look(self) -> float:
        """When `look` is to be called though nothing has come from it."""
        if self.is_end_reported:
            return math.inf
        if not self.data.ended and not self.control.ended:
            return self._looked_at + _PROGRESS if self._given > self._page.finished else math.inf
        if not self.line.is_empty:  # first everything is sent that was read
            return math.inf
        return self.ended_at + (0.0 if self.data.ended and self.control.ended else _END)

    # --- from the worker ----------------------------------------------------------------

    def read_worker(self, fd: int, events: int) -> None:
        """Take what has come from that socket, as far as there is room for it."""
        is_data = fd == self.data.fd
        if events & OUT:
            self.line.taken((self.data if is_data else self.control).flush())
        if not events & ~OUT:
            return
        self._read_data()  # in either case first: what it wrote before
        while not is_data and self.line.has_room:
            frame = self.control.receive()
            if frame is None:
                return
            if frame.kind == Kind.READY:
                # Its greeting, on the other socket, must be there first.
                self._read_data(everything=True)
            self.line.send(Lane.CONTROL, frame)

    def _read_data(self, *, everything: bool = False) -> None:
        while everything or self.line.has_room:
            frame = self.data.receive()
            if frame is None:
                return
            if frame.kind == Kind.HELLO:
                self._incarnation = frame.incarnation
            if frame.flags & Flag.LOST:
                error = OSError("an answer was lost: no descriptor was free; raise `ulimit -n`")
                head = (0, 0, 0, frame.epoch, frame.call_id, 0, 0)
                self.line.send_packet(Lane.DATA, error_packet(error, head, self._incarnation))
            else:
                self.line.send(Lane.DATA, frame)

    def look(self, now: float) -> None:
        """Report progress of its call, and its end, once everything that it wrote has been sent."""
        has_ended = self.data.ended or self.control.ended
        if has_ended:
            self.ended_at = min(self.ended_at, now)
        if now < self.next_look:
            return
        if has_ended:
            self.is_end_reported = True
            self.line.say(Say.END, 0, self._page.begun, now=now)
        else:
            self._look_for_progress(now)

    def _look_for_progress(self, now: float) -> None:
        (call, since), self._looked_at = self._progress, now
        self._progress = begun, at = self._page.begun, self._page.begun_at
        if begun == call and at > since > 0:
            self.line.say(Say.PROGRESS, 0, call, now=now)

    # --- from the driver's side -----------------------------------------------------------

    def take(
        self,
        parts: Sequence[memoryview],
        bodies: Mapping[int, Payload | Exception],
        now: float,
    ) -> None:
        """Take a message of the driver's side."""
        what = self.line.take(parts)
        if isinstance(what, Delivery):
            self._deliver(what, bodies, now)
        elif what is not None:
            self._obey(*what, now)

    def _obey(self, what: Say, number: int, call: int, now: float) -> None:
        match what:
            case Say.ASK:
                self.line.say(Say.TOLD, number, self._page.begun, now=now)
            case Say.RECALL:
                self._round += 1
                withdraw_behind(self._page, self._round, call)
                self.line.say(Say.TOLD, number, self._page.begun, now=now)
            case Say.BYE:
                self.is_done = True
            case _:
                pass

    def _deliver(
        self, delivery: Delivery, bodies: Mapping[int, Payload | Exception], now: float
    ) -> None:
        """Pass a packet of the driver's on to the worker."""
        kind = delivery.head[1]
        sock = self.data if delivery.lane is Lane.DATA else self.control
        if delivery.shared:
            body = bodies[delivery.shared]  # it has come before: the order of a link is kept
            if isinstance(body, Exception):
                delivery.error = body
            else:
                delivery.large = body
        error, large = delivery.error, delivery.large
        if error is None:
            if kind == Kind.CALL:
                self._given, self._looked_at = delivery.head[4], now
                packet = delivery.packet(flags=Flag.PACED, incarnation=self._round)
            else:
                packet = delivery.packet()
            if large is not None:
                large.lend(self._exchange.borrower)
            file = None if large is None else large.file
            try:
                self.line.taken(sock.send(packet, file, counts=1))
            except RuntimeFault as lost:
                error = lost
            if large is not None and not delivery.shared:
                large.close()
        if error is not None:
            self.line.taken(1)
            if kind == Kind.CALL:
                packet = error_packet(error, delivery.head, self._incarnation)
                self.line.send_packet(Lane.DATA, packet)
            elif kind == Kind.RESTORE:  # the worker waits for it
                sock.send(error_packet(error, delivery.head, 0, kind))

    def close(self) -> None:
        """Let the worker go."""
        self.line.close()
        self.data.close()
        self.control.close()
        self._exchange.close()
        self._page.close()


class _Relay:
    def __init__(self, invitation: Invitation, fds: Mapping[str, int]) -> None:
        self._invitation = invitation
        self._owner = socket.socket(fileno=fds["link"])
        self._arena = Arena(fds["arena"])
        self._bodies: dict[int, Payload | Exception] = {}
        self._slots: dict[int, _WorkerSlot] = {}
        self._is_done = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        secret = z85.encode(invitation.secret)
        for option, value in (
            (zmq.LINGER, _LAST_WORDS),
            (zmq.ROUTING_ID, invitation.route),
            (zmq.SNDHWM, 0),  # what is under way is bounded by the windows of the lines
            (zmq.RCVHWM, 0),
            (zmq.MAXMSGSIZE, LARGEST),
            (zmq.CURVE_SERVERKEY, invitation.server_key.encode()),
            (zmq.CURVE_PUBLICKEY, zmq.curve_public(secret)),
            (zmq.CURVE_SECRETKEY, secret),
            (zmq.IPV6, 1 if "[" in invitation.endpoint else 0),
        ):
            self._socket.setsockopt(option, value)
        self._monitor = self._socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        )
        self._has_received = False
        self._is_open = False  # else the end of a connection is that of an attempt
        self._is_cut = False
        self._socket.connect(invitation.endpoint)
        self._workers: dict[int, _WorkerSlot] = {}  # by descriptor
        self._used: set[_WorkerSlot] = set()  # that something has happened to
        self._readiness = Readiness()
        self._memory = MessageMemory()
        self._messages = MessageSocket(self._socket, self._memory)
        self._link = Link(self._messages.post, time.monotonic())
        self._bodies_line = Line(BODIES, self._arena)
        self._bodies_line.attach(self._link)
        self._events = MessageSocket(self._monitor)
        self._owner_fd = self._owner.fileno()
        for fd in (self._owner_fd, self._messages.fd, self._events.fd):
            self._readiness.watch(fd, IN)
        self._look_at_connection()  # once, for else the descriptor would tell nothing

    def run(self) -> int:
        """Pass on what comes; return the exit code."""
        beat = self._invitation.heartbeat
        due = time.monotonic() + beat
        while not self._is_done:
            has_more = self._messages.has_more()
            until = 0.0 if has_more else min([due, *(s.next_look for s in self._slots.values())])
            ready = self._readiness.wait(max(0.0, until - time.monotonic()))
            now = time.monotonic()
            if now > due + _PAUSE:
                self._link.last_received_at = now  # the pause was in this process
            for fd, events in ready:
                slot = self._workers.get(fd)
                if slot is not None:
                    self._used.add(slot)
                    slot.read_worker(fd, events)
                elif fd == self._messages.fd:
                    has_more = True
                elif fd == self._owner_fd:
                    self._obey(now)
                else:
                    self._look_at_connection()
            if has_more:
                self._listen(now)
            if self._is_cut:
                # ZeroMQ would connect anew, but what was on its way is lost.
                self._socket.setsockopt(zmq.LINGER, 0)
                return 0
            if now >= due:
                due = now + beat
                if now - self._link.last_received_at > self._invitation.lost_after:
                    if self._has_received:
                        return LINK_TIMED_OUT
                    self._socket.setsockopt(zmq.LINGER, 0)
                    return UNREACHED
                if now - self._link.posted_at >= beat / 2:
                    self._link.beat(now)
                self._arena.trim_if_idle(now)
                self._memory.trim_if_idle(now)
            self._go_on(now)
        return 0

    def close(self) -> None:
        """Close the link, then disconnect the workers: their exits must follow the reason."""
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()
        self._context.term()
        self._readiness.close()
        self._bodies_line.close()
        for slot in self._slots.values():
            slot.close()

    # --- the workers ----------------------------------------------------------------------

    def _go_on(self, now: float) -> None:
        """Send what there is room for, and wait for what each worker can do next."""
        used, self._used = self._used, set()
        used.update(slot for slot in self._slots.values() if now >= slot.next_look)
        for slot in used:
            # Before the line gets empty: then there was room, and there was nothing to read.
            slot.look(now)
            slot.line.pump(now)
            if slot.is_done:
                self._release_slot(slot)
                continue
            for sock in (slot.data, slot.control):
                # A worker that answers quicker than the link carries waits in its own send.
                self._readiness.watch(sock.fd, sock.wanted(reads=slot.line.has_room))
        self._link.flush()

    # --- the owner ----------------------------------------------------------------------

    def _obey(self, now: float) -> None:
        """Add the workers that are about to be started; end when the owner closes its socket."""
        while True:
            try:
                data, fds = receive_with_fds(self._owner, _ORDER, _MOST_FDS, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            if not data:
                self._is_done = True
                return
            order: dict[str, Any] = json.loads(data)
            if len(fds) != len(order["fds"]):  # no descriptor was free: the worker sees its end
                for fd in fds:
                    os.close(fd)
                continue
            number = int(order["seat"])
            named = dict(zip(order["fds"], fds, strict=True))
            slot = self._slots[number] = _WorkerSlot(number, named, self._arena, self._link)
            self._workers[slot.data.fd] = self._workers[slot.control.fd] = slot
            self._used.add(slot)
            slot.line.say(Say.OPEN, now=now)

    def _release_slot(self, slot: _WorkerSlot) -> None:
        del self._slots[slot.line.number]
        for sock in (slot.data, slot.control):
            self._readiness.watch(sock.fd, 0)
            del self._workers[sock.fd]
        slot.close()

    # --- the driver's side ----------------------------------------------------------------

    def _listen(self, now: float) -> None:
        for frames in self._messages.messages(_AT_ONCE):
            self._has_received = True
            for record in records([frame.buffer for frame in frames]):
                number = self._link.note_received(record, now)
                if number == BODIES:
                    self._take_body(record)
                    self._bodies_line.pump(now)
                elif slot := self._slots.get(number):
                    self._used.add(slot)
                    slot.take(record, self._bodies, now)

    def _look_at_connection(self) -> None:
        for message in self._events.messages():
            event, _ = event_of([frame.bytes for frame in message])
            self._is_cut |= self._is_open and event == zmq.EVENT_DISCONNECTED
            self._is_open |= event == zmq.EVENT_HANDSHAKE_SUCCEEDED

    def _take_body(self, parts: Sequence[memoryview]) -> None:
        """Take what is for no rank in particular."""
        match self._bodies_line.take(parts):
            case Delivery(head=head, large=large, error=error):
                self._bodies_line.taken(1)
                body = large or error
                assert body is not None
                self._bodies[head[4]] = body
            case (Say.FORGET, number, _):
                body = self._bodies.pop(number, None)
                if body is not None and not isinstance(body, Exception):
                    body.close()
            case (Say.BYE, _, _):
                self._is_done = True
            case _:
                pass
