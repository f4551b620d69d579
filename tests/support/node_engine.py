"""An engine that needs nothing: its machines are slots of this one, or namespaces of it.

Two node processes beside each other have two places, as on two machines.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from phalanx.cluster.driver.engine import Cluster, EngineEvents
from phalanx.cluster.driver.options import ClusterOptions
from phalanx.cluster.link.messages import NodeOrder
from phalanx.cluster.node_process.starter import NodeStarter
from phalanx.runtime import EventLoop
from phalanx.supervision import RuntimeFault

CLOSE = 5.0


class LocalEngine:
    """Starts node processes as plain local processes.

    Args:
        slots: How many machines it has.
        prefix: What the command line of a node on that machine begins with.
        edit: Changes the orders of nodes.
        ranks_per_node: What it says of its machines.

    Attributes:
        starters: By node.
        slot_of: The machine of each node.
        told: What it has told of nodes that are gone.
    """

    def __init__(
        self,
        loop: EventLoop,
        slots: int = 9,
        *,
        prefix: Callable[[int], Sequence[str]] = lambda _: (),
        edit: Callable[[NodeOrder], NodeOrder] = lambda order: order,
        ranks_per_node: int = 1,
    ) -> None:
        self._loop = loop
        self._name = uuid.uuid4()
        self._prefix = prefix
        self._edit = edit
        self._cluster = Cluster(address="127.0.0.1", ranks_per_node=ranks_per_node)
        self._lock = threading.Lock()
        self._free = list(range(slots))
        self._waiting: list[int] = []
        self._events: dict[int, EngineEvents] = {}
        self._mute: set[int] = set()
        self._threads: list[threading.Thread] = []
        self._threads_lock = threading.Lock()
        self.starters: dict[int, NodeStarter] = {}
        self.slot_of: dict[int, int] = {}
        self.told: list[tuple[int, str, bool]] = []

    def open(self) -> Cluster:
        return self._cluster

    def reserve(self, number: int, events: EngineEvents) -> None:
        with self._lock:
            self._events[number] = events
            self._waiting.append(number)
            self._offer()

    def start(self, number: int, order: NodeOrder) -> None:
        slot, events = self.slot_of[number], self._events[number]
        order = replace(order, place=uuid.uuid5(self._name, str(slot)).hex)

        def gone(why: str, swept: bool) -> None:
            self.told.append((number, why, swept))
            if number not in self._mute:
                events.gone(number, why, swept=swept)

        starter = self.starters[number] = NodeStarter(
            self._loop,
            self._edit(order),
            on_key=lambda key: events.started(number, key),
            on_gone=gone,
            prefix=self._prefix(slot),
        )

        def start() -> None:
            try:
                starter.start()
            except RuntimeFault as error:
                gone(str(error), True)

        self._run(start)

    def release(self, number: int) -> None:
        def release() -> None:
            starter = self.starters.get(number)
            if starter is not None:
                with suppress(RuntimeFault):
                    starter.close(time.monotonic() + CLOSE)
            with self._lock:
                if number in self._waiting:
                    self._waiting.remove(number)
                if self._events.pop(number, None) is not None and number in self.slot_of:
                    self._free.append(self.slot_of[number])
                self._offer()

        self._run(release)

    def shortage(self) -> str:
        return ""

    def mute(self, number: int) -> None:
        """Tell nothing of that node's end, as if its machine could not be reached."""
        self._mute.add(number)

    def pid_of(self, number: int) -> int:
        pid = self.starters[number].pid
        assert pid is not None
        return pid

    def close(self) -> None:
        for starter in self.starters.values():
            starter.close(time.monotonic() + CLOSE)
        with self._threads_lock:
            threads = list(self._threads)
        for thread in threads:
            thread.join(2 * CLOSE)

    def _run(self, act: Callable[[], None]) -> None:
        with self._threads_lock:
            thread = threading.Thread(target=act)
            thread.start()
            self._threads.append(thread)

    def _offer(self) -> None:
        while self._free and self._waiting:
            number = self._waiting.pop(0)
            self.slot_of[number] = self._free.pop(0)
            self._events[number].offered(number)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalNodes(ClusterOptions):
    """The options of a group on such nodes.

    Attributes:
        engine_options: Those of `LocalEngine`.
        engines: The engines that were made of it.
    """

    engine_options: dict[str, Any] = field(default_factory=dict[str, Any])
    engines: list[LocalEngine] = field(default_factory=list[LocalEngine])

    def engine(self, loop: EventLoop, *, gpus_per_rank: float) -> LocalEngine:
        del gpus_per_rank
        size = self.ranks_per_node or 1
        self.engines.append(LocalEngine(loop, ranks_per_node=size, **self.engine_options))
        return self.engines[-1]
