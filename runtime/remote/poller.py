"""A poller of ZeroMQ's sockets and ordinary descriptors at once.

Guarantees: what is wanted of a descriptor is told to ZeroMQ only when it changes; waiting takes no
processor time.

Left to others: closing a descriptor only after it is wanted for nothing (`want` with 0).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import zmq

if TYPE_CHECKING:
    from collections.abc import Mapping

IN = int(zmq.POLLIN)  # plain numbers: arithmetic with ZeroMQ's own takes a microsecond
OUT = int(zmq.POLLOUT)


class Poller:
    """What one process waits for."""

    def __init__(self) -> None:
        self._poller = zmq.Poller()
        self._wanted: dict[Any, int] = {}

    def want(self, what: Any, events: int) -> None:
        """Wait for *events* of *what*, a ZeroMQ socket or a descriptor, from now on."""
        if self._wanted.get(what, 0) == events:
            return
        if events:
            self._wanted[what] = events
        else:
            del self._wanted[what]
        self._poller.register(what, events)

    def until(self, due: float) -> Mapping[Any, int]:
        """Return what has happened, as events; nothing at *due* (monotonic)."""
        wait = max(0.0, due - time.monotonic())
        return dict(self._poller.poll(int(wait * 1000) + 1))
