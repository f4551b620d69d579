"""A rank's side of its link: a process beside the worker that does for it what the driver would.

Guarantees: the worker is reached through sockets and memory of this machine alone; what it wrote
before it died is passed on, and then which call it had begun last, which can still be read here;
a worker whose link is lost is let go, as by a driver that has died. After a pause of this process
what has arrived is read before the other side is judged.

Why a process: it outlives the worker to tell of its end, and its signs of life do not wait for the
worker's threads.
"""

from __future__ import annotations

import pickle
import signal
import time
from typing import TYPE_CHECKING, Any

import zmq
from zmq.utils import z85

from phalanx.runtime.memory.arena import Arena
from phalanx.runtime.memory.mapping import DriverExchange
from phalanx.runtime.wire.packet_header import Flag, Kind
from phalanx.runtime.wire.progress_page import ProgressPage, withdraw_behind

from .link import LARGEST, QUEUE, Delivery, Lane, Line, Say
from .poller import IN, OUT, Waiting
from .port import Port
from .remote_rank import error_packet
from .worker_relay import UNHEARD, UNREACHED

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .worker_relay import Posting

_PAUSE = 1.0  # seconds that a look may come late before it counts as a pause of this process
_AT_ONCE = 64
_LAST_WORDS = 1000  # milliseconds for what has been said on the way out
_END = 0.2  # seconds for the second of a dead worker's sockets to end after the first


