"""Offer this machine to a driver, as a node for its ranks.

For srun, pods, and any other launcher. Connects to the driver, whose Executor has
cluster=JoinedNodes(bind=HOST, port=PORT), and runs a node when the driver wants
one, with the GPUs that CUDA_VISIBLE_DEVICES leaves; after that has ended, another.
If the connection to the driver is lost without a goodbye, it ends its processes,
and waits for the driver again. The key of the driver is read from a file, or from
the environment variable PHALANX_NODE_KEY. All processes of the node end with this
command.

Exit codes:
  0  the driver has ended in good order
  1  the driver was not reached, or refuses this machine: other key, other versions
  2  the command line is invalid, or there is no key
  130  Ctrl-C, or SIGTERM

Examples:
  phalanx node --join 10.0.0.1:29600 --key-file /shared/node.key
"""

from __future__ import annotations

import math
import os
import re
import signal
import socket
import sys
import threading
import time
import uuid
from collections import deque
from contextlib import closing, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import zmq
from zmq.utils import z85

from phalanx.cluster.link.handshake import greeting_of
from phalanx.cluster.link.messages import (
    Fenced,
    Leave,
    NodeEnded,
    NodeKey,
    NodeOrder,
    NodeUnreached,
    Withdraw,
)
from phalanx.cluster.link.node_link import LinkState, NodeLink
from phalanx.cluster.node_process.starter import NodeStarter
from phalanx.runtime import EventLoop
from phalanx.supervision import NodeRefused, RuntimeFault, SpecError, check_seconds

from .options import VARIABLE, secrets_of_key

if TYPE_CHECKING:
    import argparse

    from phalanx.cluster.link.messages import Message

_ADDRESS = re.compile(r"(\[[\da-fA-F:.]+\]|[\w.-]+):(?P<port>\d{1,5})", re.ASCII)
_LOOK = 1000  # milliseconds between looks at the time
_QUIET = 1.0  # seconds without a driver, after which that is said; and for its name, at most
_ATTEMPTS = 10  # that end in the handshake; a few may, where a driver is about to listen, or to end
_CLOSE = 10.0
_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\0" + b"CURVE".ljust(52, b"\0")  # of ZMTP 3.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command line of this subcommand."""
    add = parser.add_argument
    add("--join", required=True, metavar="HOST:PORT", help="where the driver listens for nodes")
    file = f"file with the key, which no others may read; else {VARIABLE} has the key"
    add("--key-file", metavar="FILE", help=file)
    wait = "seconds for the driver to be reached (600)"
    add("--wait", type=float, default=600.0, metavar="S", help=wait)


def run(arguments: argparse.Namespace) -> int:
    """Serve the driver until it ends."""
    address = _ADDRESS.fullmatch(arguments.join)
    if address is None or int(address["port"]) not in range(1, 65536):
        raise SpecError("join", arguments.join, "give HOST:PORT, where the driver listens")
    wait = check_seconds("wait", arguments.wait, finite=False)
    driver, node = secrets_of_key("key_file", arguments.key_file)
    os.environ.pop(VARIABLE, None)  # ranks have no use for it
    if os.getpid() == 1 and (child := os.fork()):
        return _serve_as_init(child)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with closing(_Machine(arguments.join, driver, node)) as machine:
        machine.join(wait)
        while not machine.serve():
            machine.join(wait)
    return 0


