"""For tests of nodes: an owner with a real gateway and real nodes, and what it tells."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from tests.support.node_engine import LocalEngine
from tests.support.processes import LONG, wait_until

from phalanx.cluster.driver.engine import Engine
from phalanx.cluster.driver.node_owner import NodeOwner
from phalanx.cluster.link.messages import Ended, Launch, RankLaunch, Started
from phalanx.cluster.link.node_gateway import NodeGateway
from phalanx.cluster.nodes.decide import NodeLimits
from phalanx.runtime import EventLoop, Launcher, Zmq, process_tree

Kind = TypeVar("Kind")
QUICK = NodeLimits(lease=3.0, wait=20.0, join=20.0, leave=20.0)


class Told:
    """A listener that keeps each event, with the time."""

    def __init__(self, event_timeout: float = LONG) -> None:
        self.all: list[tuple[str, int, Any, float]] = []
        self._event_timeout = event_timeout
        self._news = threading.Condition()

    def __getattr__(self, name: str) -> Callable[..., None]:
        return partial(self._on_event, name)

    def of(self, what: str, number: int | None = None) -> list[tuple[Any, float]]:
        return [(x, at) for w, n, x, at in self.all if w == what and number in (None, n)]

    def wait(self, what: str, number: int | None = None, count: int = 1) -> tuple[Any, float]:
        """Return the last of *count* things of that name, and when it was told."""
        with self._news:
            enough = self._news.wait_for(
                lambda: len(self.of(what, number)) >= count, self._event_timeout
            )
            assert enough, f"no {what} of {number}: {self.all}"
        return self.of(what, number)[count - 1]

    def _on_event(self, what: str, *told: Any) -> None:
        """Keep a message under its own name, and what is said of no node under -1."""
        name = type(told[1]).__name__ if what == "received" else what
        number = told[0] if told and isinstance(told[0], int) else -1
        with self._news:
            self.all.append((name, number, told[-1] if told else None, time.monotonic()))
            self._news.notify_all()


class NodeGroup:
    """An owner and its gateway, with any engine.

    Args:
        event_timeout: Seconds to wait for an event.
    """

    def __init__(
        self,
        loop: EventLoop,
        launcher: Launcher,
        engine: Engine,
        limits: NodeLimits,
        options: Zmq,
        event_timeout: float = LONG,
    ) -> None:
        self.told = Told(event_timeout)
        self.gateway: NodeGateway

        def gateway(owner: NodeOwner) -> NodeGateway:
            self.gateway = NodeGateway(loop, launcher, options, group="tp", events=owner)
            return self.gateway

        listener: Any = self.told
        self.owner = NodeOwner(loop, engine, gateway, limits, listener)
        self._engine = engine
        self._launches = 0

    def open(self, nodes: int) -> None:
        """Have *nodes*, all of which serve."""
        self.gateway.open()
        self.owner.want(nodes)
        for number in range(nodes):
            self.told.wait("admitted", number)

    def start(
        self,
        number: int,
        entry: str,
        payload: str = "",
        ranks: tuple[int, ...] = (0,),
        incarnation: int = 1,
    ) -> tuple[int, ...]:
        """Start *ranks* on a node that run *entry*; return their pids."""
        self._launches += 1
        order = Launch(
            number=self._launches,
            ranks=tuple(
                RankLaunch(
                    rank=rank,
                    incarnation=incarnation,
                    entry=f"tests.support.node_ranks:{entry}",
                    label=f"tp/{rank}",
                    payload=payload.encode(),
                )
                for rank in ranks
            ),
        )
        before = len(self.told.of("Started", number))
        self.owner.send(number, order)
        started, _ = self.told.wait("Started", number, before + 1)
        assert isinstance(started, Started)
        assert started.number == order.number
        return started.pids

    def close(self) -> None:
        self.owner.close()
        wait_until(lambda: not self.owner.nodes.nodes, "the end of all nodes")
        self._engine.close()
        self.gateway.close()


class Cluster(NodeGroup):
    """The same with nodes that are local processes."""

    def __init__(
        self,
        loop: EventLoop,
        launcher: Launcher,
        limits: NodeLimits = QUICK,
        options: Zmq | None = None,
        **engine: Any,
    ) -> None:
        self.engine = LocalEngine(loop, **engine)
        super().__init__(loop, launcher, self.engine, limits, options or Zmq())

    def processes(self, number: int) -> dict[int, Any]:
        """Return everything that came from that node, its process included."""
        place = self.engine.starters[number]._tag.pattern
        return dict(process_tree.find(process_tree.TreeTarget(place))[0])


def ended(detail: Any) -> Ended:
    assert isinstance(detail, Ended)
    return detail


def seconds_until(holds: Callable[[], object], since: float) -> float:
    wait_until(holds)
    return time.monotonic() - since


def kill(pid: int, number: int = signal.SIGKILL) -> float:
    """Send the signal, and return the moment before it."""
    at = time.monotonic()
    os.kill(pid, number)
    return at


def last_pulse(file: Path) -> float:
    """Return when the rank that writes *file* last ran, on the monotonic clock."""
    data = file.read_bytes() if file.exists() else b""
    return float(data) if data else 0.0
