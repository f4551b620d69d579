"""The driver's side of all links of one group: a process between the driver and ranks elsewhere.

Guarantees: to the driver each rank is a worker behind a pair of sockets, as if it were next door;
whoever connects has proved a key that was given to one incarnation of one rank, once; a rank that
is silent for too long is told to the driver as lost, once everything it had sent has been passed
on. After a pause of this process what has arrived is read before anybody is judged. It ends when
the driver lets go or dies, and leaves nothing.

Why a process: ZeroMQ's threads, sockets and memory do not belong in the driver, where a fork of
the user's would copy them and a busy thread would keep signs of life waiting.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pickle
import secrets
import signal
import socket
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from phalanx.runtime.linux import descriptor_limit
from phalanx.runtime.linux.descriptors import receive_with_fds
from phalanx.runtime.wire.progress_page import register_worker

from .authenticator import Doorkeeper
from .in_flight_query import Recall
from .link import LARGEST, QUEUE, Delivery, Say
from .poller import IN, OUT, Waiting
from .remote_rank import Berth

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .options import Zmq

ORDER = 4096
"""Bytes that an order of the driver's has at most."""

_MOST_FDS = 16
_AT_ONCE = 64  # messages read before the other descriptors get their turn
_LOOKS = 5  # after a connection was closed
_SOON = 0.02  # seconds between those
_PAUSE = 1.0  # seconds that a look may come late before it counts as a pause of this process
_CONNECT = 60.0  # seconds for a rank's side to connect: its process has to start first
_HANDSHAKE = 1.0  # seconds for one; a rank whose side takes longer connects again
_BACKLOG = 1024  # connections that wait to be accepted: a rank's side waits behind strangers
_HANDSHAKES = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_NOISE = "it does not speak as a rank's side does"
_LAST_WORDS = 100  # milliseconds for what has been said on the way out


