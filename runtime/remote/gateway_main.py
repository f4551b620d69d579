"""The gateway process: the driver's side of all links of one group, between it and remote ranks.

- To the driver each rank is a worker behind a pair of sockets, like a local one.
- Every connection has proved a key that was given to one relay of one machine, once. A rank is
  behind the first relay of its machine that names it.
- A relay that is silent for too long is lost with its ranks, and gets a message that says so; the
  loss of a rank is reported to the driver once all messages from it have been passed on.
- After a pause of this process arrived messages are read before limits are checked. It ends when
  the driver closes it or dies, and leaves nothing.

Why a process: ZeroMQ's threads, sockets and memory do not belong in the driver, where a fork of
the user's would copy them and a busy thread would delay signs of life.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import pickle
import secrets
import signal
import socket
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import zmq

from phalanx.runtime.linux import descriptor_limit
from phalanx.runtime.linux.descriptors import receive_with_fds
from phalanx.runtime.wire.progress_page import register_worker

from .authenticator import Authenticator
from .in_flight_query import InFlightQuery
from .link import BODIES, LARGEST, Delivery, Line, Link, Say, SharedBodies, records
from .remote_rank import RemoteRank
from .zeromq import IN, OUT, MessageMemory, MessageSocket, Readiness, event_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .options import Zmq

ORDER = 128 * 1024
"""Bytes that an order of the driver's has at most; what is larger comes in a file."""

_MOST_FDS = 16
_CONNECT = 60.0  # seconds for a rank's side to connect: its process has to start first
_AT_ONCE = 64  # messages read before the other descriptors get their turn
_LOOKS = 5  # after a connection was closed
_SOON = 0.02  # seconds between those
_PAUSE = 1.0  # seconds that a look may come late before it counts as a pause of this process
_HANDSHAKE = 1.0  # seconds for one; a rank whose side takes longer connects again
_BACKLOG = 1024  # connections that wait to be accepted: a relay waits behind unknown peers
_HANDSHAKES = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_NOISE = "its handshake is not one of this group"
_LOST = 64  # lost relays without ranks that still get the order to end; arbitrary
_LAST_WORDS = 100  # milliseconds for what has been said on the way out


def main(payload: bytes, fds: Mapping[str, int]) -> int:
    """Serve until the driver closes the socket; return the exit code."""
    return serve(GatewayProcess, payload, fds["link"])


