"""The broker of nodes that join: the process beside the driver that their machines connect to.

- A connection exists only to a peer that has proved the key of the driver, which proves it in turn.
  No message is unpickled. A machine with other versions than the driver's is refused.
- A machine that has greeted is free until a node is wanted. It is then offered, gets the order to
  start the node, and greets again when the node has ended.
- The machine of a node that is released ends it, if it still runs, and is free then. A node whose
  machine has closed its connection is told of, whatever state it is in.
- It ends with the driver, when each machine has closed its connection in answer to a goodbye, or
  after some seconds; in its own first seconds the machines of a broker that it has replaced may
  still join. Machines without a goodbye (it was killed, they are cut off) end their processes too,
  and then look for the driver again.

Why a process: ZeroMQ's threads, sockets and memory do not belong in the driver.
"""

from __future__ import annotations

import contextlib
import json
import math
import socket
import sys
import time
from typing import TYPE_CHECKING, Any

import zmq
from zmq.utils import z85

from phalanx.cluster.link.handshake import why_unfit
from phalanx.cluster.link.messages import (
    Answer,
    Fenced,
    Greeting,
    Leave,
    MalformedMessage,
    NodeEnded,
    NodeKey,
    NodeUnreached,
    Withdraw,
    decode,
    encode,
)
from phalanx.runtime import descriptor_limit
from phalanx.runtime.remote.authenticator import Authenticator
from phalanx.runtime.remote.zeromq import event_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx.cluster.link.messages import Message

_ORDER = 128 * 1024  # bytes of the driver's
_LARGEST = 64 * 1024  # bytes of a machine's message
_HANDSHAKE = 1000  # milliseconds
_LONGEST_TTL = 6_553_500  # milliseconds: ZeroMQ counts tenths of a second in 16 bits
_BACKLOG = 1024  # connections that wait to be accepted: a machine waits behind unknown peers
_FAREWELL = 5.0  # seconds in which goodbyes are sent, and machines of a killed broker may join
_LAST_WORD = 0.5  # seconds for a node to say that it ends itself, after its command has gone
_REPEAT = 50  # milliseconds until a goodbye is sent again, which shows whether a machine has closed


def main() -> None:
    """Serve; the arguments are the control socket and the driver's pidfd."""
    descriptor_limit.raise_limit()  # unknown peers hold descriptors until they are closed
    control = socket.socket(fileno=int(sys.argv[1]))
    Broker(control, json.loads(control.recv(_ORDER))).run(int(sys.argv[2]))


