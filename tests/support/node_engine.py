"""An engine that needs nothing: its machines are slots of this one, or namespaces of it.

Two node processes beside each other have two places, as on two machines.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from phalanx.actors import Launch
from phalanx.cluster.driver.engine import Cluster, EngineEvents
from phalanx.cluster.driver.options import ClusterOptions
from phalanx.cluster.link.messages import NodeOrder, encode
from phalanx.cluster.node_process.starter import NodeStarter
from phalanx.runtime import RELAY_PRELOAD, EventLoop, process_tree
from phalanx.supervision import RuntimeFault

CLOSE = 5.0
ONE_ZYGOTE = Launch(preload=RELAY_PRELOAD)
"""Has the ranks of a node forked from the process that their relay is forked from."""


class LocalEngine:
    """Starts node processes as plain local processes.

    Args:
        slots: How many machines it has.
        prefix: What the command line of a node on that machine begins with.
        edit: Changes the orders of nodes.
        ranks_per_node: What it says of its machines.
        agents: Whether each node is started by a separate process.

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
        agents: bool = False,
    ) -> None:
        self._loop = loop
        self._starter: type[NodeStarter | Agent] = Agent if agents else NodeStarter
        self._name = uuid.uuid4()
        self._prefix = prefix
        self._edit = edit
        self._cluster = Cluster(address="127.0.0.1", ranks_per_node=ranks_per_node)
        self._lock = threading.Lock()
        self._free = list(range(slots))
        self._waiting: list[int] = []
        self._events: dict[int, EngineEvents] = {}
        self._mute: set[int] = set()
        self._unreachable: set[int] = set()
        self._threads: list[threading.Thread] = []
        self._threads_lock = threading.Lock()
        self.starters: dict[int, Any] = {}
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

        starter = self.starters[number] = self._starter(
            self._loop,
            self._edit(order),
            on_key=lambda key: events.started(number, key),
            on_gone=gone,
            on_unreached=lambda why: events.unreached(number, why),
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
            if starter is not None and number not in self._unreachable:
                with suppress(RuntimeFault):
                    starter.close(time.monotonic() + CLOSE)
            with self._lock:
                if number in self._waiting:
                    self._waiting.remove(number)
                if self._events.pop(number, None) is not None and number in self.slot_of:
                    self._free.append(self.slot_of[number])
                self._offer()

        self._run(release)

    @property
    def is_ending(self) -> bool:
        return False

    def shortage(self) -> str:
        return ""

    def mute(self, number: int) -> None:
        """Tell nothing of that node's end, as if its machine could not be reached."""
        self._mute.add(number)

    def cut_off(self, number: int) -> None:
        """Do nothing to that node either, before the end."""
        self._unreachable.add(number)
        self.mute(number)

    def pid_of(self, number: int) -> int:
        pid: int | None = self.starters[number].pid
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


class Agent:
    """Stands for a `NodeStarter`, which is in a process beside the driver."""

    def __init__(
        self,
        loop: EventLoop,
        order: NodeOrder,
        *,
        on_key: Callable[[str], None],
        on_gone: Callable[[str, bool], None],
        on_unreached: Callable[[str], None],
        prefix: Sequence[str] = (),
    ) -> None:
        del loop, prefix, on_unreached
        self.pid: int | None = None
        self._order = encode(order)[0].decode()
        self._tag = process_tree.TreeTag("", order.place)
        self._on_key = on_key
        self._on_gone = on_gone
        self._process: subprocess.Popen[str] | None = None
        self._thread = threading.Thread(target=self._listen)

    def start(self) -> None:
        words = [sys.executable, "-m", "tests.support.node_agent", self._order]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen(words, cwd=Path(__file__).parents[2], **pipes)
        self._thread.start()

    @property
    def agent(self) -> int:
        assert self._process is not None
        return self._process.pid

    def close(self, deadline: float) -> None:
        if (process := self._process) is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        self._thread.join(max(0.0, deadline - time.monotonic()))
        process.kill()
        self._thread.join()

    def _listen(self) -> None:
        assert self._process is not None
        gone = ("its agent has ended", False)
        with self._process as process:
            assert process.stdout is not None
            for line in process.stdout:
                match json.loads(line) if line.startswith("{") else None:
                    case {"key": key, "pid": pid}:
                        self.pid = pid
                        self._on_key(key)
                    case {"gone": why, "swept": swept}:
                        gone = (why, swept)
                        break
                    case _:
                        pass
            self._on_gone(*gone)
            process.wait()


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalNodes(ClusterOptions):
    """The options of a group on such nodes.

    Attributes:
        engine_options: Those of `LocalEngine`.
        engine_type: Which engine.
        engines: The engines that were made of it.
    """

    engine_options: dict[str, Any] = field(default_factory=dict[str, Any])
    engine_type: type[LocalEngine] = LocalEngine
    engines: list[LocalEngine] = field(default_factory=list[LocalEngine])

    def engine(self, loop: EventLoop, *, gpus_per_rank: float) -> LocalEngine:
        del gpus_per_rank
        size = self.ranks_per_node or 1
        self.engines.append(self.engine_type(loop, ranks_per_node=size, **self.engine_options))
        return self.engines[-1]
