"""`NodePool`: the nodes of one group, the placement of its ranks, and their processes there.

- A rank whose node serves stays on it. One whose node was lost gets another only when that is
  fenced, and it is to be started; nothing is started on a suspect.
- A launch starts all of its ranks, on any nodes, or none.
- The loss of a node is reported once, with all of its ranks; so is that of nodes lost by one cause.
- Machines beyond those that the ranks need are kept as spares, in the configured number.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections import defaultdict
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Protocol

from phalanx.cluster.link.messages import (
    Ended,
    Kill,
    Launch,
    NotStarted,
    Output,
    RankLaunch,
    RelayLink,
    StackText,
    Started,
    Stopped,
    Warm,
    Withdraw,
)
from phalanx.cluster.link.node_gateway import NodeGateway
from phalanx.cluster.nodes.decide import HELD, NodeLimits, NodeState
from phalanx.cluster.nodes.placement import place
from phalanx.runtime import NodeInfo, Place, Zmq
from phalanx.supervision import NodeRefused, NoNode, RuntimeFault

from .events import (
    EngineGone,
    NodeFenced,
    NodeJoined,
    NodeLost,
    NodeQuarantined,
    NodeRecovered,
    NodeSuspect,
)
from .node_owner import NodeOwner
from .remote_process import RemoteProcess

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence

    from phalanx.cluster.link.messages import Greeting, Message
    from phalanx.cluster.nodes.decide import Node
    from phalanx.runtime import EventLoop, Launcher, LoggedEvent

    from .options import ClusterOptions

_SLICE = 0.25  # seconds after which a launch that waits looks whether it is still wanted
_UNDO = 10.0  # seconds for what a launch that failed has started
_CLOSE = 10.0  # seconds beyond those that a node has to leave


class PoolEvents(Protocol):
    """Callbacks of the pool, on the event loop's thread."""

    def lost(self, ranks: Mapping[int, int], why: str) -> None:
        """Nodes are lost of one cause, and with them these incarnations of these ranks."""

    def fenced(self, node: int, why: str) -> None:
        """A node that was lost is known to run nothing any longer, and by what."""

    def changed(self) -> None:
        """Nodes have joined, been fenced, or recovered: ask again for places."""

    def failed(self, error: NoNode | NodeRefused) -> None:
        """No machine could be had, or one that does not fit."""

    def refused(self, address: str, why: str) -> None:
        """A connection was refused."""

    def happened(self, event: LoggedEvent) -> None:
        """Publish *event*."""


@dataclass(slots=True, eq=False)
class _Launch:
    """A launch under way.

    Attributes:
        waits_for: The nodes that have not answered, by the number of their order.
        started: Its processes, by rank.
    """

    on_exit: Callable[[RemoteProcess], None]
    on_output: Callable[[RemoteProcess, Output], None]
    waits_for: dict[int, int] = field(default_factory=dict[int, int])
    orders: dict[int, tuple[RankLaunch, ...]] = field(
        default_factory=dict[int, tuple[RankLaunch, ...]]
    )
    started: dict[int, RemoteProcess] = field(default_factory=dict[int, RemoteProcess])
    error: str = ""


@dataclass(slots=True, eq=False)
class Reservation:
    """Machines for a group of *size*; see `NodePool.reserve_machines`.

    Attributes:
        error: Why there are too few.
        is_confirmed: Whether the group is about to be formed.
    """

    size: int
    error: NoNode | NodeRefused | None = None
    is_confirmed: bool = False