def main(payload: bytes, fds: Mapping[str, int]) -> int:
    """Serve until the link is lost or no longer needed; return the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends with its worker, or with the link
    outpost = _Outpost(pickle.loads(payload), fds)
    try:
        return outpost.run()
    finally:
        outpost.close()


class _Outpost:
    def __init__(self, posting: Posting, fds: Mapping[str, int]) -> None:
        now = time.monotonic()
        self._posting = posting
        self._page = ProgressPage(fds["page"])
        self._arena = Arena(fds["arena"])
        self._exchange = DriverExchange.inherit(self._arena, fds["results"], fds["returns"])
        self._data = Port(fds["data"], self._exchange.reader)
        self._control = Port(fds["control"])
        self._line = Line(self._post, self._arena, now)
        self._round = 0
        self._incarnation = 0
        self._ended_at: float | None = None
        self._told = False
        self._done = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        secret = z85.encode(posting.secret)
        for option, value in (
            (zmq.LINGER, _LAST_WORDS),
            (zmq.ROUTING_ID, posting.route),
            (zmq.SNDHWM, QUEUE),
            (zmq.RCVHWM, QUEUE),
            (zmq.MAXMSGSIZE, LARGEST),
            (zmq.CURVE_SERVERKEY, posting.server_key.encode()),
            (zmq.CURVE_PUBLICKEY, zmq.curve_public(secret)),
            (zmq.CURVE_SECRETKEY, secret),
            (zmq.IPV6, 1 if "[" in posting.endpoint else 0),
        ):
            self._socket.setsockopt(option, value)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._heard = False
        self._socket.connect(posting.endpoint)
        self._waiting = Waiting()
        self._waiting.want(self._socket, IN)
        self._line.say(Say.OPEN, now=now)

    def run(self) -> int:
        """Pass on what comes; return the exit code."""
        beat = self._posting.heartbeat
        due = time.monotonic() + beat
        while not self._done:
            ready = self._wait(due)
            now = time.monotonic()
            if now > due + _PAUSE:
                self._line.heard_at = now  # it was we who were away
            if self._socket in ready:
                self._listen(now)
            self._hear_worker(ready)
            self._look_for_end(now)
            if self._monitor in ready and self._heard:
                # ZeroMQ would connect anew, but what was on its way is lost.
                self._socket.setsockopt(zmq.LINGER, 0)
                return 0
            if now >= due:
                due = now + beat
                if now - self._line.heard_at > self._posting.lost_after:
                    # A worker that ended before has a reason of its own.
                    if not self._heard:
                        self._socket.setsockopt(zmq.LINGER, 0)
                    left = UNHEARD if self._heard else UNREACHED
                    return left if self._ended_at is None else 0
                if now - self._line.spoke_at >= beat / 2:
                    self._line.beat(now)
                self._arena.trim_if_idle(now)
            self._line.pump(now)
        return 0

    def close(self) -> None:
        """Let the link go, and the worker: last, for its end would come before word of why."""
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()
        self._context.term()
        self._line.close()
        self._data.close()
        self._control.close()
        self._exchange.close()

    # --- waiting ------------------------------------------------------------------------

    def _wait(self, due: float) -> Mapping[Any, int]:
        waiting = self._waiting
        if self._heard:
            waiting.want(self._monitor, IN)
        # A worker that answers quicker than the link carries waits in its own send.
        wanted = IN if self._line.has_room else 0
        for port in (self._data, self._control):
            waiting.want(port.fd, 0 if port.ended else wanted | (OUT if port.is_backed_up else 0))
        if self._ended_at is not None and not self._told:
            due = min(due, self._ended_at + _END)
        return waiting.until(due)

    # --- from the worker ----------------------------------------------------------------

    def _hear_worker(self, ready: Mapping[Any, int]) -> None:
        both = (self._data, self._control)
        events = [ready.get(port.fd, 0) for port in both]
        for port, event in zip(both, events, strict=True):
            if event & OUT:
                self._line.taken(port.flush())
        if events[0] & ~OUT:
            self._read_data()
        if events[1] & ~OUT:
            while self._line.has_room and (frame := self._control.receive()) is not None:
                if frame.kind == Kind.READY:
                    # Its greeting, on the other socket, must be there first.
                    self._read_data(everything=True)
                self._line.send(Lane.CONTROL, frame)

    def _read_data(self, *, everything: bool = False) -> None:
        while everything or self._line.has_room:
            frame = self._data.receive()
            if frame is None:
                return
            if frame.kind == Kind.HELLO:
                self._incarnation = frame.incarnation
            if frame.flags & Flag.LOST:
                error = OSError("an answer was lost: no descriptor was free; raise `ulimit -n`")
                head = (0, 0, 0, frame.epoch, frame.call_id, 0, 0)
                self._line.send_packet(Lane.DATA, error_packet(error, head, self._incarnation))
            else:
                self._line.send(Lane.DATA, frame)

    def _look_for_end(self, now: float) -> None:
        """Tell of the worker's end, once everything it wrote has been sent."""
        if self._told or not (self._data.ended or self._control.ended):
            return
        if self._ended_at is None:
            self._ended_at = now
        both = self._data.ended and self._control.ended
        if (both or now >= self._ended_at + _END) and self._line.is_empty:
            self._told = True
            self._line.say(Say.END, 0, self._page.begun, now=now)

    # --- from the driver's side -----------------------------------------------------------

    def _post(self, parts: Sequence[bytes | memoryview]) -> None:
        self._socket.send_multipart(parts, zmq.NOBLOCK)

    def _listen(self, now: float) -> None:
        for _ in range(_AT_ONCE):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self._heard = True
            what = self._line.take([frame.buffer for frame in frames], now)
            if isinstance(what, Delivery):
                self._deliver(what)
            elif what is not None:
                self._obey(*what, now)

    def _obey(self, what: Say, number: int, call: int, now: float) -> None:
        match what:
            case Say.ASK:
                self._line.say(Say.TOLD, number, self._page.begun, now=now)
            case Say.RECALL:
                self._round += 1
                withdraw_behind(self._page, self._round, call)
                self._line.say(Say.TOLD, number, self._page.begun, now=now)
            case Say.BYE:
                self._done = True
            case _:
                pass

    def _deliver(self, delivery: Delivery) -> None:
        """Pass a packet of the driver's on to the worker."""
        kind = delivery.head[1]
        port = self._data if delivery.lane is Lane.DATA else self._control
        if delivery.error is not None:
            self._line.taken(1)
            if kind == Kind.CALL:
                packet = error_packet(delivery.error, delivery.head, self._incarnation)
                self._line.send_packet(Lane.DATA, packet)
            return
        if kind == Kind.CALL:
            packet = delivery.packet(flags=Flag.PACED, incarnation=self._round)
        else:
            packet = delivery.packet()
        large = delivery.large
        if large is not None:
            large.lend(self._exchange.borrower)
        file = None if large is None else large.file
        self._line.taken(port.send(packet, file, counts=1))
        if large is not None:
            large.close()
