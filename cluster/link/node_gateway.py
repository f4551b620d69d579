"""The driver's end of the gateway of a cluster, through which nodes and ranks are reached.

- Each process makes a key pair; the secret half never leaves it.
- Reports of the process are delivered on the event loop's thread, in order. One that has died is
  replaced; its links are lost with it, and its nodes end.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any, Protocol

from phalanx.runtime import Gateway, discard_event

from .messages import decode, encode

if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx.runtime import EventLoop, Launcher, LoggedEvent, Zmq
    from phalanx.supervision import ExitReason

    from .messages import Message


_SHORT = 16 * 1024  # bytes of a message that takes no descriptor on its way


class GatewayEvents(Protocol):
    """Callbacks of the gateway, on the event loop's thread. Times are monotonic."""

    def ready(self) -> None:
        """There is a new process, which listens."""

    def received(self, number: int, message: Message, at: float) -> None:
        """A node has sent a message; not a beat."""

    def beat_received(self, number: int, at: float) -> None:
        """A beat of a node has come, and was answered."""

    def closed(self, number: int, at: float) -> None:
        """The link of a node has ended; all its messages have been delivered."""

    def silenced(self, number: int, last: float) -> None:
        """A node is not answered any longer; the last answer was due no later than *last*."""

    def asked(self, at: float) -> None:
        """All messages from before *at* have been delivered; the answer to `NodeGateway.ask`."""

    def misbehaved(self, number: int, why: str) -> None:
        """A node has broken the rules of the link."""

    def refused(self, address: str, why: str) -> None:
        """A connection was refused; reported once for each *why*."""

    def down(self, at: float) -> None:
        """The process has ended, and all links with it; no answer left after *at*."""


class NodeGateway(Gateway):
    """The gateway of a group on a cluster, for its nodes and its ranks. Thread-safe but for ranks.

    Its process is replaced when it has died; all nodes and ranks end with it.
    """

    def __init__(
        self,
        loop: EventLoop,
        launcher: Launcher,
        options: Zmq,
        *,
        group: str,
        events: GatewayEvents,
        on_event: Callable[[LoggedEvent], None] = discard_event,
    ) -> None:
        super().__init__(loop, launcher, options, group=group, on_event=on_event)
        self._entry = "phalanx.cluster.link.node_gateway_main:main"
        self._events = events
        self._has_served = False  # else the group cannot be started

    def admit(self, number: int, key: str) -> None:
        """Let the node process that has the secret of *key* connect, once, as that node."""
        self._send({"admit": number, "key": key})

    def send(self, number: int, message: Message) -> bool:
        """Send *message* to a node; False if there is no process to send it.

        Raises:
            OSError: it is long, and there is no descriptor or no memory for it.
        """
        parts = encode(message)
        if len(parts) == 1 and len(parts[0]) <= _SHORT:
            return self._send({"to": number, "message": parts[0].decode()})
        order = {"to": number, "sizes": [len(part) for part in parts]}
        with os.fdopen(os.memfd_create("phalanx-message"), "wb") as file:
            file.writelines(parts)
            file.flush()
            return self._send(order, file.fileno())

    def silence(self, number: int, why: str) -> bool:
        """Answer no beat of that node any longer; `GatewayEvents.silenced` follows if True."""
        return self._send({"silence": number, "why": why})

    def forget(self, number: int) -> None:
        """Drop what is known of a node that has ended."""
        self._send({"forget": number})

    def ask(self, number: int) -> bool:
        """Have `GatewayEvents.asked` called once, unless the process ends before."""
        return self._send({"ask": number})

    def kill(self, why: str) -> None:
        """Kill the process, to be replaced by another."""
        self._helper.kill(why)

    # --- on the event loop's thread ---------------------------------------------------------

    def _dispatch(self, head: dict[str, Any], raw: bytes) -> None:
        events = self._events
        for number, at in head.get("heard", {}).items():
            events.beat_received(int(number), at)
        super()._dispatch(head, raw)
        match head:
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
            case {"ready": _}:
                events.ready()
            case _:
                pass

    def _refused(self, address: str, why: str) -> None:
        self._events.refused(address, why)

    def _exited(self, pid: int | None, reason: ExitReason) -> bool:
        self._has_served = self._has_served or bool(self.endpoint)
        super()._exited(pid, reason)
        if self._has_served and pid is not None:
            self._events.down(time.monotonic())
        return self._has_served or pid is None
