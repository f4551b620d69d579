"""The gateway process: where the control links of all nodes of a group come together.

- A connection exists only to a node process whose key the driver has admitted, and that key serves
  one process. Nothing that comes is unpickled here.
- It answers beats by itself, so a driver that is stopped loses no node. It notes when, before the
  answer leaves. A node that was silenced is never answered again.
- It never waits for the driver or for a node. It ends when the driver lets go or dies.

Why a process: ZeroMQ's threads, sockets and memory do not belong in the driver, where a fork of the
user's would copy them.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import socket
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from phalanx.runtime import descriptor_limit, descriptors
from phalanx.runtime.remote.authenticator import Doorkeeper
from phalanx.runtime.remote.poller import IN, OUT, Waiting

from .messages import (
    Answer,
    Beat,
    Ended,
    Fenced,
    Greeting,
    MalformedMessage,
    Message,
    NotStarted,
    Output,
    StackText,
    Started,
    Stopped,
    Swept,
    decode,
    encode,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from phalanx.runtime import Zmq

LARGEST = 64 * 1024
"""Bytes of a node's message; one that sends more is cut off."""

ORDER = 128 * 1024
"""Bytes of a packet between driver and gateway; messages for nodes go beside it."""

_AT_ONCE = 64  # messages read before the other descriptors get their turn
_LOOKS = 5  # after a connection was closed, to find out whose, for ZeroMQ does not say, nor at once
_SOON = 0.02  # seconds between those
_SETTLE = 0.05  # seconds for what had arrived while this process was stopped to be read
_HANDSHAKE = 1000  # milliseconds for one; a node that takes longer connects again
_BACKLOG = 1024  # connections that wait to be accepted: nodes wait behind strangers
_LAST_WORDS = 100  # milliseconds for what has been said on the way out
_LONG = 3600.0
_KEY = 2.0  # seconds by which the key of a node may come after its first try to connect
_STRANGERS = 64  # of them that are remembered
_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


