"""The gateway process of a group on a cluster: the end of the links of its nodes and its ranks.

- To ranks it is the gateway of any group. A node's control link uses the same address, and
  exists only to a node process whose key the driver has admitted. One connection with that key
  serves; another may bring beats of the same node. No message is unpickled here.
- It answers beats by itself, so a stopped driver loses no node. It notes the time before the
  answer leaves. A node that was silenced is never answered again. Beats are reported to the driver
  twice a second, and whenever it requests the time.
- It never waits for the driver or for a node. It ends when the driver closes it or dies.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import zmq
from zmq.utils import z85

from phalanx.runtime.remote.gateway_main import GatewayProcess, serve

from .chunking import Outbox
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
    Taken,
    decode,
    encode,
)

if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping, Sequence

    from phalanx.runtime import Zmq

LARGEST = 64 * 1024
"""Bytes of a node's message; what is more is none."""

_SETTLE = 0.05  # seconds for what had arrived while this process was stopped to be read
_KEY = 2.0  # seconds by which the key of a node may come after its first try to connect
_MOST_REFUSALS = 64  # of them that are remembered
_PIECES = 120  # of a long message in the time of silence after which links are lost; see `Outbox`
_NEWS = 0.5  # seconds between unrequested reports of beats to the driver


def main(payload: bytes, fds: Mapping[str, int]) -> int:
    """Serve until the driver closes the socket; return the exit code."""
    return serve(NodeGatewayProcess, payload, fds["link"])


@dataclass(slots=True, eq=False)
class _Node:
    """One node.

    Attributes:
        answered_at: When its last beat that was answered had come, or its greeting.
        route: ZeroMQ's name for its connection; None before its greeting.
        second: That of one for beats alone; None if none has come over it, or it has gone.
    """

    number: int
    answered_at: float
    outbox: Outbox
    route: bytes | None = None
    second: bytes | None = None
    is_closed: bool = False
    is_silenced: bool = False
    has_strayed: bool = False  # sent what is no message

    @property
    def name(self) -> str:
        return f"node {self.number}"

    @property
    def is_connected(self) -> bool:
        return self.route is not None and not self.is_closed