def main(payload: bytes, fds: Mapping[str, int]) -> int:
    """Serve until the driver lets go; return the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # calls in flight end first; the driver lets go
    options = pickle.loads(payload)
    register_worker()
    # Strangers that never finish their handshake hold descriptors until they are turned away, and
    # ZeroMQ accepts as many as there are. So some are kept for what the driver hands over: without
    # them no rank could be started, and the group would use its restarts up.
    descriptor_limit.raise_limit()
    descriptor_limit.keep_back()
    gateway = _Gateway(options, fds["link"])
    try:
        gateway.run()
    finally:
        gateway.close()
    return 0


class _Gateway:
    def __init__(self, options: Zmq, link: int) -> None:
        self._options = options
        self._link = socket.socket(fileno=link)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._doorkeeper = Doorkeeper(self._context)  # before anybody can knock
        self._router = self._context.socket(zmq.ROUTER)
        public, secret = zmq.curve_keypair()
        for option, value in (
            (zmq.LINGER, _LAST_WORDS),
            (zmq.ROUTER_MANDATORY, 1),
            (zmq.SNDHWM, QUEUE),
            (zmq.RCVHWM, QUEUE),
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
        endpoint = self._bind()
        self._berths: dict[int, Berth] = {}
        self._routes: dict[bytes, Berth] = {}
        self._recall: Recall | None = None
        self._recalls = 0
        self._strange: Counter[str] = Counter()
        self._gone: set[Berth] = set()  # whose connection has been closed
        self._looks = 0  # how often to look whose that is
        self._closed = 0  # connections that were closed, without those that were refused
        self._done = False
        self._link_fd = self._link.fileno()
        self._waiting = Waiting()
        for each in (self._link_fd, self._doorkeeper.socket, self._monitor, self._router):
            self._waiting.want(each, IN)
        self._tell({"ready": endpoint, "key": public.decode()})

    def run(self) -> None:
        """Pass on what comes, until the driver lets go."""
        beat = self._options.heartbeat
        due = time.monotonic() + beat
        while not self._done:
            ready = self._wait(due)
            now = time.monotonic()
            if now > due + _PAUSE:
                for berth in self._berths.values():
                    berth.line.heard_at = now  # it was we who were away
            self._hear(ready, now)
            if now >= due:
                due = now + beat
                self._look(now)
            self._go_on(now)

    def close(self) -> None:
        """Let everybody go."""
        now = time.monotonic()
        for berth in self._berths.values():
            with contextlib.suppress(zmq.ZMQError):
                self._say_bye(berth, now)
            berth.close()
        self._router.disable_monitor()
        self._monitor.close()
        self._router.close()
        self._doorkeeper.close()
        self._context.term()

    # --- waiting ------------------------------------------------------------------------

    def _wait(self, due: float) -> Mapping[Any, int]:
        waiting = self._waiting
        if self._recall is not None:
            due = min(due, self._recall.until)
        if self._looks:
            due = min(due, time.monotonic() + _SOON)
        for berth in self._berths.values():
            for port in (berth.data, berth.control):
                wanted = 0 if port.ended else IN | (OUT if port.is_backed_up else 0)
                waiting.want(port.fd, wanted)
        return waiting.until(due)

    def _hear(self, ready: Mapping[Any, int], now: float) -> None:
        if self._link_fd in ready:
            with descriptor_limit.all_available():
                self._obey(now)
        if self._doorkeeper.socket in ready:
            self._doorkeeper.answer(self._refused)
        if self._monitor in ready:
            self._watch()
        if self._router in ready:
            self._listen(now)
        for berth in list(self._berths.values()):
            events = ready.get(berth.data.fd, 0) | ready.get(berth.control.fd, 0)
            if events & OUT:
                berth.flush()
            if events & ~OUT:
                berth.read()

    def _go_on(self, now: float) -> None:
        """Do what can be done now, after whatever has happened."""
        if self._looks:
            self._look_who_is_there(now)
        while self._gone:
            self._listen(now, everything=True)  # what they sent before comes first
            self._lose(self._gone.pop(), "the connection was closed", now)
        if self._recall is not None and self._recall.is_over(now):
            self._recall = None
        for berth in list(self._berths.values()):
            if berth.is_let_go:
                self._let_go(berth, now)
            elif berth.ended and self._recall is None:
                berth.release()
        frozen = any(berth.ended and berth.seated for berth in self._berths.values())
        for berth in self._berths.values():
            if not berth.ended and berth.connected:
                berth.hand_over(frozen=frozen)
                berth.line.pump(now)

    # --- the driver ---------------------------------------------------------------------

    def _obey(self, now: float) -> None:
        data, fds = receive_with_fds(self._link, ORDER, _MOST_FDS)
        if not data:
            self._done = True
            return
        order: dict[str, Any] = json.loads(data)
        if "ping" in order:
            self._tell({"pong": order["ping"]})
            return
        if len(fds) != len(order["fds"]):
            for (
                fd
            ) in fds:  # no descriptor was free for the others: the driver sees its own ends end
                os.close(fd)
            return
        number, route = int(order["berth"]), bytes.fromhex(order["route"])
        named = dict(zip(order["fds"], fds, strict=True))

        def post(parts: Sequence[bytes | memoryview]) -> None:
            self._post(berth, parts)

        berth = Berth(number, route, named, post, now)
        self._berths[number] = berth
        self._routes[route] = berth
        self._doorkeeper.admit(bytes.fromhex(order["secret"]), str(number).encode())

    def _tell(self, message: Mapping[str, Any]) -> None:
        with contextlib.suppress(OSError):  # gone; word of it is on its way
            self._link.send(json.dumps(message).encode())

    # --- the ranks ----------------------------------------------------------------------

    def _post(self, berth: Berth, parts: Sequence[bytes | memoryview]) -> None:
        try:
            self._router.send_multipart([berth.route, *parts], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            # There is room for all that may be under way, so one without room has gone as well.
            if not berth.ended:
                self._gone.add(berth)

    def _listen(self, now: float, *, everything: bool = False) -> None:
        for _ in itertools.count() if everything else range(_AT_ONCE):
            try:
                frames = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            berth = self._routes.get(frames[0].bytes)
            if berth is None or not _is_from(frames, berth):
                self._strange_message()
                continue
            if berth.ended:
                continue
            line = berth.line
            malformed = line.malformed
            what = line.take([frame.buffer for frame in frames[1:]], now)
            if line.malformed != malformed:
                self._strange_message()
            if isinstance(what, Delivery):
                berth.deliver(what)
            elif what is not None:
                self._said(berth, *what, now)

    def _said(self, berth: Berth, what: Say, number: int, call: int, now: float) -> None:
        match what:
            case Say.OPEN:
                berth.connected = True
                # Once: a second connection could not know what was lost with the first.
                self._doorkeeper.dismiss(str(berth.number).encode())
                berth.line.say(Say.BEAT, now=now)
            case Say.TOLD:
                if self._recall is not None:
                    self._recall.told(berth, number, call)
            case Say.END:
                berth.end(call)
                self._begin_recall(berth, now)
            case _:
                pass

    def _look(self, now: float) -> None:
        """Send signs of life, and see who has sent none."""
        options = self._options
        for berth in self._berths.values():
            line = berth.line
            berth.trim_if_idle(now)
            if berth.ended:
                continue
            if not berth.connected:
                if now - berth.made_at > _CONNECT:
                    why = f"the rank's side did not connect within {_CONNECT:g} s"
                    self._lose(berth, why, now)
                continue
            silence = now - line.heard_at
            if silence > options.lost_after:
                limit = f"lost_after={options.lost_after:g} s"
                self._lose(berth, f"nothing was heard of it for {silence:.1f} s, {limit}", now)
            elif now - line.spoke_at >= options.heartbeat / 2:
                line.beat(now)

    def _look_who_is_there(self, now: float) -> None:
        """Find out whose connection has been closed, for ZeroMQ does not say, and not at once."""
        self._looks -= 1
        if not self._looks:
            self._look_for_strangers()
        for berth in list(self._berths.values()):
            if berth.connected and not berth.ended:
                berth.line.beat(now)

    def _look_for_strangers(self) -> None:
        """Tell of connections that were closed and had never been let in: ZeroMQ does not."""
        inside = sum(berth.connected and not berth.ended for berth in self._berths.values())
        strangers = self._closed - (self._doorkeeper.let_in - inside)
        if strangers > self._strange[_NOISE]:
            self._refused("", _NOISE)
            self._strange[_NOISE] = strangers

    def _lose(self, berth: Berth, why: str, now: float) -> None:
        if not berth.ended:
            berth.end(None, why)
            self._begin_recall(berth, now)

    def _begin_recall(self, ended: Berth, now: float) -> None:
        if self._recall is not None:
            self._recall.lost(ended)
        if ended.seated:
            self._recalls += 1
            self._recall = Recall(self._recalls, ended, self._berths.values(), now)

    def _let_go(self, berth: Berth, now: float) -> None:
        """The driver is done with *berth*."""
        self._waiting.want(berth.data.fd, 0)
        self._waiting.want(berth.control.fd, 0)
        del self._berths[berth.number]
        del self._routes[berth.route]
        self._doorkeeper.dismiss(str(berth.number).encode())
        if self._recall is not None:
            self._recall.lost(berth)
            if self._recall.ended is berth:
                self._recall = None
                left = (each for each in self._berths.values() if each.ended and not each.released)
                for each in list(left)[:1]:
                    self._begin_recall(each, now)
        self._say_bye(berth, now)
        berth.close()

    def _say_bye(self, berth: Berth, now: float) -> None:
        berth.ended = True
        if berth.connected:
            berth.line.say(Say.BYE, now=now)

    # --- strangers ----------------------------------------------------------------------

    def _watch(self) -> None:
        while self._monitor.poll(0):
            event = parse_monitor_message(self._monitor.recv_multipart())
            if event["event"] == zmq.EVENT_DISCONNECTED:
                self._looks = _LOOKS
                self._closed += 1
                continue
            self._closed -= 1  # it is told of as closed, too
            if event["event"] != zmq.EVENT_HANDSHAKE_FAILED_AUTH:  # the doorkeeper has told
                self._refused("", _NOISE)

    def _refused(self, address: str, why: str, _key: bytes = b"") -> None:
        self._strange[why] += 1
        if self._strange[why] == 1:
            self._tell({"refused": why, "address": address})

    def _strange_message(self) -> None:
        self._strange["message"] += 1
        if self._strange["message"] == 1:
            self._tell({"malformed": 1})

    # --- where to listen ----------------------------------------------------------------

    def _bind(self) -> str:
        options = self._options
        if not options.ipc:
            try:
                self._router.bind(options.listens_on)
            except zmq.ZMQError as error:
                self._tell({"failed": f"cannot listen on {options.listens_on}: {error}"})
                raise SystemExit(1) from error
            return options.advertise or self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        # An abstract name: it goes with the process. CURVE says who is at the other end.
        endpoint = f"ipc://@phalanx-link-{os.getpid()}-{secrets.token_hex(8)}"
        self._router.setsockopt(zmq.IPC_FILTER_UID, os.geteuid())
        self._router.bind(endpoint)
        return endpoint


def _is_from(frames: Sequence[zmq.Frame], berth: Berth) -> bool:
    """Whether the message came over the connection whose key is that berth's."""
    if len(frames) < 2:
        return False
    try:
        return frames[-1].get("User-Id") == str(berth.number)
    except zmq.ZMQError:
        return False