def serve(kind: type[GatewayProcess], payload: bytes, link: int) -> int:
    """Run a gateway of that *kind*; the arguments are those of `Gateway`'s process."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # calls in flight end first; then the driver closes
    options = pickle.loads(payload)
    register_worker()
    # Peers that never finish their handshake hold descriptors until they are closed, and
    # ZeroMQ accepts as many as there are. So some are kept for what the driver hands over: without
    # them no rank could be started, and the group would use its restarts up.
    descriptor_limit.raise_limit()
    descriptor_limit.keep_back()
    gateway = kind(options, socket.socket(fileno=link))
    try:
        gateway.run()
    finally:
        gateway.close()
    return 0


@dataclass(slots=True, eq=False)
class _Relay:
    """The process beside ranks on one machine.

    Attributes:
        number: Its own, among all of the group.
        where: Its machine, as the driver counts them.
        route: The name under which ZeroMQ finds its connection; a secret of both sides.
    """

    number: int
    where: int
    route: bytes
    link: Link
    ranks: set[RemoteRank] = field(default_factory=set[RemoteRank])
    is_connected: bool = False
    is_lost: bool = False
    bodies: SharedBodies = field(init=False)
    name: str = field(init=False)

    def __post_init__(self) -> None:
        self.bodies = SharedBodies(self.link)
        self.name = f"relay {self.number}"

    @property
    def is_live(self) -> bool:
        return self.is_connected and not self.is_lost


class GatewayProcess:
    """The gateway of one group. See the module."""

    def __init__(self, options: Zmq, link: socket.socket) -> None:
        self._options = options
        self._link = link
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._authenticator = Authenticator(self._context)  # before the router accepts connections
        self._router = self._context.socket(zmq.ROUTER)
        public, secret = zmq.curve_keypair()
        for option, value in (
            (zmq.LINGER, _LAST_WORDS),
            (zmq.ROUTER_MANDATORY, 1),
            (zmq.SNDHWM, 0),  # what is under way is bounded by the windows of the lines
            (zmq.RCVHWM, 0),
            (zmq.MAXMSGSIZE, LARGEST),
            (zmq.HANDSHAKE_IVL, int(min(options.lost_after, _HANDSHAKE) * 1000)),
            (zmq.BACKLOG, _BACKLOG),
            (zmq.CURVE_SERVER, 1),
            (zmq.CURVE_PUBLICKEY, public),
            (zmq.CURVE_SECRETKEY, secret),
            (zmq.ZAP_DOMAIN, b"phalanx"),
            (zmq.IPV6, 1 if "[" in options.bind else 0),
        ):
            self._router.setsockopt(option, value)
        self._monitor = self._router.get_monitor_socket(_HANDSHAKES | zmq.EVENT_DISCONNECTED)
        self._ranks: dict[int, RemoteRank] = {}
        self._relays: dict[bytes, _Relay] = {}  # by route
        self._query: InFlightQuery | None = None
        self._queries = 0
        self._backlog: deque[bytes] = deque()  # for the driver, which may be stopped
        self._rejections: Counter[str] = Counter()
        self._gone: set[_Relay] = set()  # whose connection has been closed
        self._looks = 0  # how often to look whose that is
        self._look_at = math.inf  # when next
        self._closed = 0  # connections that were closed, without those that were refused
        self._done = False
        self._link_fd = self._link.fileno()
        self._sockets: dict[int, RemoteRank] = {}  # by descriptor
        self._used: set[RemoteRank] = set()  # that something has happened to
        self._is_settled = False  # nothing has that matters to all of them
        self._tell({"ready": self._bind(), "key": public.decode()})
        self._readiness = Readiness()
        self._memory = MessageMemory()
        self._messages = MessageSocket(self._router, self._memory)
        self._events = MessageSocket(self._monitor)
        self._questions = MessageSocket(self._authenticator.socket)
        for each in (self._messages, self._events, self._questions):
            self._readiness.watch(each.fd, IN)
            each.has_more()  # asked once, for else the descriptor would tell nothing

    def run(self) -> None:
        """Pass on messages, until the driver closes the socket."""
        beat = self._options.heartbeat
        due = time.monotonic() + beat
        while not self._done:
            self._readiness.watch(self._link_fd, IN | (OUT if self._backlog else 0))
            has_more = self._messages.has_more()
            until = 0.0 if has_more else self._next(due)
            ready = self._readiness.wait(max(0.0, until - time.monotonic()))
            now = time.monotonic()
            if now > due + _PAUSE:
                for relay in self._relays.values():
                    relay.link.last_received_at = now  # the pause was in this process
            for fd, events in ready:
                rank = self._sockets.get(fd)
                if rank is not None:
                    self._used.add(rank)
                    rank.handle_ready(fd, events)
                elif fd == self._messages.fd:
                    has_more = True
                else:
                    self._handle_other(fd, events, now)
            if has_more:
                self._listen(now)
            if now >= due:
                due = now + beat
                self._is_settled = False
                self._look(now)
            self._go_on(now)
            if self._backlog:
                self._flush()

    def close(self) -> None:
        """End the connection to every relay."""
        now = time.monotonic()
        for rank in self._ranks.values():
            self._say_bye(rank, now)
            rank.close()
        with contextlib.suppress(zmq.ZMQError):
            for relay in self._relays.values():
                relay.link.flush()
        self._router.disable_monitor()
        self._monitor.close()
        self._router.close()
        self._authenticator.socket.close()
        self._context.term()
        self._readiness.close()

    # --- what happens -------------------------------------------------------------------

    def _next(self, due: float) -> float:
        """Return when there is something to do though nothing happens, at *due* at the latest."""
        if self._gone or self._used:
            return 0.0
        if self._query is not None:
            due = min(due, self._query.until)
        return min(due, self._look_at)

    def _handle_other(self, fd: int, events: int, now: float) -> None:
        """Handle what is ready and belongs to no rank."""
        if fd == self._link_fd and events & ~OUT:
            self._take_orders(now)
        elif fd == self._questions.fd:
            self._authenticator.answer(self._refuse)
        elif fd == self._events.fd:
            self._watch(now)

    def _go_on(self, now: float) -> None:
        """Do what can be done now, after whatever has happened."""
        if now >= self._look_at:
            self._look_who_is_there(now)
        while self._gone:
            self._listen(now, everything=True)  # what they sent before comes first
            self._lose_relay(self._gone.pop(), "the connection was closed", now)
        if self._query is not None and self._query.is_over(now):
            self._query, self._is_settled = None, False
        used, self._used = self._used, set()
        for rank in used:
            if rank.data.ended or rank.control.ended or (rank.ended and not rank.released):
                self._is_settled = False
        if not self._is_settled:
            used = self._consider_all(now)
        live = [rank for rank in used if rank.connected and not rank.ended]
        if waiting := [rank for rank in live if rank.held]:
            # Once one has ended no other begins a collective call.
            frozen = any(rank.ended and rank.greeted for rank in self._ranks.values())
            for rank in waiting:
                rank.hand_over(frozen=frozen)
        for relay in self._relays.values():
            if relay.bodies.left and relay.is_live:
                relay.bodies.pump(now)
                live.extend(rank for rank in relay.ranks - used if not rank.ended)
        for rank in live:
            rank.line.pump(now)
        for rank in used:
            for sock in (rank.data, rank.control):
                self._readiness.watch(sock.fd, sock.wanted())
        for relay in self._relays.values():
            relay.link.flush()

    def _consider_all(self, now: float) -> set[RemoteRank]:
        """Let ranks go, and return the others: what has happened to one may let another go on."""
        while not self._is_settled:
            self._is_settled = True
            for rank in list(self._ranks.values()):
                if rank.data.ended or rank.control.ended:  # the driver is done with it
                    self._let_go(rank, now)
                elif rank.ended and self._query is None and not rank.is_backed_up:
                    rank.release()
        return set(self._ranks.values())

    # --- the driver ---------------------------------------------------------------------

    def _take_orders(self, now: float) -> None:
        """Obey all orders of the driver that are there."""
        with descriptor_limit.all_available():
            while not self._done:
                try:
                    data, fds = receive_with_fds(self._link, ORDER, _MOST_FDS, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    return
                if data:
                    self._obey(json.loads(data), fds, now)
                else:
                    self._done = True

    def _obey(self, order: dict[str, Any], fds: Sequence[int], now: float) -> None:
        """Do what the driver has ordered; *fds* came with it."""
        match order:
            case {"ping": number}:
                self._tell({"pong": number})
            case {"invite": number, "where": where, "secret": secret, "route": route}:
                self._invite(number, where, bytes.fromhex(route), bytes.fromhex(secret), now)
            case {"rank": _, "fds": names} if len(fds) != len(names):
                # No descriptor was free for the others: the driver sees its own ends end.
                for fd in fds:
                    os.close(fd)
            case {"rank": number, "where": where, "launch": launch, "fds": names}:
                until = now + launch + _CONNECT
                self._make_room(number, where, dict(zip(names, fds, strict=True)), until)
            case {"launched": numbers}:
                for rank in (self._ranks[each] for each in numbers if each in self._ranks):
                    rank.connects_by = min(rank.connects_by, now + _CONNECT)
            case _:
                pass

    def _invite(self, number: int, where: int, route: bytes, secret: bytes, now: float) -> None:
        def send(parts: Sequence[bytes | memoryview]) -> None:
            self._send_to(relay, parts)

        relay = _Relay(number, where, route, Link(send, now))
        left = [each for each in self._relays.values() if each.is_lost and not each.ranks]
        for each in left[:-_LOST]:
            del self._relays[each.route]
        self._relays[route] = relay
        self._authenticator.admit(secret, relay.name.encode())

    def _make_room(self, number: int, where: int, fds: Mapping[str, int], until: float) -> None:
        rank = self._ranks[number] = RemoteRank(number, where, fds, until)
        self._sockets[rank.data.fd] = self._sockets[rank.control.fd] = rank
        self._used.add(rank)

    def _tell(self, head: dict[str, Any], raw: bytes = b"") -> None:
        """Tell the driver: *head* as JSON, and the line *raw* as it is."""
        self._backlog.append(json.dumps(head).encode() + b"\n" + raw)

    def _flush(self) -> None:
        with contextlib.suppress(OSError):  # full, or the driver has ended: its socket closes
            while self._backlog:
                self._link.send(self._backlog[0], socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
                self._backlog.popleft()

    # --- the ranks ----------------------------------------------------------------------

    def _send_to(self, relay: _Relay, parts: Sequence[bytes | memoryview]) -> None:
        try:
            self._messages.post([relay.route, *parts])
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            if not relay.is_lost:
                self._gone.add(relay)

    def _listen(self, now: float, *, everything: bool = False) -> None:
        for route, *parts in self._messages.messages(None if everything else _AT_ONCE):
            name = _name_of(parts)
            relay = self._relays.get(route.bytes)
            if relay is None or name != relay.name:
                if not self._receive_other(name, route.bytes, parts):
                    self._count_malformed()
            elif relay.is_lost:
                relay.link.say(Say.BYE, BODIES, now=now)  # it is to end, for its ranks are lost
            else:
                for record in records([frame.buffer for frame in parts]):
                    self._receive_relay(relay, record, now)

    def _receive_other(self, name: str, route: bytes, frames: Sequence[zmq.Frame]) -> bool:  # noqa: ARG002  # for subclasses
        """Handle a message of the peer *name*, which is no relay; False if it is malformed."""
        return False

    def _receive_relay(self, relay: _Relay, parts: Sequence[memoryview], now: float) -> None:
        number = relay.link.note_received(parts, now)
        if number == BODIES:
            self._take(relay.bodies.line, parts)  # acknowledgements, or a sign of life
            return
        if number not in self._ranks:
            self._take_orders(now)  # the driver made room for it before its relay could name it
        rank = self._ranks.get(number)
        if rank is None:
            relay.link.say(Say.BYE, number, now=now)  # the driver has let it go
            return
        is_new = rank.where == relay.where and not rank.connected
        if rank not in relay.ranks and not is_new:
            self._count_malformed()
        elif not rank.ended:
            self._used.add(rank)
            what = self._take(rank.line, parts)
            match what:
                case Delivery() if not is_new:
                    rank.deliver(what)
                case (Say.OPEN, _, _) if is_new:
                    self._attach_rank(rank, relay, now)
                case (said, question, call) if not is_new:
                    self._said(rank, said, question, call, now)
                case _:
                    pass

    def _take(
        self, line: Line, parts: Sequence[memoryview]
    ) -> Delivery | tuple[Say, int, int] | None:
        malformed = line.malformed
        what = line.take(parts)
        if line.malformed != malformed:
            self._count_malformed()
        return what

    def _attach_rank(self, rank: RemoteRank, relay: _Relay, now: float) -> None:
        """Note that *rank* is behind *relay*."""
        rank.connect(relay.link, relay.bodies)
        relay.ranks.add(rank)
        if not relay.is_connected:
            relay.is_connected = True
            # Once: a second connection could not know what was lost with the first.
            self._authenticator.dismiss(relay.name.encode())
            self._tell({"up": relay.number, "where": relay.where})
        relay.link.say(Say.BEAT, BODIES, now=now)

    def _said(self, rank: RemoteRank, what: Say, number: int, call: int, now: float) -> None:
        match what:
            case Say.TOLD:
                if self._query is not None:
                    self._query.answered(rank, number, call)
            case Say.PROGRESS:
                rank.note_progress(call)
            case Say.END:
                rank.end(call)
                self._begin_query(rank, now)
            case _:
                pass

    def _look(self, now: float) -> None:
        """Send signs of life, and lose relays that have sent none."""
        options = self._options
        self._memory.trim_if_idle(now)
        for rank in self._ranks.values():
            rank.trim_if_idle(now)
            if not rank.ended and not rank.connected and now > rank.connects_by:
                why = f"the rank's side did not connect within {_CONNECT:g} s of its launch"
                self._lose(rank, why, now)
        for relay in self._relays.values():
            if not relay.is_live:
                continue
            relay.bodies.look()
            silence = now - relay.link.last_received_at
            if silence > options.lost_after:
                limit = f"lost_after={options.lost_after:g} s"
                why = f"no message came from it for {silence:.1f} s, {limit}"
                self._lose_relay(relay, why, now)
            elif now - relay.link.posted_at >= options.heartbeat / 2:
                relay.link.beat(now)

    def _look_who_is_there(self, now: float) -> None:
        """Find out whose connection has been closed, for ZeroMQ does not say, and not at once."""
        self._looks -= 1
        self._look_at = now + _SOON
        if not self._looks:
            self._look_at = math.inf
            self._check_rejected_peers()
        for relay in self._relays.values():
            if relay.is_live:
                relay.link.beat(now)

    def _check_rejected_peers(self) -> None:
        """Report closed connections that were never admitted: ZeroMQ does not."""
        rejected = self._closed - (self._authenticator.let_in - self._inside())
        if rejected > self._rejections[_NOISE]:
            self._refuse("", _NOISE)
            self._rejections[_NOISE] = rejected

    def _inside(self) -> int:
        """Return how many admitted peers are connected."""
        return sum(relay.is_live for relay in self._relays.values())

    def _lose_relay(self, relay: _Relay, why: str, now: float) -> None:
        if relay.is_lost:
            return
        relay.is_lost = True
        self._tell({"down": relay.number, "where": relay.where})
        relay.link.say(Say.BYE, BODIES, now=now)
        for rank in list(relay.ranks):
            self._lose(rank, why, now)
        relay.bodies.line.close()

    def _lose(self, rank: RemoteRank, why: str, now: float) -> None:
        if not rank.ended:
            rank.end(None, why)
            self._begin_query(rank, now)

    def _begin_query(self, ended: RemoteRank, now: float) -> None:
        self._is_settled = False
        if self._query is not None:
            self._query.lost(ended)
        if ended.greeted:
            self._queries += 1
            self._query = InFlightQuery(self._queries, ended, self._ranks.values(), now)
            self._used.add(ended)  # it is over at once if no rank is to be asked

    def _let_go(self, rank: RemoteRank, now: float) -> None:
        """The driver is done with *rank*."""
        self._is_settled = False
        for sock in (rank.data, rank.control):
            self._readiness.watch(sock.fd, 0)
            del self._sockets[sock.fd]
        del self._ranks[rank.number]
        self._used.discard(rank)
        for relay in self._relays.values():
            relay.ranks.discard(rank)
        if self._query is not None:
            self._query.lost(rank)
            if self._query.ended is rank:
                self._query = None
                left = (each for each in self._ranks.values() if each.ended and not each.released)
                for each in list(left)[:1]:
                    self._begin_query(each, now)
        self._say_bye(rank, now)
        rank.close()

    def _say_bye(self, rank: RemoteRank, now: float) -> None:
        rank.ended = True
        if rank.connected:
            rank.line.say(Say.BYE, now=now)

    # --- rejected peers -----------------------------------------------------------------

    def _watch(self, now: float) -> None:
        for message in self._events.messages():
            event, _ = event_of([frame.bytes for frame in message])
            if event == zmq.EVENT_DISCONNECTED:
                self._looks, self._look_at = _LOOKS, now
                self._closed += 1
                continue
            self._closed -= 1  # ZeroMQ reports it as closed, too
            if event != zmq.EVENT_HANDSHAKE_FAILED_AUTH:  # the authenticator reports it
                self._refuse("", _NOISE)

    def _refuse(self, address: str, why: str, key: bytes = b"") -> None:  # noqa: ARG002  # for subclasses
        """Report a refused connection, once for each reason."""
        self._rejections[why] += 1
        if self._rejections[why] == 1:
            self._tell({"refused": why, "address": address})

    def _count_malformed(self) -> None:
        self._rejections["message"] += 1
        if self._rejections["message"] == 1:
            self._tell({"malformed": 1})

    # --- where to listen ----------------------------------------------------------------

    def _bind(self) -> str:
        options = self._options
        if not options.ipc:
            try:
                self._router.bind(options.listens_on)
            except zmq.ZMQError as error:
                self._tell({"failed": f"cannot listen on {options.listens_on}: {error}"})
                self._flush()
                raise SystemExit(1) from error
            return options.advertise or self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        # An abstract name: it ends with the process. CURVE authenticates the other end.
        endpoint = f"ipc://@phalanx-link-{os.getpid()}-{secrets.token_hex(8)}"
        self._router.setsockopt(zmq.IPC_FILTER_UID, os.geteuid())
        self._router.bind(endpoint)
        return endpoint


def _name_of(frames: Sequence[zmq.Frame]) -> str:
    """Return the name under which the sender's key was admitted; empty if there is none."""
    try:
        return str(frames[-1].get("User-Id")) if frames else ""
    except zmq.ZMQError:
        return ""
