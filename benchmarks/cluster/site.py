"""`Site`: a group with ranks on nodes, faults of the nodes, and the time that recoveries take.

Times are those at which the driver gets an event, on the monotonic clock.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import uuid
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Self

from tests.support.node_engine import LocalNodes

from phalanx import Executor, Intensity, Launch, Strategy, WorkerActor
from phalanx.errors import WorkerDied
from phalanx.events import WorkerStarted
from phalanx.runtime import procfs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from phalanx import Runtime
    from phalanx.cluster import ClusterOptions
    from phalanx.cluster.link.messages import NodeOrder
    from phalanx.runtime.linux.procfs import Task

    from .machines import Machines

LONG = 120.0  # seconds
TIMEOUT = 3.0  # seconds of silence that make a node lost
_POLL = 0.002  # seconds; the kernel reports the end of children only, and these are none


class Member(WorkerActor):
    """A rank."""

    def ping(self, *_values: Any) -> None:
        """Answer."""

    def hold(self) -> None:
        """Be at work until it is killed."""
        time.sleep(LONG)

    def add_up(self) -> float:
        """Answer with a result of torch."""
        torch: Any = import_module("torch")  # in the ranks only
        return float(torch.ones(1).sum())


class Site:
    """An executor on nodes, of *per_node* ranks each, and *spares* beside them.

    Args:
        options: The nodes; None has local ones on *machines*.
        given: Further options of the executor.
    """

    def __init__(
        self,
        machines: Machines,
        ranks: int,
        per_node: int,
        spares: int = 0,
        *,
        options: ClusterOptions | None = None,
        worker: type[WorkerActor] = Member,
        runtime: Runtime,
        **given: Any,
    ) -> None:
        self._machines = machines
        self._up = -(-ranks // per_node) + spares
        self._stopped: list[Task] = []
        self._received: list[tuple[Any, float]] = []
        self._news = threading.Condition()
        self._options = options or LocalNodes(
            ranks_per_node=per_node,
            spare_nodes=spares,
            node_timeout=TIMEOUT,
            bind=machines.here,
            engine_options={
                "slots": machines.count,
                "prefix": machines.prefix,
                "edit": _elsewhere,
            },
        )
        usual: dict[str, Any] = {
            "strategy": Strategy.ONE_FOR_ONE,
            "launch": Launch(preload=()),
            "devices": "cpu",
        }
        self.group: Executor[Any] = Executor(
            worker,
            ranks,
            cluster=self._options,
            intensity=Intensity(1_000_000, 1.0),
            runtime=runtime,
            **{**usual, **given},
        )
        self.group.subscribe(self._on_event)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.heal()
        self.group.close()

    # --- nodes ----------------------------------------------------------------------------

    def settle(self) -> None:
        """Return when every rank serves, and every node is up, spares included.

        Nodes on machines that were lost twice stand aside.
        """
        deadline = time.monotonic() + LONG
        while [e.state for e in self.group.status().nodes if e.state != "aside"] != [
            "up"
        ] * self._up:
            if time.monotonic() > deadline:
                raise TimeoutError(f"the nodes are {self.group.status().nodes}")
            time.sleep(_POLL)
        self.group.collective_rpc(nothing, LONG, retries=100)

    def pid_of(self, rank: int) -> int:
        """Return the process of *rank*."""
        return self.group.ranks[rank].pid or 0

    def above(self, rank: int, steps: int = 0) -> int:
        """Return the node process of *rank*, or what is so many *steps* above that."""
        line = list(procfs.ancestors(self.pid_of(rank)))
        is_node = ["node_process.main" in procfs.command(pid) for pid in line]
        return line[is_node.index(True) + steps]

    def nodes(self, *, spares: bool = False) -> list[int]:
        """Return the numbers of the nodes that have ranks, or of all."""
        return [each.node for each in self.group.status().nodes if each.ranks or spares]

    def processes(self, nodes: Iterable[int]) -> list[Task]:
        """Return every process of these *nodes*."""
        return tree(*(self._engine.pid_of(node) for node in nodes))

    # --- what happens to it ---------------------------------------------------------------

    def silence(self, nodes: Sequence[int]) -> None:
        """Cut the machines of *nodes* off; where that cannot be done, stop all that runs there."""
        for node in nodes:
            self._engine.mute(node)  # what has started it would be cut off too
        if not self._machines.why_not:
            self._machines.cut(*(self._engine.slot_of[node] for node in nodes))
            return
        for _ in range(2):  # what was being started meanwhile
            self._stopped = self.processes(nodes)
            _signal(self._stopped, signal.SIGSTOP)

    def heal(self) -> None:
        """Undo what `silence` did."""
        self._machines.heal()
        _signal(self._stopped, signal.SIGCONT)
        self._stopped = []

    def strike(
        self,
        act: Callable[[], object],
        news: type,
        ends: Sequence[Task] = (),
        *,
        at_work: bool = False,
    ) -> dict[str, float]:
        """Do *act*, and call at once, with retries; return the seconds until each of these.

        ``known``: an event of type *news*. ``next``: the answer to that call. ``failed``: the
        failure of a call in flight, if the ranks are to be *at_work*. ``gone``: the end of all of
        *ends*, if there are any; ``overlap`` is how many ranks were started before it.
        """
        since, at = self.mark(), dict[str, float]()
        held: Any = self._hold() if at_work else None
        began = time.monotonic()
        act()
        call: Any = self.group.collective_rpc(nothing, LONG, retries=100, non_block=True)
        for what, future in (("next", call), ("failed", held)):
            if future is not None:
                future.add_done_callback(partial(self._note, at, what))
        if ends:
            wait_ended(ends)
            at["gone"] = time.monotonic()
        call.result(LONG)
        self.heal()  # not before: a machine that is silent sends nothing of its end either
        if held is not None and not isinstance(held.exception(LONG), WorkerDied):
            raise AssertionError("ranks that were to be lost have answered")
        at["known"] = self.wait(news, since)
        with self._news:  # callbacks may come after the results of their calls
            self._news.wait_for(lambda: "next" in at and ("failed" in at or held is None), LONG)
        took = {what: moment - began for what, moment in at.items()}
        if ends:
            started = [event.at for event, _ in self.events_since(WorkerStarted, since)]
            took["overlap"] = float(sum(moment < at["gone"] for moment in started))
        return took

    def _hold(self) -> Any:
        call = self.group.collective_rpc("hold", LONG, non_block=True, retries=0)
        deadline = time.monotonic() + LONG
        while not all(each.method == "hold" for each in self.group.ranks):
            if time.monotonic() > deadline:
                raise TimeoutError(f"not all ranks are at work: {self.group.ranks}")
            time.sleep(_POLL)
        return call

    # --- what it tells --------------------------------------------------------------------

    def mark(self) -> int:
        """Return how many events there were until now, for `wait` and `events_since`."""
        return len(self._received)

    def wait(self, kinds: type | tuple[type, ...], since: int) -> float:
        """Return when the first event of *kinds* after the first *since* was heard."""
        with self._news:
            if not self._news.wait_for(lambda: self.events_since(kinds, since), LONG):
                raise TimeoutError(f"none of the events {kinds} came")
        return self.events_since(kinds, since)[0][1]

    def events_since(self, kinds: type | tuple[type, ...], since: int) -> list[tuple[Any, float]]:
        """Return the events of *kinds* after the first *since*, and when each was heard."""
        return [each for each in self._received[since:] if isinstance(each[0], kinds)]

    def _note(self, at: dict[str, float], what: str, _: Any = None) -> None:
        with self._news:
            at[what] = time.monotonic()
            self._news.notify_all()

    def _on_event(self, event: Any) -> None:
        with self._news:
            self._received.append((event, time.monotonic()))
            self._news.notify_all()

    @property
    def _engine(self) -> Any:
        assert isinstance(self._options, LocalNodes)
        return self._options.engines[0]


def _elsewhere(order: NodeOrder) -> NodeOrder:
    """Give each node another place, so that none is put aside for being lost so often."""
    return replace(order, place=uuid.uuid4().hex)


def nothing(_worker: object) -> None:
    """Do nothing, in any rank."""


def kill(*pids: int) -> None:
    """Kill these processes."""
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def tree(*roots: int) -> list[Task]:
    """Return the processes *roots*, and all that descend from them."""
    tasks = procfs.read_all()
    found = procfs.descendants(tasks, roots)
    return [*(tasks[pid] for pid in roots if pid in tasks), *found.values()]


def wait_ended(tasks: Iterable[Task]) -> None:
    """Return when all of *tasks* have ended."""
    left, deadline = list(tasks), time.monotonic() + LONG
    while left := [each for each in left if _runs(each)]:
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {[each.pid for each in left]} do not end")
        time.sleep(_POLL)


def _runs(task: Task) -> bool:
    now = procfs.read(task.pid)
    return now is not None and now.key == task.key and not now.is_dead


def _signal(tasks: Iterable[Task], number: int) -> None:
    for task in tasks:
        if _runs(task):
            os.kill(task.pid, number)
