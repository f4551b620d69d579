"""`BrokeredEngine`: an engine whose work is done by a helper process, its broker.

- The broker reserves machines and starts node processes on them; it takes orders and reports
  `EngineEvents` as JSON over the control socket.
- When it dies all its nodes are lost, which is reported once for each; the broker is replaced.
  The first one has to reach its cluster; later ones try for as long as it takes.
- Requests made between two events of the loop go to the broker in one message.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
import uuid
from typing import TYPE_CHECKING, Any

from phalanx.cluster.link.messages import encode
from phalanx.runtime import Helper, interpreter, start_helper
from phalanx.supervision import RuntimeFault

from .engine import Cluster

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Mapping

    from phalanx.cluster.link.messages import NodeOrder
    from phalanx.runtime import EventLoop, Process
    from phalanx.supervision import ExitReason

    from .engine import EngineEvents

_CONNECT = 60.0  # seconds to reach the cluster; Ray by itself tries for 200
_RELEASE = 15.0  # seconds for the nodes that are being ended when the engine is closed
_CLOSE = 10.0


class BrokeredEngine:
    """The engine; see `Engine`.

    Args:
        name: The broker's name in events and errors.
        module: Has the broker's ``main``.
        opening: The first message to each broker; it is given a ``name`` that is the engine's own,
            and ``again``, whether a broker has reached the cluster before.
        tells_end: Whether machines wait for a broker until one reports that the driver ends.
    """

    def __init__(
        self,
        loop: EventLoop,
        name: str,
        module: str,
        opening: Mapping[str, Any],
        *,
        tells_end: bool = False,
    ) -> None:
        self._tells_end = tells_end
        self._loop = loop
        self._name = name
        self._module = module
        self._opening = {**opening, "name": str(uuid.uuid4())}
        self._changed = threading.Condition()
        self._nodes: dict[int, EngineEvents] = {}  # requested, and not released
        self._new: list[int] = []  # not yet sent to the broker
        self._leaving: set[int] = set()  # whose release the broker has not reported
        self._cluster: Cluster | None = None  # once it has been reached
        self._failure = ""
        self._is_telling = False  # that all nodes are gone
        self._shortage = ""
        self._helper = Helper(
            loop,
            name,
            self._spawn,
            on_message=self._on_message,
            on_exit=self._exited,
            replay=self._replay,
        )

    @property
    def pid(self) -> int | None:
        """The broker; None while there is none."""
        return self._helper.pid

    def open(self) -> Cluster:
        """See `Engine`."""
        self._helper.start()
        with self._changed:
            self._changed.wait_for(lambda: self._cluster or self._failure, _CONNECT)
            cluster, failure = self._cluster, self._failure
        if cluster is None:
            self.close()
            raise RuntimeFault(failure or f"the {self._name} took more than {_CONNECT:g} s")
        return cluster

    def reserve(self, number: int, events: EngineEvents) -> None:
        """See `Engine`."""
        with self._changed:
            self._nodes[number] = events
            self._new.append(number)
            if len(self._new) > 1:
                return
        self._loop.post(self._ask)

    def start(self, number: int, order: NodeOrder) -> None:
        """See `Engine`."""
        self._send({"start": number, "order": encode(order)[0].decode()})

    def release(self, number: int) -> None:
        """See `Engine`."""
        with self._changed:
            if self._nodes.pop(number, None) is None:
                return
            if number in self._new:
                self._new.remove(number)
                return
            self._leaving.add(number)
        if not self._send({"release": number}):
            self._released(number)  # with the broker

    def shortage(self) -> str:
        """See `Engine`."""
        with self._changed:
            return self._shortage

    @property
    def is_ending(self) -> bool:
        """See `Engine`."""
        return self._helper.is_ending or self._is_telling

    def close(self) -> None:
        """See `Engine`."""
        with self._changed:
            numbers = list(self._nodes)
        for number in numbers:
            self.release(number)
        with self._changed:
            self._changed.wait_for(lambda: not self._leaving, _RELEASE)
        if self._tells_end and self._cluster is not None:
            with contextlib.suppress(RuntimeFault):
                self._helper.start()  # unless there is one
        self._helper.close(time.monotonic() + _CLOSE, ask=True)

    def _spawn(self, control: socket.socket, on_exit: Callable[[Process], None]) -> Process:
        # Not by `-m`: a module in the working folder would take the place of one of ours.
        command = interpreter.command(self._module, sys.path)
        return start_helper(self._loop, self._name, command, [], control=control, on_exit=on_exit)

    def _send(self, order: Mapping[str, Any]) -> bool:
        return self._helper.send(json.dumps(order).encode())

    def _replay(self) -> list[tuple[bytes, tuple[int, ...]]]:
        with self._changed:
            self._new.clear()
            opening = {**self._opening, "again": self._cluster is not None}
            asked = {"reserve": list(self._nodes)}
        return [(json.dumps(each).encode(), ()) for each in (opening, asked)]

    # --- on the event loop's thread -----------------------------------------------------------

    def _ask(self) -> None:
        with self._helper.lock, self._changed:  # or a new broker would get it twice
            if self._new and self._send({"reserve": self._new}):
                self._new.clear()

    def _on_message(self, data: bytes, _fds: list[int]) -> None:
        message: dict[str, Any] = json.loads(data)
        with self._changed:
            events = self._nodes.get(message.get("node", -1))
        match message:
            case {"offered": _} if events:
                with self._changed:
                    self._shortage = ""
                events.offered(message["node"])
            case {"key": key} if events:
                events.started(message["node"], key)
            case {"unreached": why} if events:
                events.unreached(message["node"], why)
            case {"doubt": why} if events:
                events.suspect_reported(message["node"], why)
            case {"gone": why, "swept": swept} if events:
                events.gone(message["node"], why, swept=swept)
            case {"refused": why, "address": address}:
                if (events := self._any()) is not None:
                    events.refused(address, why)
            case {"engine_gone": why}:
                if (events := self._any()) is not None:
                    events.engine_gone(why)
            case {"released": _}:
                self._released(message["node"])
            case {"address": address, "ranks_per_node": ranks}:
                with self._changed:
                    self._cluster = Cluster(address=address, ranks_per_node=ranks)
                    self._changed.notify_all()
            case {"shortage": shortage}:
                with self._changed:
                    self._shortage = shortage
            case {"failed": why}:
                with self._changed:
                    self._failure = self._shortage = why
                    self._changed.notify_all()
            case _:
                pass

    def _any(self) -> EngineEvents | None:
        with self._changed:
            return next(iter(self._nodes.values()), None)

    def _released(self, number: int) -> None:
        with self._changed:
            self._leaving.discard(number)
            self._changed.notify_all()

    def _exited(self, pid: int | None, reason: ExitReason) -> bool:
        why = f"the {self._name} has ended: {reason}"
        lost: dict[int, EngineEvents] = {}
        with self._changed:
            if pid is not None:  # else one could not be started: the next gets all requests
                lost, self._nodes, self._new = self._nodes, {}, []
                self._leaving.clear()
            self._failure = self._failure or why
            self._shortage = self._shortage or why
            self._changed.notify_all()
            was_reached = self._cluster is not None
        self._is_telling = True
        for number, events in lost.items():
            events.gone(number, why, swept=False, counts_against_machine=False)
        self._loop.post(self._has_told)  # behind what these have posted
        return was_reached

    def _has_told(self) -> None:
        self._is_telling = False