def main(payload: bytes, fds: Mapping[str, int]) -> int:
    """Serve until the driver lets go; return the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the driver decides when it ends
    # Strangers that never finish their handshake hold descriptors until they are turned away.
    descriptor_limit.raise_limit()
    descriptor_limit.keep_back()
    gateway = _Gateway(pickle.loads(payload), socket.socket(fileno=fds["link"]))
    try:
        gateway.run()
    finally:
        gateway.close()
    return 0


@dataclass(slots=True, eq=False)
class _Peer:
    """One node.

    Attributes:
        answered_at: When its last beat that was answered had come, or its greeting.
        route: ZeroMQ's name for its connection; None before its greeting.
    """

    number: int
    answered_at: float
    route: bytes | None = None
    is_closed: bool = False
    is_silenced: bool = False
    has_strayed: bool = False  # sent what is no message


class _Gateway:
    def __init__(self, options: Zmq, link: socket.socket) -> None:
        self._link = link
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._doorkeeper = Doorkeeper(self._context)  # before anything can connect
        self._router = self._context.socket(zmq.ROUTER)
        public, secret = zmq.curve_keypair()
        for option, value in (
            (zmq.LINGER, _LAST_WORDS),
            (zmq.ROUTER_MANDATORY, 1),
            (zmq.SNDHWM, 0),
            (zmq.RCVHWM, 0),
            (zmq.MAXMSGSIZE, LARGEST),
            (zmq.HANDSHAKE_IVL, _HANDSHAKE),
            (zmq.BACKLOG, _BACKLOG),
            (zmq.CURVE_SERVER, 1),
            (zmq.CURVE_PUBLICKEY, public),
            (zmq.CURVE_SECRETKEY, secret),
            (zmq.ZAP_DOMAIN, b"phalanx"),
            (zmq.IPV6, 1 if "[" in options.bind else 0),
        ):
            self._router.setsockopt(option, value)
        self._monitor = self._router.get_monitor_socket(_FAILED | zmq.EVENT_DISCONNECTED)
        self._peers: dict[int, _Peer] = {}
        self._backlog: deque[bytes] = deque()  # for the driver, which may be stopped
        self._heard: dict[int, float] = {}  # nodes whose beats it has not been told of
        self._asked: deque[tuple[float, int]] = deque()  # its questions for the time
        self._refusals: set[str] = set()
        # Who was refused and may yet be admitted, by key: when that is told, from where, and why.
        self._strangers: dict[bytes, tuple[float, str, str]] = {}
        self._looks = 0
        self._done = False
        self._waiting = Waiting()
        for each in (self._doorkeeper.socket, self._monitor, self._router):
            self._waiting.want(each, IN)
        try:
            self._router.bind(options.listens_on)
        except zmq.ZMQError as error:
            self._tell({"failed": f"cannot listen on {options.listens_on}: {error}"})
            self._flush()
            raise SystemExit(1) from error
        endpoint = options.advertise or self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self._tell({"ready": endpoint, "key": public.decode()})

    def run(self) -> None:
        """Pass on what comes, until the driver lets go."""
        while not self._done:
            ready = self._wait()
            if self._doorkeeper.socket in ready:
                self._doorkeeper.answer(self._put_off)
            if self._monitor in ready:
                self._watch()
            if self._router in ready:
                self._listen()
            if ready.get(self._link.fileno(), 0) & ~OUT:
                with descriptor_limit.all_available():
                    self._obey()
            if self._looks:
                self._look()
            self._tell_of_strangers()
            if self._asked and time.monotonic() >= self._asked[0][0]:
                self._tell({"now": time.monotonic(), "ask": self._asked.popleft()[1]})
            self._flush()

    def close(self) -> None:
        """Let all of them go."""
        self._router.disable_monitor()
        self._monitor.close()
        self._router.close()
        self._doorkeeper.close()
        self._context.term()

    def _wait(self) -> Mapping[Any, int]:
        now = time.monotonic()
        due = now + (_SOON if self._looks else _LONG)
        if self._asked:
            due = min(due, self._asked[0][0])
        due = min([due, *(at for at, *_ in self._strangers.values())])
        is_behind = bool(self._backlog or self._heard)
        self._waiting.want(self._link.fileno(), IN | (OUT if is_behind else 0))
        return self._waiting.until(due)

    # --- the driver -----------------------------------------------------------------------

    def _obey(self) -> None:
        data, fds = b"", list[int]()
        with contextlib.suppress(ConnectionResetError):  # it has gone without reading all
            data, fds = descriptors.receive_with_fds(self._link, ORDER, 1)
        if not data:
            self._done = True
            return
        order: dict[str, Any] = json.loads(data)
        now = time.monotonic()
        if "ask" in order:
            self._asked.append((now + _SETTLE, order["ask"]))
        elif "admit" in order:
            number: int = order["admit"]
            self._peers[number] = _Peer(number, now)
            key = order["key"].encode()
            self._doorkeeper.admit_key(key, str(number).encode())
            self._strangers.pop(z85.decode(key), None)
        elif "silence" in order:
            peer = self._peers.get(order["silence"])
            if peer is not None:
                peer.is_silenced = True
                self._doorkeeper.dismiss(str(peer.number).encode())
                self._send(peer, Fenced(why=order["why"]))
                now = peer.answered_at
            self._tell({"silenced": order["silence"], "last": now})
        elif "forget" in order:
            self._peers.pop(order["forget"], None)
            self._doorkeeper.dismiss(str(order["forget"]).encode())
        elif fds and (peer := self._peers.get(order["to"])) is not None:
            self._post(peer, _cut(fds, order["sizes"]))
        for fd in fds:
            os.close(fd)

    def _tell(self, head: dict[str, Any], raw: bytes = b"") -> None:
        heard, self._heard = self._heard, {}
        self._backlog.append(json.dumps({**head, "heard": heard}).encode() + b"\n" + raw)

    def _flush(self) -> None:
        if self._heard and not self._backlog:
            self._tell({})
        with contextlib.suppress(OSError):  # full, or the driver has gone, as `_obey` sees
            while self._backlog:
                self._link.send(self._backlog[0], socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
                self._backlog.popleft()

    # --- the nodes ------------------------------------------------------------------------

    def _listen(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                route, *frames = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            peer = self._peers.get(int(frames[-1].get("User-Id"))) if frames else None
            if peer is None:
                continue  # it was forgotten
            try:
                self._hear(peer, route.bytes, [frame.bytes for frame in frames])
            except MalformedMessage as error:
                if not peer.has_strayed:
                    peer.has_strayed = True
                    self._tell({"stray": peer.number, "why": f"no message of a node: {error}"})

    def _hear(self, peer: _Peer, route: bytes, parts: Sequence[bytes]) -> None:
        message, now = decode(parts), time.monotonic()
        match message:
            case Greeting() if peer.route is None and not peer.is_silenced:
                peer.route, peer.answered_at = route, now  # its lease runs from its greeting
                # A second process that has the key is turned away from here on.
                self._doorkeeper.dismiss(str(peer.number).encode())
                self._tell({"from": peer.number, "at": now}, parts[0])
            case Greeting() if route == peer.route:
                self._tell({"stray": peer.number, "why": "it has greeted twice"})
            case _ if route != peer.route:
                why = "another process has greeted with this key" if peer.route else "it is refused"
                refusal = encode(Fenced(why=why))
                with contextlib.suppress(zmq.ZMQError):
                    self._router.send_multipart([route, *refusal], zmq.NOBLOCK)
                self._refused("", why)
            case Beat(number=number):
                if not peer.is_silenced:
                    peer.answered_at = now
                    self._heard[peer.number] = now
                    self._send(peer, Answer(number=number))
            case Started() | NotStarted() | Output() | Ended() | StackText() | Stopped() | Swept():
                self._tell({"from": peer.number, "at": now}, parts[0])
            case _:
                raise MalformedMessage(f"{type(message).__name__} is not a node's to send")

    def _send(self, peer: _Peer, message: Message) -> None:
        self._post(peer, encode(message))

    def _post(self, peer: _Peer, parts: Sequence[bytes]) -> None:
        if peer.route is None or peer.is_closed:
            return
        try:
            self._router.send_multipart([peer.route, *parts], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            peer.is_closed = True
            while self._router.poll(0):  # what it sent before comes first
                self._listen()
            self._tell({"closed": peer.number, "at": time.monotonic()})

    def _look(self) -> None:
        """Find out whose connection was closed: a message to it cannot be sent."""
        self._looks -= 1
        for peer in list(self._peers.values()):
            if not peer.is_silenced:  # which is gone in any case
                self._send(peer, Answer(number=0))

    # --- strangers ------------------------------------------------------------------------

    def _watch(self) -> None:
        while self._monitor.poll(0):
            event = parse_monitor_message(self._monitor.recv_multipart())
            if event["event"] == zmq.EVENT_DISCONNECTED:
                self._looks = _LOOKS
            elif event["event"] != zmq.EVENT_HANDSHAKE_FAILED_AUTH:  # the doorkeeper has told
                self._refused("", "it does not speak as a node does")

    def _put_off(self, address: str, why: str, key: bytes) -> None:
        """Tell of a refusal later: a node may come before its key does."""
        if why not in self._refusals:
            self._strangers = dict(list(self._strangers.items())[-_STRANGERS:])
            self._strangers.setdefault(key, (time.monotonic() + _KEY, address, why))

    def _tell_of_strangers(self) -> None:
        now = time.monotonic()
        for key, (due, address, why) in list(self._strangers.items()):
            if now >= due:
                del self._strangers[key]
                self._refused(address, why)

    def _refused(self, address: str, why: str) -> None:
        if why not in self._refusals:
            self._refusals.add(why)
            self._tell({"refused": why, "address": address})


def _cut(fds: Sequence[int], sizes: Sequence[int]) -> list[bytes]:
    """Return the parts of those *sizes* in the file that came with an order."""
    with os.fdopen(os.dup(fds[0]), "rb") as file:
        file.seek(0)  # the driver has written it through the same open file
        return [file.read(size) for size in sizes]