def _serve_as_init(child: int) -> int:
    """Be the init of a container: collect what others leave; return the exit code of *child*."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: os.kill(child, number))
    while True:
        pid, status = os.wait()
        if pid == child:
            return os.waitstatus_to_exitcode(status)


class _Machine:
    """This machine, which has one node at a time."""

    def __init__(self, address: str, driver: bytes, node: bytes) -> None:
        self._address = address
        driver_key = zmq.curve_public(z85.encode(driver)).decode()
        self._link = NodeLink(f"tcp://{address}", driver_key, z85.encode(node))
        self._loop = EventLoop()
        self._starter: NodeStarter | None = None
        self._node: int | None = None  # the number of its node; None while it is free
        self._place = uuid.uuid4().hex
        self._news: deque[Message] = deque()  # of other threads, for this connection
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def join(self, wait: float) -> None:
        """Connect, within *wait* seconds.

        Raises:
            NodeRefused: the other end has not the key.
            RuntimeFault: there is no other end, or one that is no driver's, as a proxy without one.
        """
        until, tell_at, why = time.monotonic() + wait, time.monotonic() + _QUIET, ""
        self._link.connect()
        while self._link.state is not LinkState.OPEN:
            if self._link.failures >= _ATTEMPTS and self._is_driver():
                raise NodeRefused(f"{self._address} has another key, or is not a phalanx driver")
            if time.monotonic() >= until:
                missing = f"no driver was reached at {self._address} within {wait:g} s"
                raise RuntimeFault(missing + why)
            if time.monotonic() >= tell_at:
                tell_at, why = math.inf, self._why_unresolved()
                _say(f"waiting for a driver at {self._address}{why}")
            self._wait(_LOOK)

    def _why_unresolved(self) -> str:
        """Return what is wrong with the driver's host name, which may get known yet; or ""."""
        host, found = self._address.rpartition(":")[0].strip("[]"), [": its name is looked up"]

        def look_up() -> None:
            try:
                socket.getaddrinfo(host, None)
            except (OSError, UnicodeError) as error:
                why = getattr(error, "strerror", None) or error
                found[0] = f": the host {host!r} is not found ({why})"
            else:
                found[0] = ""

        thread = threading.Thread(target=look_up, daemon=True)  # without servers it takes minutes
        thread.start()
        thread.join(_QUIET)
        return found[0]

    def _is_driver(self) -> bool:
        """Return whether the other end, which ends each connection, speaks as a driver does."""
        self._link.failures, said = 0, b""
        host, _, port = self._address.rpartition(":")
        with suppress(OSError), socket.create_connection((host.strip("[]"), int(port)), 1.0) as raw:
            raw.sendall(_GREETING)
            while len(said) < len(_GREETING) and (more := raw.recv(len(_GREETING))):
                said += more
        return b"CURVE" in said

    def serve(self) -> bool:
        """Run nodes until the driver has said that it ends; return False if it was lost before.

        Raises:
            NodeRefused: it will not have this machine.
        """
        _say(f"joined {self._address}")
        self._news = deque()
        self._greet()
        while True:
            is_open = self._link.state is LinkState.OPEN
            while self._news and is_open:
                self._link.send(message := self._news.popleft())
                if isinstance(message, NodeEnded) and message.number == self._node:
                    self._greet()
            match self._link.receive():
                case NodeOrder() as order:
                    self._start(order)
                case Withdraw(number=number) if number == self._node:
                    _say(f"node {number} is not wanted any longer")
                    self._end_node()
                    self._greet()
                case Fenced(why=why):
                    raise NodeRefused(why)
                case Leave():
                    _say(f"the driver at {self._address} has ended")
                    self._link.renew()  # by which the driver's side knows that this was heard
                    return True
                case None if not is_open:
                    _say(f"the driver at {self._address} is lost")
                    self._end_node()
                    self._link.renew()
                    return False
                case None:
                    self._wait()
                case _:
                    pass

    def close(self) -> None:
        """End the node, and what it has left."""
        self._end_node()
        self._link.close()
        self._loop.close()

    def _greet(self) -> None:
        """Say that this machine has no node."""
        self._node = None
        self._link.send(greeting_of(self._place, self._link.address))

    def _end_node(self) -> None:
        if self._starter is not None:
            self._starter.close(time.monotonic() + _CLOSE)
            self._starter = None

    def _wait(self, milliseconds: int | None = None) -> None:
        """Wait for an event of the link or the node."""
        poller = zmq.Poller()
        for each in (self._wakeup, self._link.socket, self._link.monitor):
            poller.register(each, zmq.POLLIN)
        poller.poll(milliseconds)
        with suppress(BlockingIOError):
            os.eventfd_read(self._wakeup)
        self._link.look()

    def _start(self, order: NodeOrder) -> None:
        news = self._news  # what comes of this node later is for no other connection

        def report(message: Message) -> None:
            news.append(message)
            os.eventfd_write(self._wakeup, 1)

        def gone(why: str, swept: bool) -> None:
            _say(f"node {order.number} is gone: {why}")
            report(NodeEnded(number=order.number, why=why, swept=swept))

        def unreached(why: str) -> None:
            _say(f"node {order.number} on {why}")
            report(NodeUnreached(number=order.number, why=why))

        self._node = order.number
        self._starter = NodeStarter(
            self._loop,
            replace(order, place=self._place),
            on_key=lambda key: report(NodeKey(number=order.number, key=key)),
            on_gone=gone,
            on_unreached=unreached,
        )
        try:
            self._starter.start()
        except RuntimeFault as error:
            gone(str(error), swept=True)


def _say(what: str) -> None:
    with suppress(OSError):  # a full disk, or a reader that has gone, ends no node
        sys.stderr.write(f"phalanx node: {what}\n")
