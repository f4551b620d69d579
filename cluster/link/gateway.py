"""The driver's end of the gateway: the process through which all its nodes are reached.

- Each process makes a key pair; the secret half never leaves it.
- What the process tells comes on the event loop's thread, in order. One that has died is replaced;
  its links are gone with it, and its nodes end.
"""

from __future__ import annotations

import json
import os
import pickle
import threading
import time
from typing import TYPE_CHECKING, Any, Protocol

from phalanx.runtime import RELAY_PRELOAD, Helper, LaunchSpec
from phalanx.supervision import RuntimeFault

from .messages import decode, encode

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from phalanx.runtime import EventLoop, Launcher, Process, Zmq
    from phalanx.supervision import ExitReason

    from .messages import Message

_START = 60.0  # seconds; a zygote that is still importing comes first
_CLOSE = 5.0


class GatewayEvents(Protocol):
    """What the gateway tells, on the event loop's thread. Times are monotonic."""

    def ready(self) -> None:
        """There is a new process, which listens."""

    def received(self, number: int, message: Message, at: float) -> None:
        """A node has sent a message; not a beat."""

    def heard(self, number: int, at: float) -> None:
        """A beat of a node has come, and was answered."""

    def closed(self, number: int, at: float) -> None:
        """The link of a node has ended; all that it had sent has been told."""

    def silenced(self, number: int, last: float) -> None:
        """A node is not answered any longer; the last answer was due no later than *last*."""

    def asked(self, at: float) -> None:
        """All that was heard before *at* has been told; the answer to `NodeGateway.ask`."""

    def misbehaved(self, number: int, why: str) -> None:
        """A node has broken the rules of the link."""

    def refused(self, address: str, why: str) -> None:
        """A stranger tried to connect; told once for each *why*."""

    def down(self, at: float) -> None:
        """The process has ended, and all links with it; no answer left after *at*."""


class NodeGateway:
    """The process of one group, through all its lives.

    Args:
        launcher: Starts the process.

    Attributes:
        endpoint: What nodes connect to, as ``tcp://HOST:PORT``; empty while there is no process.
        key: Its public key, in ZeroMQ's encoding.
    """

    def __init__(
        self,
        loop: EventLoop,
        launcher: Launcher,
        options: Zmq,
        *,
        group: str,
        events: GatewayEvents,
    ) -> None:
        self._loop = loop
        self._launcher = launcher
        self._options = options
        self._group = group
        self._events = events
        self._changed = threading.Condition()
        self._failed = ""
        self.endpoint = self.key = ""
        self._helper = Helper(
            loop,
            f"node gateway of {group}",
            self._spawn,
            on_message=self._heard,
            on_exit=self._exited,
        )

    @property
    def pid(self) -> int | None:
        """The process; None while there is none."""
        return self._helper.pid

    def open(self) -> None:
        """Start the process; return once it listens. Not on the event loop's thread.

        Raises:
            RuntimeFault: it cannot be started, or not listen where it should.
        """
        self._helper.start()
        with self._changed:
            self._changed.wait_for(lambda: self.endpoint or self._failed, _START)
            if not self.endpoint:
                why = self._failed or f"it took more than {_START:g} s"
                raise RuntimeFault(f"the node gateway of {self._group} did not start: {why}")

    def admit(self, number: int, key: str) -> None:
        """Let the node process that has the secret of *key* connect, once, as that node."""
        self._order({"admit": number, "key": key})

    def send(self, number: int, message: Message) -> bool:
        """Send *message* to a node; False if there is no process to send it."""
        parts = encode(message)
        order = {"to": number, "sizes": [len(part) for part in parts]}
        with os.fdopen(os.memfd_create("phalanx-message"), "wb") as file:
            file.writelines(parts)
            file.flush()
            return self._order(order, file.fileno())

    def silence(self, number: int, why: str) -> bool:
        """Answer no beat of that node any longer; `GatewayEvents.silenced` follows if True."""
        return self._order({"silence": number, "why": why})

    def forget(self, number: int) -> None:
        """Drop what is known of a node that has ended."""
        self._order({"forget": number})

    def ask(self, number: int) -> bool:
        """Have `GatewayEvents.asked` called once, unless the process ends before."""
        return self._order({"ask": number})

    def kill(self, why: str) -> None:
        """Kill the process, to be replaced by another."""
        self._helper.kill(why)

    def close(self) -> None:
        """End the process. Idempotent. Not on the event loop's thread."""
        self._helper.close(time.monotonic() + _CLOSE, ask=True)

    def _order(self, order: dict[str, Any], *fds: int) -> bool:
        return self._helper.send(json.dumps(order).encode(), fds)

    def _spawn(self, control: socket.socket, on_exit: Callable[[Process], None]) -> Process:
        spec = LaunchSpec(
            entry="phalanx.cluster.link.gateway_main:main",
            payload=pickle.dumps(self._options),
            fds={"link": control.fileno()},
            label=f"{self._group}/node gateway",
            title=f"phalanx: {self._group} node gateway",
            preload=RELAY_PRELOAD,
        )
        deadline = time.monotonic() + _START
        return self._launcher.launch(spec, on_exit=on_exit, deadline=deadline)[0]

    # --- on the event loop's thread ---------------------------------------------------------

    def _heard(self, data: bytes, _fds: list[int]) -> None:
        head, _, raw = data.partition(b"\n")
        told: dict[str, Any] = json.loads(head)
        events = self._events
        for number, at in told.pop("heard").items():
            events.heard(int(number), at)
        match told:
            case {"from": number, "at": at}:
                events.received(number, decode([raw]), at)
            case {"closed": number, "at": at}:
                events.closed(number, at)
            case {"silenced": number, "last": last}:
                events.silenced(number, last)
            case {"now": at}:
                events.asked(at)
            case {"stray": number, "why": why}:
                events.misbehaved(number, why)
            case {"refused": why, "address": address}:
                events.refused(address, why)
            case {"ready": endpoint, "key": key}:
                with self._changed:
                    self.endpoint, self.key = endpoint, key
                    self._changed.notify_all()
                events.ready()
            case {"failed": why}:
                with self._changed:
                    self._failed = why
                    self._changed.notify_all()
            case _:
                pass

    def _exited(self, pid: int | None, reason: ExitReason) -> bool:
        with self._changed:
            was_ready, self.endpoint = bool(self.endpoint), ""
            if not was_ready:
                self._failed = self._failed or str(reason)
            self._changed.notify_all()
        if was_ready and pid is not None:
            self._events.down(time.monotonic())
        return was_ready or pid is None