class Broker:
    """The broker. Used by one thread."""

    def __init__(self, control: socket.socket, opening: dict[str, Any]) -> None:
        self._control = control
        self._wanted: list[int] = []  # nodes without a machine
        self._machines: set[bytes] = set()  # by ZeroMQ's name for them
        self._free: list[bytes] = []  # those without a node
        self._offered: dict[int, bytes] = {}  # those of nodes that are to be started
        self._started: dict[int, bytes] = {}
        self._refusals: set[str] = set()
        self._look_at = math.inf  # when to look which of the started are still there
        # Before that, machines of the one that it has replaced may still be about to join.
        self._until = time.monotonic() + _FAREWELL * bool(opening["again"])
        address, silence = opening["address"], int(1000 * opening["silence"])
        host = f"[{address}]" if ":" in address else address
        self._endpoint = f"tcp://{host}:{opening['port']}"
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._authenticator = Authenticator(self._context)  # before anything can connect
        self._authenticator.admit(bytes.fromhex(opening["node"]), b"node")
        self._router = self._context.socket(zmq.ROUTER)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.ROUTER_MANDATORY, 1),
            (zmq.MAXMSGSIZE, _LARGEST),
            (zmq.HANDSHAKE_IVL, _HANDSHAKE),
            (zmq.BACKLOG, _BACKLOG),
            (zmq.HEARTBEAT_IVL, min(silence, _LONGEST_TTL) // 4),
            (zmq.HEARTBEAT_TIMEOUT, silence),
            (zmq.HEARTBEAT_TTL, min(silence, _LONGEST_TTL)),  # the timeout of the other end
            (zmq.CURVE_SERVER, 1),
            (zmq.CURVE_SECRETKEY, z85.encode(bytes.fromhex(opening["driver"]))),
            (zmq.ZAP_DOMAIN, b"phalanx"),
            (zmq.IPV6, 1 if ":" in address else 0),
        ):
            self._router.setsockopt(option, value)
        self._monitor = self._router.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
            | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
            | zmq.EVENT_DISCONNECTED
        )
        try:
            self._router.bind(self._endpoint)
        except zmq.ZMQError as error:
            self._tell(failed=f"cannot listen for nodes: {error}")
            raise SystemExit(1) from error
        self._tell(address=address, ranks_per_node=opening["ranks_per_node"])

    def run(self, driver: int) -> None:
        """Serve until the driver closes the socket or ends, and send goodbyes to the machines."""
        poller, control = zmq.Poller(), self._control.fileno()
        for each in (driver, control, self._authenticator.socket, self._monitor, self._router):
            poller.register(each, zmq.POLLIN)
        self._serve(driver, poller)
        poller.unregister(driver)
        poller.unregister(control)
        leave, end = encode(Leave()), time.monotonic() + _FAREWELL
        while True:
            self._listen(self._note)
            for route in list(self._machines):
                self._post(route, leave)
            if time.monotonic() >= (end if self._machines else min(self._until, end)):
                break
            poller.poll(_REPEAT)
        self._context.destroy(0)

    def _serve(self, driver: int, poller: zmq.Poller) -> None:
        control = self._control.fileno()
        while driver not in (ready := dict(poller.poll(self._time_left()))):
            if control in ready:
                data = b""
                with contextlib.suppress(ConnectionResetError):
                    data = self._control.recv(_ORDER)
                if not data:
                    return
                self._obey(json.loads(data))
            self._listen(self._on_message)
            if self._look_at <= time.monotonic():
                self._look_at = math.inf
                self._look_who_is_there()

    def _time_left(self) -> int | None:
        """Return milliseconds until the next look; None if there is nothing to look for."""
        if self._look_at == math.inf:
            return None
        return 1 + max(0, int(1000 * (self._look_at - time.monotonic())))

    def _look_who_is_there(self) -> None:
        """Tell of nodes whose machine has gone: ZeroMQ says only that some connection has ended."""
        for number, route in list(self._started.items()):
            if not self._post(route, encode(Answer(number=0))):
                del self._started[number]
                self._tell(node=number, gone="its command has gone", swept=False)

    def _listen(self, on_message: Callable[..., None]) -> None:
        self._authenticator.answer(lambda address, why, _key: self._refused(address, why))
        while self._monitor.poll(0):
            event, _ = event_of(self._monitor.recv_multipart())
            if event == zmq.EVENT_DISCONNECTED:
                self._look_at = min(self._look_at, time.monotonic() + _LAST_WORD)
            else:
                self._refused("", "it has another key, or its handshake is not a node's")
        while self._router.poll(0):
            on_message(*self._router.recv_multipart())

    def _note(self, route: bytes, *_parts: bytes) -> None:
        self._machines.add(route)

    def _obey(self, order: dict[str, Any]) -> None:
        match order:
            case {"reserve": numbers}:
                self._wanted += numbers
                self._offer()
            case {"start": number, "order": text} if number in self._offered:
                route = self._started[number] = self._offered.pop(number)
                if not self._post(route, [text.encode()]):
                    self._tell(node=number, gone="its machine has gone", swept=False)
            case {"release": number}:
                self._wanted = [each for each in self._wanted if each != number]
                if (machine := self._started.pop(number, None)) is not None:
                    self._post(machine, encode(Withdraw(number=number)))
                if number in self._offered:
                    self._free.append(self._offered.pop(number))
                self._tell(node=number, released=True)
                self._offer()
            case _:
                pass

    def _on_message(self, route: bytes, *parts: bytes) -> None:
        try:
            message: Message | None = decode(parts)
        except MalformedMessage:
            message = None
        match message:
            case Greeting():
                if why := why_unfit(message):
                    self._refused(message.address, why)
                    self._post(route, encode(Fenced(why=why)))
                elif route not in self._free:
                    self._machines.add(route)
                    self._free.append(route)
                    self._offer()
            case NodeKey(number=number, key=key):
                if self._started.get(number) == route:  # none speaks for another's node
                    self._tell(node=number, key=key)
            case NodeUnreached(number=number, why=why):
                if self._started.get(number) == route:
                    self._tell(node=number, unreached=why)
            case NodeEnded(number=number, why=why, swept=swept):
                if self._started.get(number) == route:
                    self._tell(node=number, gone=why, swept=swept)
            case _:
                why = "driver and machine have different versions of phalanx: install one on both"
                self._refused("", why)
                self._post(route, encode(Fenced(why=why)))

    def _offer(self) -> None:
        """Offer the machines that are free, and still there, for the nodes that are wanted."""
        free = [route for route in self._free if self._post(route, encode(Answer(number=0)))]
        while self._wanted and free:
            number = self._wanted.pop(0)
            self._offered[number] = free.pop(0)
            self._tell(node=number, offered=True)
        self._free = free
        if self._wanted:
            self._tell(shortage=f"{len(self._wanted)} more have to join at {self._endpoint}")

    def _post(self, route: bytes, parts: list[bytes]) -> bool:
        """Send to a machine; return False if its connection has ended."""
        with contextlib.suppress(zmq.ZMQError):
            self._router.send_multipart([route, *parts], zmq.NOBLOCK)
            return True
        self._machines.discard(route)
        return False

    def _refused(self, address: str, why: str) -> None:
        if why not in self._refusals:
            self._refusals.add(why)
            self._tell(refused=why, address=address)

    def _tell(self, **what: Any) -> None:
        with contextlib.suppress(OSError):  # if the driver has closed its end, that is read next
            self._control.send(json.dumps(what).encode(), socket.MSG_NOSIGNAL)
