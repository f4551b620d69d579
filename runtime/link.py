"""A worker's birth, and its way back to its driver beside the answers to calls.

Guarantees: what is told is sent before `Link.tell` returns; it may be told from any thread.

Left to others: the answers to calls (`replies`), and the pulse's own thread (`pulse`).
"""

from __future__ import annotations

import os
import queue
import threading
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from .codec import encode
from .frames import Frame, send
from .gloo import end_gloo_connections
from .payload import Payload
from .pulse import Pulse, keep_pulse
from .wire import Kind

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Mapping

    from .hosted import Hosted
    from .termination import Termination


@dataclass(frozen=True, slots=True)
class Boot:
    """What a worker is told at its birth; pickled by name.

    Attributes:
        host: Given *blob* and a `Link`, returns what to host. Importable by name.
        blob: What the layer above sends to itself.
    """

    rank: int
    incarnation: int
    epoch: int
    host: Callable[[bytes, Link], Hosted]
    blob: bytes


@dataclass(slots=True)
class Link:
    """A worker's way back to its driver, beside the answers to calls.

    Attributes:
        pid: Of the process that was started; a copy that it forks is another, and may not answer.
    """

    control: socket.socket
    rank: int
    incarnation: int
    epoch: int
    fds: Mapping[str, int] = field(default_factory=dict[str, int])
    pid: int = field(default_factory=os.getpid)
    _told: queue.SimpleQueue[Frame | None] = field(
        default_factory=queue.SimpleQueue["Frame | None"]
    )
    _entering: threading.Lock = field(default_factory=threading.Lock)

    def keep_pulse(self, termination: Termination) -> None:
        """Answer the driver beside the main loop from now on; what else it says, `receive` has."""

        def answer(number: int, pulse: Pulse) -> None:
            self.tell(Kind.PULSE, replace(pulse, epoch=self.epoch), number=number)

        def hear(frame: Frame | None) -> None:
            if frame is None or frame.kind in (Kind.DRAINING, Kind.TERMINATE):
                termination.hear(None if frame is None else frame.kind)
            if frame is None or frame.kind not in (Kind.DRAINING, Kind.TERMINATE):
                self._told.put(frame)

        keep_pulse(self.control, answer, self._part, hear)
        termination.listen()

    def enter(self, epoch: int) -> None:
        """Note that the worker leaves its process group for that of *epoch*."""
        with self._entering:
            self.epoch = epoch

    def _part(self, epoch: int) -> None:
        """End the connections of the process group that is to be left, unless it is left already.

        Those that would be ended then are of the next one.
        """
        with self._entering:
            if self.epoch < epoch:
                end_gloo_connections()

    def receive(self) -> Frame | None:
        """Return what the driver says outside of any call, or None at the end; waits for it."""
        return self._told.get()

    def tell(self, kind: int, value: object = None, *, number: int = 0) -> None:
        """Send *value* to the driver, outside of any call; *number* is what it answers to."""
        payload = Payload.of(None if value is None else encode(value, "the event"))
        try:
            packet = payload.packet(
                kind, epoch=self.epoch, call_id=number, incarnation=self.incarnation
            )
            send(self.control, packet, payload.file)
        finally:
            payload.close()