class NodeGatewayProcess(GatewayProcess):
    """See the module."""

    def __init__(self, options: Zmq, link: socket.socket) -> None:
        self._nodes: dict[str, _Node] = {}  # by name
        # Nodes whose beats are not yet reported to the driver.
        self._new_beats: dict[int, float] = {}
        self._reported_at = 0.0
        self._asked: deque[tuple[float, int]] = deque()  # its questions for the time
        self._closed_nodes: list[int] = []  # whose connection was found closed; not yet told
        self._outputs: deque[_Node] = deque()  # whose output the driver has not taken
        # Refused peers that may yet be admitted, by key: time of the report, address, and reason.
        self._pending_refusals: dict[bytes, tuple[float, str, str]] = {}
        super().__init__(options, link)

    # --- what every gateway does, and more for nodes ----------------------------------------

    def _next(self, due: float) -> float:
        if self._closed_nodes:
            return 0.0
        for at, _, _ in self._pending_refusals.values():
            due = min(due, at)
        if self._asked:
            due = min(due, self._asked[0][0])
        if self._new_beats and not self._backlog:
            due = min(due, self._reported_at + _NEWS)
        return super()._next(due)

    def _go_on(self, now: float) -> None:
        while self._closed_nodes:
            self._listen(now, everything=True)  # what it sent before comes first
            self._tell({"closed": self._closed_nodes.pop(0), "at": time.monotonic()})
        super()._go_on(now)
        for key, (due, address, why) in list(self._pending_refusals.items()):
            if now >= due:
                del self._pending_refusals[key]
                super()._refuse(address, why, key)
        while self._asked and now >= self._asked[0][0]:
            self._tell({"now": time.monotonic(), "ask": self._asked.popleft()[1]})
        if self._new_beats and not self._backlog and now >= self._reported_at + _NEWS:
            self._tell({})

    def _obey(self, order: dict[str, Any], fds: Sequence[int], now: float) -> None:
        match order:
            case {"ask": number}:
                self._asked.append((now + _SETTLE, number))
            case {"admit": number, "key": key}:
                node = _Node(number, now, Outbox(self._options.lost_after / _PIECES))
                self._nodes[node.name] = node
                self._authenticator.admit_key(key.encode(), node.name.encode())
                self._pending_refusals.pop(z85.decode(key.encode()), None)
            case {"silence": number, "why": why}:
                if (known := self._nodes.get(f"node {number}")) is not None:
                    known.is_silenced = True
                    self._authenticator.dismiss(known.name.encode())
                    self._send(known, Fenced(why=why))
                    now = known.answered_at
                self._tell({"silenced": number, "last": now})
            case {"forget": number}:
                self._nodes.pop(f"node {number}", None)
                self._authenticator.dismiss(f"node {number}".encode())
            case {"to": number, "message": text}:
                self._put(number, [text.encode()], now)
            case {"to": number} if not fds:  # no descriptor was free for its message
                self._tell({"stray": number, "why": "an order to it was lost: too many open files"})
            case {"to": number, "sizes": sizes}:
                self._put(number, _cut(fds, sizes), now)
            case _:
                super()._obey(order, fds, now)

    def _tell(self, head: dict[str, Any], raw: bytes = b"") -> None:
        beats, self._new_beats, self._reported_at = self._new_beats, {}, time.monotonic()
        super()._tell({**head, "heard": beats}, raw)

    def _flush(self) -> None:
        super()._flush()
        while self._outputs and not self._backlog:
            self._send(self._outputs.popleft(), Taken())

    def _refuse(self, address: str, why: str, key: bytes = b"") -> None:
        """Report a refusal; with a *key* later, as that may belong to a node not yet admitted."""
        if not key:
            super()._refuse(address, why)
            return
        self._pending_refusals = dict(list(self._pending_refusals.items())[-_MOST_REFUSALS:])
        due = time.monotonic() + _KEY
        self._pending_refusals.setdefault(key, (due, address, why))

    def _look_who_is_there(self, now: float) -> None:
        super()._look_who_is_there(now)
        for node in list(self._nodes.values()):
            if not node.is_silenced:  # which is gone in any case
                self._send(node, Answer(number=0))
                if node.second is not None and not self._reply(node.second, Answer(number=0)):
                    node.second = None

    def _inside(self) -> int:
        # One that is silenced is not sent anything, so it is not known whether it is there still.
        nodes = [node for node in self._nodes.values() if not node.is_silenced]
        seconds = sum(node.second is not None for node in nodes)
        return super()._inside() + seconds + sum(node.is_connected for node in nodes)

    def _receive_other(self, name: str, route: bytes, frames: Sequence[zmq.Frame]) -> bool:
        node = self._nodes.get(name)
        if node is None:
            return name.startswith("node ")  # it was forgotten
        try:
            self._receive_node(node, route, [frame.bytes for frame in frames])
        except MalformedMessage as error:
            if not node.has_strayed:
                node.has_strayed = True
                self._tell({"stray": node.number, "why": f"no message of a node: {error}"})
        return True

    # --- the nodes --------------------------------------------------------------------------

    def _receive_node(self, node: _Node, route: bytes, parts: Sequence[bytes]) -> None:
        if sum(map(len, parts)) > LARGEST:
            raise MalformedMessage(f"it has more than {LARGEST} bytes")
        message, now = decode(parts), time.monotonic()
        match message:
            case Greeting() if node.route is None and not node.is_silenced:
                node.route, node.answered_at = route, now  # its lease runs from its greeting
                self._tell({"from": node.number, "at": now}, parts[0])
            case Greeting() if route == node.route:
                self._tell({"stray": node.number, "why": "it has greeted twice"})
            case Beat(number=number):
                if route != node.route:
                    node.second = route
                if node.route is not None and not node.is_silenced:  # else it overtook the greeting
                    node.answered_at = now
                    self._new_beats[node.number] = now
                    self._reply(route, Answer(number=number))
            case _ if route != node.route:
                why = "another process has greeted with this key" if node.route else "it is refused"
                self._reply(route, Fenced(why=why))
                self._refuse("", why)
            case Taken():
                node.outbox.taken(now)
                self._send_waiting(node, now)
            case Started() | NotStarted() | Output() | Ended() | StackText() | Stopped() | Swept():
                self._tell({"from": node.number, "at": now}, parts[0])
                self._outputs.extend([node] * isinstance(message, Output))
            case _:
                raise MalformedMessage(f"{type(message).__name__} is not a node's to send")

    def _reply(self, route: bytes, message: Message) -> bool:
        """Send *message*; return False if the peer has gone."""
        with contextlib.suppress(zmq.ZMQError):
            self._messages.post([route, *encode(message)])
            return True
        return False

    def _put(self, number: int, parts: Sequence[bytes], now: float) -> None:
        if (node := self._nodes.get(f"node {number}")) is not None:
            node.outbox.put(parts)
            self._send_waiting(node, now)

    def _send_waiting(self, node: _Node, now: float) -> None:
        while (parts := node.outbox.next(now)) is not None:
            self._send_parts(node, parts)

    def _send(self, node: _Node, message: Message) -> None:
        self._send_parts(node, encode(message))

    def _send_parts(self, node: _Node, parts: Sequence[bytes]) -> None:
        if node.route is None or node.is_closed:
            return
        try:
            self._messages.post([node.route, *parts])
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            node.is_closed = True
            self._closed_nodes.append(node.number)


def _cut(fds: Sequence[int], sizes: Sequence[int]) -> list[bytes]:
    """Return the parts of those *sizes* in the file that came with an order, which is closed."""
    with os.fdopen(fds[0], "rb") as file:
        file.seek(0)  # the driver has written it through the same open file
        return [file.read(size) for size in sizes]
