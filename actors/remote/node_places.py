"""Places on the nodes of a cluster for the ranks of a group: requested by each start.

- The group uses them like devices of one machine: a start without places waits, and requests
  them again when nodes have changed.
- The cluster is reached once, beside the actor, at the first request.
- A failure of the engine ends the starts that wait for it, and so the group.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from phalanx.cluster import NodeAwaited, NodePool
from phalanx.runtime import Lease, PeerRejected
from phalanx.supervision import NoNode

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from phalanx.actors.group.handle import Group
    from phalanx.actors.group.launcher import Join
    from phalanx.cluster import ClusterOptions
    from phalanx.runtime import DeviceStatus, LoggedEvent, NodeInfo, Place
    from phalanx.supervision import NodeRefused, StartRanks

_OPENING = 30.0  # seconds for a cluster that is being reached when the group ends


class NodePlaces:
    """The places of one group. Stands for a `DeviceLeases`; used by its actor's thread alone.

    Args:
        retry: Called with a start that is to ask for its places again.
        lost: Called with the ranks of a node that is lost, their incarnations, and why.
        fenced: Called when one more node that was lost is in `fences`.

    Attributes:
        pool: The nodes.
        gpus: How many GPUs each rank gets, or which part of one; 0 for none.
        fences: How it is known of lost nodes that nothing of them runs, by their numbers.
    """

    def __init__(
        self,
        group: Group,
        options: ClusterOptions,
        retry: Callable[[StartRanks], None],
        lost: Callable[[Mapping[int, int], str], None],
        fenced: Callable[[], None],
    ) -> None:
        self._group = group
        self._options = options
        self._retry = retry
        self._lost = partial(group.post, lost)
        self._fenced = partial(group.post, fenced)
        self.fences: dict[int, str] = {}
        spec, runtime = group.spec, group.runtime
        self.gpus = 0.0 if spec.devices.names == "cpu" else spec.devices.per_rank
        self.pool = NodePool(
            runtime.loop,
            runtime.launcher,
            options,
            self,
            group=spec.name,
            preload=spec.launch.preload,
            env=spec.launch.env,
            gpus_per_rank=self.gpus,
        )
        self._waiting: set[StartRanks] = set()
        self._opening: Join | None = None
        self._is_open = False
        self._error: BaseException | None = None

    def place_of(self, rank: int) -> Place:
        """Return where *rank* is."""
        return self.pool.places()[rank]

    def nodes(self) -> tuple[NodeInfo, ...]:
        """Return how the nodes are; any thread's."""
        return self.pool.nodes()

    def ask(self, start: StartRanks, *, first: bool) -> dict[int, Lease] | None:
        """Give each rank of *start* a place, and return its lease; None if places are waited for.

        Raises:
            NoDevice, RuntimeFault: there is none, and no more waiting.
        """
        if self._error is not None:
            self._waiting.discard(start)
            if first or isinstance(self._error, NoNode):
                raise self._error
            raise NoNode(str(self._error)) from self._error  # another try would meet the same
        ranks = tuple(rank for rank, _ in start.ranks)
        begins = start not in self._waiting
        if self._is_open:
            why = self.pool.place(start.size, ranks, begins=begins)
        else:
            why = "the cluster to be reached"
        if not why:
            self._waiting.discard(start)
            return {rank: self._lease(rank) for rank in ranks}
        if start not in self._waiting:
            self._waiting.add(start)
            self._group.publish(
                NodeAwaited(
                    group=self._group.spec.name,
                    ranks=ranks,
                    reason=why,
                    timeout=self._options.node_wait,
                    at=self._group.clock(),
                    level="info" if first else "warning",
                )
            )
        if self._opening is None:
            thread = f"phalanx-cluster {self._group.spec.name}"
            self._opening = self._group.spawn(self._open, thread)
        return None

    def withdraw(self, ranks: frozenset[int]) -> list[StartRanks]:
        """Return the starts that any of *ranks* waits in; they wait no more."""
        gone = [s for s in self._waiting if any(rank in ranks for rank, _ in s.ranks)]
        self._waiting.difference_update(gone)
        return gone

    def give_back(self, lease: Lease, pid: int | None) -> None:
        """Do nothing: a device is its node's to give."""

    def give_all_back(self, leases: Mapping[int, Lease]) -> None:
        """Do nothing; as above."""

    def look(self) -> dict[Lease, str]:
        """Return no lease: a node looks at its own devices."""
        return {}

    def status(self) -> tuple[DeviceStatus, ...]:
        """Return nothing; as above."""
        return ()

    def close(self) -> None:
        """End all nodes, and let the cluster go."""
        if self._opening is not None:
            self._opening(_OPENING)
        self.pool.close()

    def _lease(self, rank: int) -> Lease:
        holder = f"{self._group.spec.name}/{rank}"
        if not self.gpus:
            return Lease.cpu(holder, 1)
        names = tuple(f"cuda:{index}" for index in range(max(1, int(self.gpus))))
        return Lease((), names, share=min(1.0, self.gpus), holder=holder)

    def _open(self) -> None:
        """Reach the cluster; on a thread of its own."""
        try:
            self.pool.open()
        except Exception as error:  # noqa: BLE001  # raised by the starts that wait
            self._group.post(self._opened, error)
        else:
            self._group.post(self._opened, None)

    def _opened(self, error: Exception | None) -> None:
        self._is_open, self._error = error is None, error
        self._ask_again()

    def _ask_again(self) -> None:
        for start in tuple(self._waiting):
            if start in self._waiting:
                self._retry(start)

    def _give_up(self, error: NoNode | NodeRefused) -> None:
        # A start for which enough serve waits for something else, such as the end of a lease.
        if any(not self.pool.has_machines(start.size) for start in self._waiting):
            self._error = error
            self._ask_again()
        else:
            self._group.log.warning("phalanx.node_missing", why=str(error))

    # --- what the pool tells; on the event loop's thread ------------------------------------

    def lost(self, ranks: Mapping[int, int], why: str) -> None:
        """See `PoolEvents`."""
        self._lost(ranks, why)

    def fenced(self, node: int, why: str) -> None:
        """See `PoolEvents`."""
        self.fences[node] = why
        self._fenced()

    def changed(self) -> None:
        """See `PoolEvents`."""
        self._group.post(self._ask_again)

    def failed(self, error: NoNode | NodeRefused) -> None:
        """See `PoolEvents`."""
        self._group.post(self._give_up, error)

    def refused(self, address: str, why: str) -> None:
        """See `PoolEvents`."""
        name, now = self._group.spec.name, self._group.clock()
        self._group.publish(PeerRejected(group=name, address=address, why=why, at=now))

    def happened(self, event: LoggedEvent) -> None:
        """See `PoolEvents`."""
        self._group.publish(event)