class NodePool:
    """See the module. Thread-safe.

    Args:
        preload: Modules that a node imports once for all its ranks.
        env: Variables of all ranks.
        gpus_per_rank: How many GPUs each rank gets; 0 for none.
    """

    def __init__(
        self,
        loop: EventLoop,
        launcher: Launcher,
        options: ClusterOptions,
        events: PoolEvents,
        *,
        group: str,
        preload: Sequence[str],
        env: Mapping[str, str],
        gpus_per_rank: float,
    ) -> None:
        self._loop = loop
        self._launcher = launcher
        self._options = options
        self._events = events
        self._group = group
        self._preload = tuple(preload)
        self._env = dict(env)
        self._engine = options.engine(loop, gpus_per_rank=gpus_per_rank)
        self._owner: NodeOwner | None = None
        self._gateway: NodeGateway | None = None
        self._ranks_per_node = 0
        self._changed = threading.Condition()
        self._greetings: dict[int, Greeting] = {}
        self._lost: set[int] = set()  # nodes that are not fenced yet
        self._together: dict[str, dict[int, int]] = {}  # lost ranks that are not told, by the cause
        self._at: dict[int, int] = {}  # rank -> node
        self._size = 0  # of the group that was last to be placed
        self._reservations: list[Reservation] = []
        self._left: set[int] = set()  # nodes that were asked to end, and may not have the order yet
        self._processes: dict[tuple[int, int], RemoteProcess] = {}  # by rank and incarnation
        self._orders = itertools.count(1)
        self._launches: dict[int, _Launch] = {}  # by the numbers of their orders
        self._under_way: list[_Launch] = []
        self._is_empty = False
        self._is_closed = False
        self.address = ""

    def open(self) -> None:
        """Reach the cluster, and listen for its nodes. Not on the event loop's thread.

        Raises:
            RuntimeFault: the engine does not reach it, or this machine cannot listen.
        """
        cluster = self._engine.open()
        self.address = self._options.bind or cluster.address
        self._ranks_per_node = self._options.ranks_per_node or cluster.ranks_per_node
        host = f"[{self.address}]" if ":" in self.address else self.address
        wait = self._options.node_wait
        limits = NodeLimits(
            lease=self._options.node_timeout, wait=math.inf if wait is None else wait
        )

        # A silent node is lost as a whole, at its timeout. Its links are to outlast that: after a
        # cut that it has outlived, TCP may be silent for as long again.
        silence = 1.0 + 2.0 * self._options.node_timeout
        zmq = Zmq(bind=f"tcp://{host}", heartbeat=min(1.0, silence / 4), lost_after=silence)

        def gateway(owner: NodeOwner) -> NodeGateway:
            self._gateway = NodeGateway(
                self._loop,
                self._launcher,
                zmq,
                group=self._group,
                events=owner,
                on_event=self._events.happened,
            )
            return self._gateway

        owner = NodeOwner(self._loop, self._engine, gateway, limits, self)
        self.gateway.open()
        self._owner = owner

    @property
    def gateway(self) -> NodeGateway:
        """Through which its nodes and ranks are reached; there is one once it has been opened."""
        assert self._gateway is not None
        return self._gateway

    # --- places ---------------------------------------------------------------------------

    def place(self, size: int, ranks: Sequence[int], *, begins: bool = False) -> str:
        """Give each of *ranks*, in a group of *size*, a node; return what is waited for, or "".

        Missing nodes are requested; those that no rank needs any longer are released. Where a
        wait *begins*, `node_wait` runs from now on.
        """
        with self._changed:
            self._size = size
            missing = self._place(size, ranks)
            self._request(begins=begins and bool(missing))  # else it puts off no other's limit
            if not missing:
                self._let_idle_go()
            return missing

    def _place(self, size: int, ranks: Sequence[int]) -> str:
        before = {rank: node for rank, node in self._at.items() if rank < size}
        lost = {node.number for node in self._nodes() if node.state is NodeState.LOST}
        unfenced = sorted({before[r] for r in ranks if before.get(r) in lost})
        if unfenced:
            return f"{self._names(unfenced)} to be fenced"
        held, asked = self._held(), set(ranks)
        placed_now = [r for r in range(size) if r in asked or before.get(r) in held]
        placed = place(placed_now, dict.fromkeys(held, self._ranks_per_node), before)
        if placed is None:
            return f"{self._nodes_for(size)} nodes, of which {len(held)} serve"
        suspects = sorted({placed[r] for r in ranks if held[placed[r]] is NodeState.SUSPECT})
        if suspects:
            return f"{self._names(suspects)} to be heard"
        self._at = {**before, **placed}  # the others get a node when they are to be started
        self._reservations = [
            each for each in self._reservations if not each.is_confirmed or each.size != size
        ]
        return ""

    @contextmanager
    def reserve_machines(self, size: int) -> Generator[Reservation]:
        """Request machines for a group of *size*, beside all that runs.

        They are let go at the end, unless the reservation was confirmed: then once a group of that
        size has been placed.
        """
        with self._changed:
            reservation = Reservation(size)
            begins = not self._reservations
            self._reservations.append(reservation)
            self._request(begins=begins)
        try:
            yield reservation
        finally:
            with self._changed:
                if not reservation.is_confirmed:
                    self._reservations.remove(reservation)
                    self._request()
                    self._let_idle_go()

    def await_machines(
        self, reservation: Reservation, deadline: float | None, is_wanted: Callable[[], bool]
    ) -> bool:
        """Return whether the machines of *reservation* are there; wait for those that are not.

        Args:
            deadline: On the monotonic clock; None for no limit but `node_wait`.
            is_wanted: Asked while it waits; if it returns False there is no more waiting.

        Raises:
            NoNode, NodeRefused: one could not be had, or does not fit.
        """
        with self._changed:
            while not self.has_machines(reservation.size):
                if reservation.error is not None:
                    raise reservation.error
                left = _SLICE if deadline is None else min(_SLICE, deadline - time.monotonic())
                if left <= 0 or self._is_closed or not is_wanted():
                    return False
                self._changed.wait(left)
            return True

    def has_machines(self, size: int) -> bool:
        """Return whether all machines of a group of *size* are there just now."""
        with self._changed:
            return len(self._held()) >= self._nodes_for(size)

    def _request(self, *, begins: bool = False) -> None:
        """Request the nodes that are missing, and no others any longer."""
        assert self._owner is not None
        if not self._is_closed:
            self._owner.want(self._nodes_wanted + self._options.spare_nodes, begins=begins)

    def _let_idle_go(self) -> None:
        """Release the nodes that no rank needs, but for spares and what is to be placed yet."""
        assert self._owner is not None
        if self._is_closed:
            return
        held, placed = self._held(), set(self._at.values())
        kept = max(0, self._nodes_wanted - len(held.keys() & placed)) + self._options.spare_nodes
        for number in sorted(held.keys() - placed)[kept:]:
            self._left.add(number)
            self._owner.leave(number)

    @property
    def _nodes_wanted(self) -> int:
        """How many nodes the ranks need, and those of groups that are to be placed."""
        return self._nodes_for(max((self._size, *(each.size for each in self._reservations))))

    def _held(self) -> dict[int, NodeState]:
        """Return the nodes that serve."""
        known = self._greetings.keys() - self._left
        return {n.number: n.state for n in self._nodes() if n.state in HELD and n.number in known}

    def _nodes(self) -> tuple[Node, ...]:
        assert self._owner is not None
        return self._owner.nodes.nodes

    def _nodes_for(self, size: int) -> int:
        return math.ceil(size / self._ranks_per_node)

    def places(self) -> dict[int, Place]:
        """Return where each rank is."""
        with self._changed:
            at = dict(sorted(self._at.items()))
            numbers = list(dict.fromkeys(at.values()))
            by_node = {n: [rank for rank, node in at.items() if node == n] for n in numbers}
            return {
                rank: Place(
                    node=node,
                    host=self._host(node),
                    local_rank=by_node[node].index(rank),
                    local_size=len(by_node[node]),
                    index=numbers.index(node),
                    nodes=len(numbers),
                )
                for rank, node in at.items()
            }

    def nodes(self) -> tuple[NodeInfo, ...]:
        """Return how the nodes are."""
        owner = self._owner
        if owner is None:
            return ()
        with self._changed:
            now, leased = self._loop.time(), defaultdict[int, dict[str, None]](dict)
            for process in self._processes.values():
                if process.device != "cpu":
                    leased[process.node] |= dict.fromkeys(process.device.split(","))
            return tuple(
                NodeInfo(
                    node.number,
                    self._host(node.number),
                    str(node.state),
                    tuple(sorted(r for r, at in self._at.items() if at == node.number)),
                    "" if (known := self._greetings.get(node.number)) is None else known.place,
                    devices=tuple(sorted(leased[node.number])),
                    beat_age=max(0.0, now - node.last_received_at)
                    if node.last_received_at
                    else None,
                )
                for node in owner.nodes.nodes
            )

    # --- launches ---------------------------------------------------------------------------

    def launch(
        self,
        ranks: Sequence[RankLaunch],
        links: Mapping[int, RelayLink],
        *,
        on_exit: Callable[[RemoteProcess], None],
        on_output: Callable[[RemoteProcess, Output], None],
        deadline: float,
        is_wanted: Callable[[], bool],
    ) -> list[RemoteProcess]:
        """Start *ranks* on their nodes, all or none; return once they run.

        Args:
            links: How the process beside the ranks of each node is reached.
            on_exit: Called once with each process that has ended, on the event loop's thread.
            on_output: Called with what a process has written, there too.
            deadline: On the monotonic clock.
            is_wanted: Asked while it waits; the launch is given up if it returns False.

        Raises:
            RuntimeFault: one could not be started, its node was lost, or the launch was given up.
        """
        owner = self._owner
        assert owner is not None
        launch = _Launch(on_exit, on_output)
        within = max(0.0, deadline - time.monotonic())
        with self._changed:
            self._under_way.append(launch)
            by_node: dict[int, list[RankLaunch]] = {}
            for rank in ranks:
                by_node.setdefault(self._at[rank.rank], []).append(rank)
            for node, some in by_node.items():
                if node in self._lost or node not in self._greetings:
                    launch.error = f"{self._host(node)} was lost"
                    break  # it answers no order
                number = next(self._orders)
                launch.waits_for[number], launch.orders[number] = node, tuple(some)
                self._launches[number] = launch
                order = Launch(
                    number=number,
                    ranks=tuple(some),
                    link=links.get(node),
                    preload=self._preload,
                    within=within,
                )
                owner.send(node, order)
            while launch.waits_for and not launch.error:
                if time.monotonic() >= deadline:
                    silent = self._names(sorted({*launch.waits_for.values()}))
                    launch.error = f"{silent}: no answer in {within:.0f} s"
                elif not is_wanted():
                    launch.error = "it was given up"
                else:
                    self._changed.wait(_SLICE)
            if not launch.error:
                self._under_way.remove(launch)
                return [launch.started[rank.rank] for rank in ranks]
            for number, node in launch.waits_for.items():
                owner.send(node, Withdraw(number=number))
        self._undo(launch)
        raise RuntimeFault(f"the ranks were not started: {launch.error}")

    def _undo(self, launch: _Launch) -> None:
        """End what a launch that has failed has started."""
        deadline = time.monotonic() + _UNDO
        with self._changed:
            self._changed.wait_for(lambda: not launch.waits_for, _UNDO)
            started = list(launch.started.values())
        for process in started:
            process.kill_tree(deadline)
        with self._changed:
            self._under_way.remove(launch)

    # --- the end ----------------------------------------------------------------------------

    def close(self) -> None:
        """End all nodes, the gateway and the engine. Not on the event loop's thread."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._owner is not None:
            self._owner.close()
            limits = self._owner.nodes.limits
            with self._changed:
                self._changed.wait_for(lambda: self._is_empty, limits.leave + _CLOSE)
        self._engine.close()
        if self._gateway is not None:
            self._gateway.close()

    # --- what the owner tells; on the event loop's thread -----------------------------------

    def admitted(self, number: int, greeting: Greeting) -> None:
        """See `NodeListener`."""
        with self._changed:
            self._greetings[number] = greeting
            self._let_idle_go()  # it may have been requested by what has been given up meanwhile
            self._changed.notify_all()
        self._send(number, Warm(preload=self._preload, env=self._env))
        self._happened(partial(NodeJoined), number)
        self._events.changed()

    def suspected(self, number: int, why: str) -> None:
        """See `NodeListener`."""
        self._happened(partial(NodeSuspect, why=why), number)

    def recovered(self, number: int) -> None:
        """See `NodeListener`."""
        self._happened(partial(NodeRecovered), number)
        self._events.changed()

    def lost(self, number: int, why: str) -> None:
        """See `NodeListener`."""
        if number not in self._greetings:
            return
        with self._changed:
            self._lost.add(number)
            gone = {key: p for key, p in self._processes.items() if p.node == number}
            for key, process in gone.items():
                del self._processes[key]
                process.lost()
            for order, launch in list(self._launches.items()):
                if launch.waits_for.get(order) == number:
                    launch.error = f"{self._host(number)} was lost: {why}"
                    self._answered(order)
            for launch in self._under_way:
                for key in [key for key in gone if gone[key] in launch.started.values()]:
                    launch.error = f"{self._host(number)} was lost: {why}"
                    del gone[key]  # the end of the launch is theirs
            self._changed.notify_all()
        ranks = {process.rank: process.incarnation for process in gone.values()}
        event = partial(NodeLost, why=why, ranks=tuple(sorted(ranks)))
        self._happened(event, number)
        node = None if self._owner is None else self._owner.nodes.find(number)
        if node is None or node.counts_against_machine:
            self._events.lost(ranks, f"node {number} ({self._host(number)}) was lost: {why}")
            return
        if not self._together:  # the other nodes that this has cost have been posted by now
            self._loop.post(self._tell_lost)
        self._together.setdefault(why, {}).update(ranks)

    def _tell_lost(self) -> None:
        together, self._together = self._together, {}
        for why, ranks in together.items():
            self._events.lost(ranks, f"its node was lost: {why}")

    def fenced(self, number: int, why: str) -> None:
        """See `NodeListener`."""
        self._tell_lost()  # a report has to be there to be completed
        if number in self._lost:
            self._happened(partial(NodeFenced, why=why), number)
            self._events.fenced(number, why)
        with self._changed:
            self._lost.discard(number)
            self._left.discard(number)
            self._greetings.pop(number, None)
        self._events.changed()

    def received(self, number: int, message: Message) -> None:
        """See `NodeListener`."""
        match message:
            case Started():
                self._started(number, message)
            case NotStarted():
                with self._changed:
                    launch = self._answered(message.number)
                    if launch is not None:
                        launch.error = launch.error or f"{self._host(number)}: {message.error}"
                    self._changed.notify_all()
            case Output():
                process = self._processes.get((message.rank, message.incarnation))
                if process is not None:
                    process.wrote(message)
            case Ended():
                with self._changed:
                    process = self._processes.pop((message.rank, message.incarnation), None)
                if process is not None:
                    process.ended(message)
            case Stopped():
                for process in list(self._processes.values()):
                    if process.node == number:
                        process.note_stopped(is_stopped=process.rank in message.ranks)
            case StackText():
                process = self._processes.get((message.rank, message.incarnation))
                if process is not None:
                    process.threads = message.text
            case _:
                pass

    def refused(self, address: str, why: str) -> None:
        """See `NodeListener`."""
        self._events.refused(address, why)

    def engine_gone(self, why: str) -> None:
        """See `NodeListener`."""
        self._events.happened(EngineGone(group=self._group, why=why, at=self._loop.time()))

    def put_aside(self, number: int, greeting: Greeting, until: float) -> None:
        """See `NodeListener`."""
        with self._changed:
            self._greetings[number] = greeting
        seconds = until - self._loop.time()
        self._happened(partial(NodeQuarantined, seconds=seconds), number)

    def emptied(self) -> None:
        """See `NodeListener`."""
        with self._changed:
            self._is_empty = True
            self._changed.notify_all()

    def failed(self, error: RuntimeFault) -> None:
        """See `NodeListener`."""
        told = error if isinstance(error, NodeRefused | NoNode) else NoNode(str(error))
        with self._changed:
            for reservation in self._reservations:
                reservation.error = copy(told)
            self._changed.notify_all()
        self._events.failed(told)

    def _started(self, number: int, message: Started) -> None:
        with self._changed:
            launch = self._answered(message.number)
            if launch is None:
                return
            ranks = launch.orders[message.number]
            for rank, pid, device in zip(ranks, message.pids, message.devices, strict=True):
                process = RemoteProcess(
                    number,
                    self._host(number),
                    rank.rank,
                    rank.incarnation,
                    label=f"{rank.label}#{rank.incarnation}",
                    pid=pid,
                    device=device,
                    send=partial(self._send, number),
                    on_exit=launch.on_exit,
                    on_output=launch.on_output,
                )
                self._processes[rank.rank, rank.incarnation] = process
                launch.started[rank.rank] = process
                if launch.error:  # it has been given up meanwhile
                    self._send(number, Kill(rank=rank.rank, incarnation=rank.incarnation))
            self._changed.notify_all()

    def _answered(self, order: int) -> _Launch | None:
        launch = self._launches.pop(order, None)
        if launch is not None:
            launch.waits_for.pop(order, None)
        return launch

    def _send(self, number: int, message: Message) -> None:
        if self._owner is not None:
            self._owner.send(number, message)

    def _host(self, number: int) -> str:
        greeting = self._greetings.get(number)
        return greeting.host if greeting is not None else ""

    def _names(self, numbers: Sequence[int]) -> str:
        names = (f"node {number} ({self._host(number)})" for number in numbers)
        return ", ".join(names)

    def _happened(self, event: Callable[..., LoggedEvent], number: int) -> None:
        now, host = self._loop.time(), self._host(number)
        self._events.happened(event(group=self._group, node=number, host=host, at=now))
